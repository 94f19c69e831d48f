"""Benchmarks of the picker, its index and its policy. Each package is one command of ``kvist
bench``, ``rest`` two.

- ``epp``: CPU and latency of the picker behind a real Envoy; older revisions side by side.
- ``index``: the prefix index by itself: ingestion, matching, memory, cost of a pick.
- ``chaos``: steady load while engines, pickers, events, links and certificates fail.
- ``soak``: long load, memory each second, and what is left when the load stops.
- ``queue``: 50,000 requests queued in one picker: memory, fairness, limits.
- ``disaggregation``: what a request in two legs costs, and 200 of them at once.
- ``ends``: gateways without access log, and endpoints without metrics.
- ``templates``: what chat templates cost for the long chats of agents.
- ``traces``: what OpenTelemetry traces cost.
- ``trace_instructions``: the same, counted in machine instructions.
- ``rest``: the picker at rest, at a low rate, and with a thousand endpoints.
- ``prewarm``: a rolling update with and without prewarming.
- ``routers``: the same traffic through other projects' routers.
- ``route``: routing policies in virtual time.
- ``replicas``: what picker replicas cost each other.
- ``harness``: clients, stacks, records and output that several benchmarks share.
"""
