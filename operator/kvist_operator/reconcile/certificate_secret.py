"""Creates, renews and deletes the Secret and the ConfigMap with the pickers' certificate.

Secrets are neither listed nor watched: that right would include reading all others. Each is read by its name
when its pool is reconciled, at most every five minutes. ``certificate_rotation`` has their content.
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
from kvist_operator.cluster.cluster_api import Cluster
from kvist_operator.cluster.kinds import CONFIG_MAP, SECRET, Target
from kvist_operator.cluster.pool_cache import PoolCache
from kvist_operator.manifests.object_names import PICKER, Json, ObjectNames
from kvist_operator.manifests.render import with_owner
from kvist_operator.spec.pool import Pool

from . import certificate_rotation

CHECK_SECONDS: Final = 300.0


@dataclass(frozen=True, slots=True)
class SecretResult:
    """Why the objects are not as they should be; empty when they are."""

    conflicts: tuple[Key, ...] = ()
    """Objects of another owner that have the wanted names."""
    waits: tuple[str, ...] = ()


@dataclass(slots=True)
class CertificateSecrets:
    """The Secrets of all pools. ``checked``: by pool uid, whether a certificate was wanted when the Secret
    was last in order, and when that was."""

    cluster: Cluster
    cache: PoolCache
    checked: dict[str, tuple[bool, float]] = field(default_factory=dict)
    _expiry: dict[str, datetime] = field(default_factory=dict)
    """When the certificate in use expires, by pool uid."""

    async def reconcile(self, pool: Pool, now: datetime) -> SecretResult:
        """Create, renew or delete both objects. Raises ClusterError."""
        wanted, names = pool.picker.mode != "Off", ObjectNames.of(pool)
        before, at = self.checked.get(pool.uid, (not wanted, 0.0))
        if (
            before == wanted
            and time.monotonic() < at + CHECK_SECONDS
            and self._published(pool, names) == wanted
        ):
            return SecretResult()
        kept = await self._ensure(pool, names, now) if wanted else await self._delete(pool, names)
        if kept == SecretResult():
            self.checked[pool.uid] = (wanted, time.monotonic())
        return kept

    def forget(self, uid: str) -> None:
        """Check the Secret of this pool again next time."""
        self.checked.pop(uid, None)
        self._expiry.pop(uid, None)

    def expiry(self, uid: str) -> datetime | None:
        """Return when the certificate in the Secret of this pool expires; None if there is none, or it was
        not looked at yet."""
        return self._expiry.get(uid)

    def _published(self, pool: Pool, names: ObjectNames) -> bool:
        """Return whether the ConfigMap exists and is not being deleted."""
        found = self.cache.get(Target(CONFIG_MAP, pool.namespace, names.authority))
        return found is not None and not leaving(found)

    async def _ensure(self, pool: Pool, names: ObjectNames, now: datetime) -> SecretResult:
        found = await self.cluster.get(Target(SECRET, pool.namespace, names.certificates))
        kept = _touchable(pool, found, Key("", "Secret", names.certificates))
        if kept != SecretResult():
            return kept
        bundle = certificate_rotation.issued(certificate_rotation.names_of(names), now, secret_data(found))
        made = secret(pool, names, bundle.secret)
        if found is None or not as_intended(made, found):
            await self.cluster.apply(stamped(made))
        self._expiry[pool.uid] = bundle.expires
        return await self._publish(pool, config_map(pool, names, bundle.authorities))

    async def _publish(self, pool: Pool, made: Json) -> SecretResult:
        target = Target(CONFIG_MAP, pool.namespace, made["metadata"]["name"])
        found = self.cache.get(target) or await self.cluster.get(target)
        kept = _touchable(pool, found, Key("", "ConfigMap", target.name))
        if kept == SecretResult() and (found is None or not as_intended(made, found)):
            self.cache.update(await self.cluster.apply(stamped(made)))
        return kept

    async def _delete(self, pool: Pool, names: ObjectNames) -> SecretResult:
        """Delete the Secret of a pool without pickers. Its ConfigMap is listed and deleted like other
        children."""
        target = Target(SECRET, pool.namespace, names.certificates)
        self._expiry.pop(pool.uid, None)
        found = await self.cluster.get(target)
        if found is not None and owned(pool, found) and not leaving(found):
            await self.cluster.delete(target, str(found["metadata"]["uid"]))
        return SecretResult()


def _touchable(pool: Pool, found: Mapping[str, Any] | None, key: Key) -> SecretResult:
    """Return an empty result, or why the object cannot be written."""
    if found is None:
        return SecretResult()
    if not owned(pool, found):
        return SecretResult(conflicts=(key,))
    return SecretResult(waits=(f"{key} is being deleted",)) if leaving(found) else SecretResult()


def secret(pool: Pool, names: ObjectNames, data: Mapping[str, bytes]) -> Json:
    """Return the Secret that pickers mount."""
    encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
    kind = "kubernetes.io/tls"
    return with_owner(pool, names.child("v1", "Secret", names.certificates, PICKER, type=kind, data=encoded))


def config_map(pool: Pool, names: ObjectNames, authorities: bytes) -> Json:
    """Return the ConfigMap with the authorities by which pickers are verified."""
    data = {certificate_rotation.AUTHORITIES: authorities.decode()}
    return with_owner(pool, names.child("v1", "ConfigMap", names.authority, PICKER, data=data))


def secret_data(found: Mapping[str, Any] | None) -> dict[str, bytes] | None:
    """Return the decoded data of a Secret, without values that are not base64."""
    if found is None:
        return None
    made: dict[str, bytes] = {}
    for key, value in (found.get("data") or {}).items():
        try:
            made[key] = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            continue
    return made
