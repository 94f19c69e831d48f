"""The operator as a process.

- ``settings``: the flags, to and from a command line.
- ``runtime``: starts all parts, runs their loops, and stops them at a signal.
- ``observability``: log lines, metrics, and the port with ``/metrics``, ``/healthz`` and ``/readyz``.
- ``pool_metrics``: metrics of each pool.
- ``selftest``: ``kvist-operator check``, which ``helm test`` runs.
"""
