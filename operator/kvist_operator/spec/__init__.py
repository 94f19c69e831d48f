"""The custom resource ``InferencePool`` as frozen data. Pure.

- ``pool``: the records of the spec.
- ``pool_reader``: reads the whole resource; the only module that knows the names of its fields.
- ``fields``: typed reader of one object, and the parts that Kubernetes defines.
"""

from .pool import Pool
from .pool_reader import read_pool

__all__ = ["Pool", "read_pool"]
