"""Parts that several benchmarks share.

- ``direct``: ext_proc client that asks a picker without a gateway and writes its access log.
- ``asker``: direct requests at a steady rate.
- ``records``: load with a record of every request.
- ``picklog``: the pickers' request logs, read back.
- ``stack``: engines, relays, pickers and one Envoy that can each be stopped and started again.
- ``certificates``: certificates of a stack, as Kubernetes mounts a Secret.
- ``upstream``: process that answers for many engines at almost no cost.
- ``churn``: process that publishes stores and evictions of many engines without end.
- ``watch``: memory, CPU time and state of a running picker.
- ``proof``: a benchmark with bounds, from start to exit code.
- ``publish``: results as a table, as JSON and in a section of the documentation.
"""
