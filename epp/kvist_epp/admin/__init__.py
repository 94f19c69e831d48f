"""Pages of the metrics port: health, metrics, the operator's view of the fleet, and pages for debugging.

No page changes anything, and none contains prompt text.

- ``admin_server``: the HTTP server, its paths, and errors as JSON.
- ``fleet_page``: ``GET /fleet``, how much each endpoint's cache saves, for the operator.
- ``decision_pages``: ``GET /debug/decisions``, the last decisions of all replicas.
- ``replica_pages``: reads pages of the other replicas.
- ``live``: the live page at ``/``, a package.
- ``slices``: runs the work of large pages in slices, between which picks run.
- ``debug_pages``: contents of the pages under ``/debug``, and the queue's gauges.
"""
