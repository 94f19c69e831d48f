"""Routing policies in virtual time: engines, traffic and routers in one process, without a socket.

- ``world``: one run: engines, traffic and a policy on one agenda.
- ``clock``: the agenda: what happens next.
- ``hardware``: kinds of engines, and the counters of one.
- ``engine``: an engine with its batch.
- ``noting_pool``: its block cache, and the events that it publishes.
- ``loads``: loads from slower places (``kvist_sim.engine.tiers``): the GPU's events, and what is forbidden.
- ``fleet``: the engines of a run, and their changes over time.
- ``traffic``: clients' sessions and turns.
- ``jobs``: requests, their text, and their stay on one engine.
- ``workloads``: the workloads of ``kvist bench route``.
- ``policy``: what a routing policy may see, and what it has to answer.
- ``policies``: the published formulas of other routers.
- ``overlaps``: the index of routers with KV events.
- ``index_feed``: the index of the product's replicas.
- ``ours``: adapter around the product's own director, registry and load tracker.
- ``prewarming``: adapter around the product's own prewarming.
- ``decision_trace``: records decisions of the running product, and replays them here.
- ``ideal``: the ideal pool, with one cache that all engines share, and its capacity.
- ``judge``: figures of a run, and confidence intervals over pairs of runs.
- ``runner``: the cells of a table, in several processes.
- ``kept``: results of runs in a file.
- ``report``: tables and sentences of the results.
- ``legs``: requests that two engines share: first legs, transfers, links.
- ``disaggregation_page``: the part of ``docs/policy.md`` about prefill at another endpoint.
- ``sensitivity``: the effect of halving and doubling each constant of the policy; writes ``docs/policy.md``.
"""
