"""``kvist bench prewarm``: TTFT through a rolling update, with and without prewarming.

- ``command``: runs both parts and prints the tables.
- ``virtual``: the part in virtual time.
- ``sockets``: the part with the real picker and Envoy.
- ``report``: figures as tables and as JSON.
"""
