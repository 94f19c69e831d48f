"""Compares desired with observed objects and decides what to do. Pure; ``reconcile.applier`` does it.

- ``changes``: the steps that lead from observed to desired objects, in a safe order.
- ``drift``: whether one object is as intended.
"""

from .changes import Changes, Key, Step, Verb, changes, key_of
from .drift import as_intended, stamped

__all__ = ["Changes", "Key", "Step", "Verb", "as_intended", "changes", "key_of", "stamped"]
