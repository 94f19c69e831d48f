"""The Kubernetes layer of the picker and the operator.

Both programs find their cluster, authenticate and send requests through ``connection``. The picker follows
pods, pools and objectives with ``informer`` and ``object_cache``; the operator learns of changes by kopf and
keeps its own cache (docs/decisions/0019-one-kubernetes-layer.md has the reasons). The package knows neither
program.

- ``errors``: exceptions of this package.
- ``connection``: finds the cluster and its credentials, sends requests and reads streams of lines.
- ``informer``: lists and watches one resource.
- ``object_cache``: objects of one resource as the last list and the watch after it describe them; pure.
- ``backoff``: seconds to wait after repeated failures; pure.
- ``quantity``: parses Kubernetes quantities such as ``1.5Gi``; pure.
- ``certificates``: a certificate authority in memory and the certificates it signs; pure.
"""
