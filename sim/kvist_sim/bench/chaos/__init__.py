"""``kvist bench chaos``: steady load while parts of the stack fail, one at a time.

- ``command``: runs the phases one after the other.
- ``faults``: one function for each fault.
- ``judge``: counts lost and cut requests and checks the bounds.
- ``report``: figures as a table and as JSON.
"""
