"""Leader election by a Lease: of several replicas of the operator one works, the others wait.

The rules are those of client-go's ``leaderelection`` (coordination.k8s.io/v1). The leader renews the Lease
every ``RETRY_SECONDS``. Others take it when it has not changed for its duration, by their own clock, because
the times in it are those of another machine. Each write names the version that was read, so that of two
replicas one fails. A leader that could not renew for ``RENEW_SECONDS``, which is less than the duration,
stops before another begins.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from kvist_operator.errors import ClusterError, Conflict, LeadershipLost

from .cluster_api import Json
from .kinds import LEASE, Target

DURATION_SECONDS: Final = 15
RENEW_SECONDS: Final = 10.0
RETRY_SECONDS: Final = 2.0

logger = logging.getLogger(__name__)


class LeaseStore(Protocol):
    """The API server, as far as an election needs it. Each method raises ClusterError."""

    async def get(self, target: Target) -> Json | None:
        """Return an object; None if there is none."""

    async def create(self, made: Json) -> Json:
        """Create an object. Raises Conflict if there is one of this name."""

    async def replace(self, made: Json) -> Json:
        """Replace an object at the version in ``made``. Raises Conflict if it has changed."""


class LeaderElection:
    """One replica's part in the election of one Lease."""

    def __init__(
        self,
        store: LeaseStore,
        namespace: str,
        name: str,
        identity: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """``identity`` differs from replica to replica; ``clock`` in seconds."""
        self.identity = identity
        self.leader = ""
        """Identity of the present leader; empty while there is none."""
        self._target = Target(LEASE, namespace, name)
        self._store = store
        self._clock = clock
        self._now = now
        self._seen: dict[str, Any] = {}
        self._seen_at = 0.0

    async def acquire(self) -> None:
        """Wait until this replica is the leader."""
        while True:
            if await self._try():
                break
            await asyncio.sleep(RETRY_SECONDS * random.uniform(1.0, 1.2))
        logger.info("this replica is the leader (%s)", self._target)

    async def hold(self) -> None:
        """Renew the Lease until it is lost. Raises LeadershipLost."""
        renewed = self._clock()
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            left = RENEW_SECONDS - (self._clock() - renewed)
            try:
                async with asyncio.timeout(max(0.0, left)):
                    held = await self._try()
            except TimeoutError:
                held = False
            if held:
                renewed = self._clock()
            elif self.leader not in ("", self.identity) or self._clock() - renewed >= RENEW_SECONDS:
                raise LeadershipLost(f"{self._target}: this replica is no longer the leader, so it stops")

    async def release(self) -> None:
        """Give the Lease back, so that another replica begins at once; failures only delay that."""
        with suppress(ClusterError, TimeoutError):
            async with asyncio.timeout(RETRY_SECONDS):
                found = await self._store.get(self._target)
                if found is not None and _spec(found).get("holderIdentity") == self.identity:
                    spec = {**_spec(found), "holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._store.replace({**found, "spec": spec})

    async def _try(self) -> bool:
        """Take or renew the Lease; return whether this replica holds it."""
        try:
            found = await self._store.get(self._target)
            if found is None:
                await self._store.create(self._made({}, {}))
                return self._observed(self.identity)
            self._observe(_spec(found))
            holder = str(_spec(found).get("holderIdentity") or "")
            expires = self._seen_at + int(_spec(found).get("leaseDurationSeconds") or DURATION_SECONDS)
            if holder not in ("", self.identity) and self._clock() < expires:
                return self._observed(holder)
            await self._store.replace(self._made(found, _spec(found)))
            return self._observed(self.identity)
        except Conflict:
            return False  # another replica was faster; the next look says which
        except ClusterError as error:
            logger.warning("%s: cannot be read or renewed, will retry: %s", self._target, error)
            return False

    def _observe(self, spec: dict[str, Any]) -> None:
        """Note the time of the last change of the Lease, by our own clock."""
        if spec != self._seen:
            self._seen, self._seen_at = spec, self._clock()

    def _observed(self, holder: str) -> bool:
        if holder != self.leader:
            logger.info("the leader is %s (%s)", holder, self._target)
        self.leader = holder
        return holder == self.identity

    def _made(self, found: Json, spec: dict[str, Any]) -> Json:
        """Return the Lease with this replica as its holder; a new term has a new time and number."""
        moment = self._now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        mine = spec.get("holderIdentity") == self.identity
        terms = int(spec.get("leaseTransitions") or 0)
        meta = {"namespace": self._target.namespace, "name": self._target.name}
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": found.get("metadata") or meta,
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": DURATION_SECONDS,
                "acquireTime": spec.get("acquireTime", moment) if mine else moment,
                "renewTime": moment,
                "leaseTransitions": terms if mine else terms + 1,
            },
        }


def _spec(found: Json) -> dict[str, Any]:
    spec: dict[str, Any] = found.get("spec") or {}
    return spec
