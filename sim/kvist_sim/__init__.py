"""Simulated engines, load, real and virtual time, and benchmarks of kvist. Nothing of the product imports it.

- ``engine``: simulated engine with vLLM's command line, API, metrics and KV events.
- ``model``: vocabulary, chat template and config of the simulated engines.
- ``workloads``: chat traffic with shared prefixes, byte for byte the same for a seed.
- ``load``: open and closed loops of requests, and their figures.
- ``http1``: HTTP/1.1 client with minimal cost.
- ``publisher``: publisher of KV events that behaves as vLLM's.
- ``relays``: relays of events and connections that drop, reorder and interrupt on command.
- ``processes``: child processes that are watched and always ended.
- ``ports``: free ports that no two processes on the machine get.
- ``launch``: starts engines and pickers as processes.
- ``eager_picker``: the picker, which computes every prompt elsewhere that it can.
- ``envoy``: runs a real Envoy, and its configuration for the picker.
- ``envoy_settings``: settings of one Envoy, from which ``envoy`` makes its configuration, and its TLS.
- ``envoy_tracing``: the part of Envoy's configuration that exports its spans.
- ``envoy_pools``: one Envoy before several pools, with the model-header filter.
- ``demo``: ``kvist demo``.
- ``virtual``: routing policies in virtual time.
- ``bench``: the benchmarks.
"""
