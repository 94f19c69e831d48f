"""``kvist bench routers``: the same traffic through other projects' routers.

- ``command``: runs each router on fresh engines.
- ``kinds``: how each router is installed and started.
- ``dynamo``: client side of Dynamo's selection service.
- ``dynamo_service``: Dynamo's selection service behind a local socket.
- ``report``: figures as a table and as JSON.
"""
