"""``kvist bench disaggregation``: what a request in two legs costs the picker, behind a real Envoy.

- ``command``: starts the stack, measures every cell, then sends 200 requests at once; writes the result.
- ``pool``: the engines of both roles, and the picker's view of them.
- ``leg_engines``: process that answers for all engines, first legs as vLLM's NixlConnector does.
- ``burst``: requests that all come at once, before engines whose first leg takes a while.
- ``report``: figures, bounds, tables and JSON.
"""
