"""The objects with keys: Secret and ConfigMap of the pickers' certificate (``certificates`` says what is in
them), made, renewed, and taken away with the pickers.

Secrets are neither listed nor watched: the right to do so is the right to read everybody's. Each is looked at
by its name when its pool is looked at, but not more often than every five minutes.
"""

import base64
import binascii
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from kvist_operator.apply import Key, as_intended, stamped
from kvist_operator.apply.changes import leaving, owned
from kvist_operator.cluster.kinds import CONFIG_MAP, SECRET, Target
from kvist_operator.cluster.port import Cluster
from kvist_operator.cluster.store import Store
from kvist_operator.manifests.names import PICKER, Names
from kvist_operator.manifests.nouns import Json
from kvist_operator.manifests.render import with_owner
from kvist_operator.spec.pool import Pool

from . import certificates

LOOK_SECONDS: Final = 300.0


@dataclass(frozen=True, slots=True)
class Kept:
    """Why something is not as it should be; nothing of it where all is well."""

    conflicts: tuple[Key, ...] = ()
    """Somebody else's."""
    waits: tuple[str, ...] = ()


@dataclass(slots=True)
class Keeper:
    """For all pools. ``looked``: pools whose Secret was in order, for which spec and when."""

    cluster: Cluster
    store: Store
    looked: dict[str, tuple[bool, float]] = field(default_factory=dict)

    async def keep(self, pool: Pool, now: datetime) -> Kept:
        """See to both. Raises ClusterError."""
        wanted, names = pool.picker.mode != "Off", Names.of(pool)
        before, at = self.looked.get(pool.uid, (not wanted, 0.0))
        if before == wanted and time.monotonic() < at + LOOK_SECONDS and self._shown(pool, names) == wanted:
            return Kept()
        kept = await self._see_to(pool, names, now) if wanted else await self._clear(pool, names)
        if kept == Kept():
            self.looked[pool.uid] = (wanted, time.monotonic())
        return kept

    def forget(self, uid: str) -> None:
        """The pool has gone, or something is wrong with it."""
        self.looked.pop(uid, None)

    def _shown(self, pool: Pool, names: Names) -> bool:
        """Whether the ConfigMap is there, and to stay."""
        found = self.store.get(Target(CONFIG_MAP, pool.namespace, names.authority))
        return found is not None and not leaving(found)

    async def _see_to(self, pool: Pool, names: Names, now: datetime) -> Kept:
        found = await self.cluster.get(Target(SECRET, pool.namespace, names.certificates))
        kept = _touchable(pool, found, Key("", "Secret", names.certificates))
        if kept != Kept():
            return kept
        bundle = certificates.issued(certificates.names_of(names), now, decoded(found))
        made = secret(pool, names, bundle.secret)
        if found is None or not as_intended(made, found):
            await self.cluster.apply(stamped(made))
        return await self._publish(pool, config_map(pool, names, bundle.authorities))

    async def _publish(self, pool: Pool, made: Json) -> Kept:
        target = Target(CONFIG_MAP, pool.namespace, made["metadata"]["name"])
        found = self.store.get(target) or await self.cluster.get(target)
        kept = _touchable(pool, found, Key("", "ConfigMap", target.name))
        if kept == Kept() and (found is None or not as_intended(made, found)):
            self.store.tell(await self.cluster.apply(stamped(made)))
        return kept

    async def _clear(self, pool: Pool, names: Names) -> Kept:
        """Without pickers. The ConfigMap is listed like other children, and goes like them."""
        target = Target(SECRET, pool.namespace, names.certificates)
        found = await self.cluster.get(target)
        if found is not None and owned(pool, found) and not leaving(found):
            await self.cluster.delete(target, str(found["metadata"]["uid"]))
        return Kept()


def _touchable(pool: Pool, found: Mapping[str, Any] | None, key: Key) -> Kept:
    """Nothing, or why the object cannot be written."""
    if found is None:
        return Kept()
    if not owned(pool, found):
        return Kept(conflicts=(key,))
    return Kept(waits=(f"{key} is being deleted",)) if leaving(found) else Kept()


def secret(pool: Pool, names: Names, data: Mapping[str, bytes]) -> Json:
    """The Secret that pickers mount."""
    encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
    made = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": names.meta(names.certificates, PICKER),
        "type": "kubernetes.io/tls",
        "data": encoded,
    }
    return with_owner(pool, made)


def config_map(pool: Pool, names: Names, authorities: bytes) -> Json:
    """What those mount who verify pickers."""
    made = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": names.meta(names.authority, PICKER),
        "data": {certificates.AUTHORITIES: authorities.decode()},
    }
    return with_owner(pool, made)


def decoded(found: Mapping[str, Any] | None) -> dict[str, bytes] | None:
    """Data of a Secret; what is no base64 is not there."""
    if found is None:
        return None
    made: dict[str, bytes] = {}
    for key, value in (found.get("data") or {}).items():
        try:
            made[key] = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            continue
    return made
