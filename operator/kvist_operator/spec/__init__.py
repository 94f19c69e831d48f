"""The custom resource: ``pool`` has its records, ``fields`` a typed reader, and only ``pool_reader`` and
``kubernetes`` read raw keys.
"""

from .pool import Pool
from .pool_reader import read_pool

__all__ = ["Pool", "read_pool"]
