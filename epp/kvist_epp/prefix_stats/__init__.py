"""Statistics of prefixes over the last minutes: which are hot, which are about to be used again, and how much
prefill each endpoint's cache saves. The director records every routed request here; prewarming, the copy cost
of scheduling and the fleet page read the results. Pure: the clock is a parameter.

- ``window``: the last ten minutes in slots of 30 seconds, which expire one by one.
- ``hot_prefixes``: prefixes that several tenants match often; prewarming computes them where missing.
- ``recent_uses``: decayed number of uses of a prefix, among which scheduling shares the cost of a copy.
- ``cache_value``: tokens of prefill saved by blocks that only one endpoint holds.
- ``divergence_histogram``: cached share of prompts, and the token at which they diverge from what is cached.
"""
