"""Requests in flight, the backlog of each endpoint, prefill rates and TPOT admission. Pure."""
