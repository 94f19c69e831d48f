"""The routing policy: the cost of each endpoint, and the choice. Pure.

- ``candidate_table``: the choice among many endpoints, over arrays.
- ``cost``: the terms of the cost, in seconds, and every constant of the policy.
- ``pick``: which endpoints are eligible or full, and which is best.
"""
