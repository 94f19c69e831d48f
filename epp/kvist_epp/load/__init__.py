"""Requests and backlog of every endpoint, known from routing and KV events rather than scraped. Pure.

- ``tracker``: the loads of all endpoints and the requests on them; tells listeners.
- ``request_books``: the attempts of requests, from being sent to their end.
- ``in_flight``: one record per request, with its attempts and states, and the table of all of them.
- ``end_reports``: how requests end where no gateway says so.
- ``endpoint_load``: attempts and backlog of one endpoint.
- ``prefill_share``: the share of an endpoint's time that goes to prompts.
- ``token_time``: the time of a token where no prompt is computed, and what each sequence adds.
- ``prefill_rate``: prefill rates, learned from events.
- ``tpot_admission``: how much prefill an endpoint may take up under a TPOT target.
- ``replica_rotation``: the order in which replicas of the picker send queued requests to one endpoint.
"""
