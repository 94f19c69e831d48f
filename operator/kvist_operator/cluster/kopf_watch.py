"""Watches kinds of objects by kopf, on the program's own event loop, and passes each event on.

kopf stores nothing in the objects: without handlers for creation, change and deletion it sets no finalizer,
and its annotations are turned off. ``kopf.operator`` is not used, because at its end it cancels every task of
the loop that was created after it; ``kopf.spawn_tasks`` returns kopf's own tasks, and this module cancels
those.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.request import getproxies

import kopf

from kvist_kube.connection import Configuration, LoadConfiguration
from kvist_operator.errors import Unavailable
from kvist_operator.manifests.object_names import OURS

from .cluster_api import Json
from .kinds import POOL, ObjectKind

OnEvent = Callable[[str | None, Json], None]
"""Called with the type of a watch event (None for an object of the initial list) and the object."""
IDENTITY: Final[Any] = "kvist-operator"
"""kopf would make its own from the user's name, which a bare user id in a container does not have."""


ERROR_BACKOFFS: Final = (1.0, 1.0)
"""Seconds between kopf's retries after an error of the API server or a missing right. kopf's own add up to
54, for which the operator would see no events of a kind and not say so; ``runtime`` pauses between watches.
"""


class _NoStorage(kopf.DiffBaseStorage):
    """Keeps no copy of an object in the object, and makes none for comparison."""

    def build(self, **_: Any) -> Any:
        """Return an empty copy."""
        return {}

    def fetch(self, **_: Any) -> Any:
        """Return no earlier copy."""

    def store(self, **_: Any) -> None:
        """Store no copy."""


async def follow(
    load: LoadConfiguration,
    kinds: Iterable[ObjectKind],
    namespaces: Sequence[str],
    on_event: OnEvent,
    on_spawned: Callable[[], None] = lambda: None,
) -> None:
    """Watch until cancelled. ``on_spawned`` is called when kopf has started, which replaces the loop's
    handlers of SIGINT and SIGTERM.

    Raises Unavailable when kopf ends by itself, mostly because a right or an API has gone.
    """
    wanted = sorted(kinds)
    tasks = await kopf.spawn_tasks(
        registry=registry(load, wanted, on_event),
        settings=settings(wanted),
        standalone=True,
        identity=IDENTITY,
        clusterwide=not namespaces,
        namespaces=list(namespaces),
    )
    on_spawned()
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    cause = next((error for task in ended if not task.cancelled() and (error := task.exception())), None)
    reason = cause.args[0] if cause and cause.args else cause  # an error of the API has its document, too
    raise Unavailable(f"the watch ended: {reason or 'kopf gives no reason'}") from cause


def registry(
    load: LoadConfiguration, kinds: Iterable[ObjectKind], on_event: OnEvent
) -> kopf.OperatorRegistry:
    """Return the handlers that kopf calls: one for credentials, one for the events of each kind."""
    made = kopf.OperatorRegistry()

    @kopf.on.login(registry=made)  # type: ignore[untyped-decorator, unused-ignore]
    async def login(**_: Any) -> kopf.ConnectionInfo:
        found = await load()
        return connection(found, await found.get_api_key_with_prefix("BearerToken", "authorization") or "")

    async def event(event: Mapping[str, Any], **_: Any) -> None:
        # not from within kopf, which would swallow what it raises
        asyncio.get_running_loop().call_soon(on_event, event["type"], dict(event["object"]))

    for kind in kinds:
        kopf.on.event(kind.group, kind.version, kind.plural, registry=made, id="event")(event)
    return made


def settings(kinds: Iterable[ObjectKind]) -> kopf.OperatorSettings:
    """Return settings with finite timeouts, by which kopf writes nothing anywhere."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.scanning.disabled = True
    made.peering.standalone = True
    made.process.ultimate_exiting_timeout = None
    made.watching.server_timeout = 300
    made.watching.client_timeout = 310
    made.watching.connect_timeout = 10
    made.networking.request_timeout = 60
    made.networking.error_backoffs = ERROR_BACKOFFS
    made.persistence.diffbase_storage = _NoStorage()
    for kind in kinds:
        if kind != POOL:
            made.watching.label_selectors[kind.group, kind.version, kind.plural] = OURS
    return made


def connection(found: Configuration, key: str) -> kopf.ConnectionInfo:
    """Convert the official client's configuration to kopf's. ``key``: the Authorization header, ``Bearer
    …``."""
    scheme, _, token = key.partition(" ")
    return kopf.ConnectionInfo(
        server=found.host,
        ca_path=found.ssl_ca_cert,
        insecure=not found.verify_ssl,
        scheme=scheme or None,
        token=token or None,
        certificate_path=found.cert_file,
        private_key_path=found.key_file,
        trust_env=bool(getproxies()),
    )
