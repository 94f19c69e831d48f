"""Everything that is true of vLLM only, without I/O.

- ``cache_groups``: kinds of KV cache groups, and how many blocks each needs for a hit.
- ``engine_metrics``: parsers of ``/metrics`` and ``/v1/models``, and the rates learned from scrapes.
- ``event_decoder``: KV event messages for one vocabulary, token ids read as the bytes that they stand for.
- ``event_encoder``: the same messages as engines send them, for simulated ones.
- ``extra_keys``: what makes blocks of equal tokens different: adapter, cache salt, media.
- ``kv_events``: KV event messages, old form and new, as events of one form.
- ``tier_metrics``: what engines with slower KV tiers count: cached tokens by tier, bytes, seconds of loads.
- ``transfer_metrics``: the rate at which an engine receives blocks of others, by its metrics of NIXL.
"""
