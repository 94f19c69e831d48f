"""The custom resource: ``pool`` the nouns, ``fields`` a typed reader, ``read`` and
``kubernetes`` the only ones of raw keys."""

from .pool import Pool
from .read import read_pool

__all__ = ["Pool", "read_pool"]
