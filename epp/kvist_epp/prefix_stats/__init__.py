"""Statistics of prefixes, from picks of the last seconds or ten minutes. Pure; the clock is a parameter.

After a pick the director records where in the index the prompt's match ends. The statistics say which
prefixes to compute on further endpoints (``hot_prefixes``, for prewarming), whether a copy of a prefix pays
off (``recent_uses``, for the cost of a pick), and what caches save (``cache_value`` and
``divergence_histogram``, for ``GET /fleet``).

- ``cache_value``: prefill tokens that blocks saved which no other endpoint holds.
- ``divergence_histogram``: cached tokens of prompts, and where prompts diverge from what is cached.
- ``hot_prefixes``: prefixes that the requests of several tenants match often.
- ``recent_uses``: recent number of uses of a prefix, fading within a second.
- ``window``: the last ten minutes, in pieces that expire one by one.
"""
