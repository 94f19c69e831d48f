"""``kvist bench rest`` and ``kvist bench scale``: a picker without requests, with few, and with more
than it can take.

- ``fleet``: a thousand engines in one process, with metrics and KV events.
- ``idle``: CPU without requests.
- ``few``: CPU per request at a low rate.
- ``pages``: how long requests wait while a page of a thousand endpoints is read.
- ``scale``: what saturates first, and what more replicas do.
- ``report``: bounds, tables and JSON.
- ``command``: runs both commands.
"""
