"""One request from its ext_proc message to its answer and its end, and the registry of endpoints.

- ``assembly``: makes a director with its parts by the settings.
- ``director``: answers or queues each request, and remembers what was decided.
- ``request_context``: one request on its way: what it asks, and what of it is cached where.
- ``answered_requests``: figures and log lines of answered requests.
- ``decision_log``: the last decisions, with what came true.
- ``request_progress``: what engines report of a request after the pick, and its end.
- ``completion``: what gateways report: which endpoint served, and that the request has ended.
- ``rank_naming``: the data-parallel ranks of the picked endpoints.
- ``explanation``: picks that are not made, for people who ask.
- ``endpoint_state``: all that is known of one endpoint.
- ``endpoint_registry``: which endpoints there are, which are ready, whose events are trusted.
"""
