"""Compares desired with observed objects and decides what to do. Pure; ``reconcile.applier`` does it.

- ``changes``: whether an object is as intended, and the steps to the desired objects in a safe order.
- ``paired_rollout``: rollouts of prefill and decode in step with each other.
- ``upgrades``: workloads that a new operator would change, and when it may.
"""

from .changes import Changes, Key, Step, Verb, as_intended, changes, key_of, stamped

__all__ = ["Changes", "Key", "Step", "Verb", "as_intended", "changes", "key_of", "stamped"]
