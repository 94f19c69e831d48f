"""``kvist bench epp``: CPU and latency of the picker behind a real Envoy.

- ``command``: starts the stack, measures every cell of the plan, and writes the result.
- ``client``: closed-loop HTTP/1.1 client with prebuilt requests.
- ``prompts``: requests of a shape and a size, and the prefixes that they share.
- ``publisher``: process that publishes the KV events of all engines.
- ``profiler``: CPU samples of a running picker.
- ``revision``: runs the picker of an older git revision.
- ``echo``: bare server whose CPU time is the unit of the bounds.
- ``report``: figures of all cells, their bounds, and JSON.
- ``tables``: the same as tables.
"""
