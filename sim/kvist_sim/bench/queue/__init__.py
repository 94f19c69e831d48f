"""``kvist bench queue``: tens of thousands of requests queued in one picker.

- ``command``: runs the three parts: held, drained, bounded.
- ``engines``: process that answers ``/metrics`` for engines of a given load.
- ``judge``: checks fair shares, priorities, deadlines, and the time from a request's end to the next pick.
- ``report``: figures as a table and as JSON.
"""
