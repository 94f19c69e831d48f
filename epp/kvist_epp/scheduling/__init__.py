"""The routing policy: the cost of each endpoint, and the choice. Pure.

- ``candidate_table``: the choice among many endpoints, over arrays.
- ``load_columns``: the figures of the loads that picks read, as columns.
- ``pick_record``: what a pick has read, from which the cost of each endpoint is computed later.
- ``cost``: the terms of the cost, in seconds, and every constant of the policy.
- ``tier_price``: the price of what slower tiers hold of a prompt.
- ``pick``: which endpoints are eligible or full, and which is best.
"""
