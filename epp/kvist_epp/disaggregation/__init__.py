"""Prefill/decode disaggregation: the picker asks one engine to compute a prompt, and another one to answer.

Leg 1 is a request of the picker's own to the prefill endpoint, for one token; its answer describes the blocks
(``kv_transfer_params``, opaque). Leg 2 is the client's request, which Envoy sends to the decode endpoint with
that description in its body. Protocol: vLLM's NixlConnector (0.32); no engine needs a sidecar
(``docs/decisions/0048``). Whether a request is disaggregated is decided in ``scheduling.split_decision``.

- ``leg_bodies``: the bodies of both legs, and which requests can have them.
- ``legs``: starts leg 1 of a request, and what follows from its end. Sans I/O.
- ``engine_pairs``: which pairs of engines have met, and which are to be connected next. Pure.
- ``partners``: which pairs are wanted, where all of them would be too many. Pure.
- ``prefill_client``: sends leg 1.
- ``prefill_outcome``: why leg 1 has left nothing to fetch.
- ``leg_driver``: runs legs on the event loop, and connects new pairs of engines in the background.
"""
