"""The routing policy: the cost of each endpoint, and the choice. Pure.

- ``candidate_table``: the choice among the endpoints of a pool, over figures that are kept.
- ``many_endpoints``: the same among many, by operations on arrays.
- ``held_columns``: the parts of a prompt that many endpoints hold, and the price of loading them.
- ``load_columns``: the figures of the loads that picks read, as columns.
- ``tpot_columns``: the cost under a TPOT target, over columns.
- ``best_endpoints``: the best of many costs, in order.
- ``pick_record``: what a pick has read, from which the cost of each endpoint is computed later.
- ``cost``: the terms of the cost, in seconds, and every constant of the policy.
- ``rank_choice``: the data-parallel rank behind an endpoint's port.
- ``tier_price``: the price of what slower tiers hold of a prompt.
- ``split_decision``: whether another endpoint than the one that answers should compute a prompt.
- ``split_record``: what is kept and shown of that decision.
- ``leg_costs``: what either leg of such a request costs at an endpoint.
- ``leg_table``: the endpoints that may take a leg, and the figures of many of them as columns.
- ``leg_columns``: what legs cost at many endpoints, over columns.
- ``pick``: which endpoints are eligible or full, and which is best.
"""
