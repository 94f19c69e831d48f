"""Parts that several benchmarks share.

- ``direct``: ext_proc client without a gateway, at a steady rate, which writes the access log, too.
- ``replay``: a picker without sockets, to which the bytes of requests are replayed.
- ``records``: load with a record of every request, and the pickers' request logs.
- ``stack``: engines, relays, pickers and one Envoy that can each be stopped and started again.
- ``upstream``: process that answers for many engines at almost no cost.
- ``churn``: process that publishes stores and evictions of many engines without end.
- ``watch``: memory, CPU time and state of a running picker.
- ``machine``: machine, versions and revision of a measurement; other work on the cores.
- ``proof``: a benchmark with bounds, from start to exit code, and its results.
"""
