"""Desired × observed → what to do. ``changes`` decides, ``compare`` tells whether an object is as intended.
Pure; who carries it out is not here."""

from .changes import Changes, Key, Step, Verb, changes, key_of
from .compare import as_intended, stamped

__all__ = ["Changes", "Key", "Step", "Verb", "as_intended", "changes", "key_of", "stamped"]
