"""Simulated engine: vLLM's command line, API, metrics and KV events, without computation.

::

    __main__ -> flags (vLLM's command line) -> args.Settings -> run
    request:  server -> bodies, openai (JSON in and out) -> tokenizer -> loop -> scheduler -> blocks
    step:     loop: scheduler.schedule -> timing -> sleep -> scheduler.complete -> server, publisher, metrics

Law: ``scheduler``, ``blocks``, ``chain``, ``timing`` and ``text`` know no event loop, no socket and no wall
clock, so that a discrete-event simulation drives the same code. Only ``loop`` waits; only ``server`` speaks
HTTP.
"""
