"""Prewarming: hot prefixes are computed on endpoints that will miss them, before requests arrive.

An endpoint that joins gets the hottest prefixes. When an endpoint leaves, the hot prefixes that only it holds
are computed on the others. The engines are asked with ordinary completions of one token.

- ``prewarm_planner``: which prefix is requested from which endpoint, and when. Pure.
- ``prewarm_step``: one request to one engine. Pure.
- ``refresh_schedule``: when a hot prefix is requested again so that its engine keeps it. Pure.
- ``prewarmer``: runs the planner in a picker, and its requests.
- ``prewarm_client``: sends one request to an engine.
"""
