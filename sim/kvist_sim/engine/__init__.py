"""Simulated engine: vLLM's command line, API, metrics and KV events, without computation.

A request passes ``server``, ``openai``, ``tokenizer``, ``loop``, ``scheduler`` and ``blocks``. In each step
``loop`` lets the scheduler schedule, waits as long as the hardware would (``timing``), lets it complete, and
notifies sinks, publisher and metrics.

``scheduler``, ``blocks``, ``tiers`` and ``timing`` know no event loop, no socket and no wall clock, so that a
discrete-event simulation drives the same code. Only ``loop`` waits; only ``server`` speaks HTTP.

- ``flags``: vLLM's command line: the table of its flags, and a parser that follows its rules.
- ``args``: settings from a parsed command line: the flags of vLLM that matter, and the simulator's own.
- ``run``: assembles the parts and runs them until SIGTERM.
- ``server``: HTTP interface: routes, headers, status codes.
- ``openai``: bodies of vLLM's OpenAI front end.
- ``sinks``: answers as bodies and as streams.
- ``tokenizer``: prompts to token ids and back, and generated text.
- ``loop``: one task per rank that runs its steps.
- ``sequence``: one prompt and its output.
- ``scheduler``: continuous batching with chunked prefill, step by step.
- ``blocks``: pool of KV cache blocks, and block hashes.
- ``tiers``: slower places for blocks: memory, disk, a shared volume; their loads and events.
- ``offload``: ``--kv-transfer-config`` of vLLM, blocks as files of a folder, events of tiers as messages.
- ``timing``: durations of steps.
- ``metrics``: ``/metrics`` with vLLM's names, labels and buckets.
"""
