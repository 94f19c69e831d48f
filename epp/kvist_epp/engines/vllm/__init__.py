"""Everything that is true of vLLM only, without I/O.

- ``engine_metrics``: parsers of ``/metrics`` and ``/v1/models``, and the rates learned from scrapes.
- ``kv_events``: codec of KV event messages, old form and new, with the extra keys of block hashes.
"""
