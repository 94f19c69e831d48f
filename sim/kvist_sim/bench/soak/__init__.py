"""``kvist bench soak``: load for a long time, memory each second, and what is left afterwards.

- ``command``: runs both parts, direct picks and the whole stack.
- ``judge``: checks the growth of memory and what remains after the load.
- ``report``: figures as a table and as JSON.
"""
