"""The custom resource ``InferencePool`` as frozen data. Pure.

- ``pool``: the records of the spec.
- ``pool_reader``: reads the whole resource; the only module that knows the names of its fields.
- ``preset``: the fields that a pool leaves to an ``InferencePoolPreset``.
- ``offload``: the records of ``spec.offload``.
- ``offload_reader``: reads ``spec.offload``.
- ``disaggregation``: the records of ``spec.disaggregation``.
- ``disaggregation_reader``: reads it, and returns the pool as each role sees it.
- ``rollout_reader``: reads ``spec.rollout``.
- ``network_policy_reader``: reads ``spec.networkPolicy``.
- ``interconnect_reader``: reads ``spec.interconnect``.
- ``tracing_reader``: reads ``spec.tracing``.
- ``consistency``: fields that contradict each other, or have no effect.
- ``pod_template``: the overlay of the engines' pods against the fields of Kubernetes.
- ``fields``: typed reader of one object, and the parts that Kubernetes defines.
"""

from .pool import Pool
from .pool_reader import read_pool

__all__ = ["Pool", "read_pool"]
