"""The routing policy: the cost of each endpoint, and the choice. Pure.

- ``cost``: the terms of the cost, in seconds, and every constant of the policy.
- ``pick``: which endpoints are eligible or full, and which is best.
"""
