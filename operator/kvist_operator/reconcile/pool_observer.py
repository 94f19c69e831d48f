"""Notifications of what becomes of a pool, besides its status. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from kvist_operator.cluster.pool_cache import PoolKey
from kvist_operator.spec.pool import Pool


class PoolObserver:
    """Base of those who want to hear of pools; each method is a notification and does nothing here."""

    def on_managed(self, key: PoolKey) -> None:
        """This operator manages the pool, which is about to be reconciled."""

    def on_status(self, key: PoolKey, pool: Pool | None, status: Mapping[str, Any]) -> None:
        """A status was made; ``pool`` is its spec with the preset, None where it cannot be read."""

    def on_certificate(self, key: PoolKey, expires: datetime | None) -> None:
        """The certificate of the pool's pickers expires at this time; None: it has none."""

    def on_gone(self, key: PoolKey) -> None:
        """The pool was deleted, or another release of the operator manages it."""
