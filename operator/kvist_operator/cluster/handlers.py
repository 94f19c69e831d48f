"""kopf: follows kinds of objects and tells what it hears. All decorators are here, and nothing else.

kopf keeps nothing in the objects: without handlers for creation, change and deletion it sets no finalizer,
and its annotations are turned off. It runs in a thread with a loop of its own, because at its end it cancels
every task of its loop that it has not seen before.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.request import getproxies

import kopf

from kvist_kube.connection import Configuration, LoadConfiguration
from kvist_operator.errors import Unavailable
from kvist_operator.manifests.names import OURS

from .kinds import POOL, Kind
from .port import Json

logger = logging.getLogger(__name__)

Heard = Callable[[str | None, Json], None]
"""Type of the event (None = of a list) and the object."""
STOP_SECONDS: Final = 10.0
IDENTITY: Final[Any] = "kvist-operator"
"""kopf's own is made from the user's name, which a bare user id in a container does not have."""


class _Nothing(kopf.DiffBaseStorage):
    """No copy of the object in the object, and none made for comparison."""

    def build(self, **_: Any) -> Any:
        """Nothing."""
        return {}

    def fetch(self, **_: Any) -> Any:
        """Nothing."""

    def store(self, **_: Any) -> None:
        """Nowhere."""


async def follow(
    load: LoadConfiguration, kinds: Iterable[Kind], namespaces: Sequence[str], heard: Heard
) -> None:
    """Until it is cancelled. ``heard`` is called on the loop of the caller.

    Raises Unavailable when kopf ends by itself: a right or an API that has gone, mostly.
    """
    loop = asyncio.get_running_loop()
    stop, ended = threading.Event(), asyncio.Event()
    said: list[BaseException] = []

    def tell(verb: str | None, found: Json) -> None:
        loop.call_soon_threadsafe(heard, verb, found)

    def run() -> None:
        try:
            asyncio.run(_operate(load, sorted(kinds), namespaces, tell, stop))
        except Exception as error:  # noqa: BLE001 - whatever it was, it is begun again
            said.append(error)
        finally:
            loop.call_soon_threadsafe(ended.set)

    thread = threading.Thread(target=run, name="kopf", daemon=True)
    thread.start()
    try:
        await ended.wait()
    finally:
        stop.set()
        await asyncio.to_thread(thread.join, STOP_SECONDS)
    raise Unavailable(f"watching ended: {said[0] if said else 'kopf says no more'}") from (
        said[0] if said else None
    )


async def _operate(
    load: LoadConfiguration,
    kinds: Sequence[Kind],
    namespaces: Sequence[str],
    tell: Heard,
    stop: threading.Event,
) -> None:
    await kopf.operator(
        registry=registry(load, kinds, tell),
        settings=settings(kinds),
        standalone=True,
        identity=IDENTITY,
        clusterwide=not namespaces,
        namespaces=list(namespaces),
        stop_flag=stop,
    )


def registry(load: LoadConfiguration, kinds: Iterable[Kind], tell: Heard) -> kopf.OperatorRegistry:
    """Who is asked to hear what."""
    made = kopf.OperatorRegistry()

    @kopf.on.login(registry=made)  # type: ignore[untyped-decorator, unused-ignore]
    async def login(**_: Any) -> kopf.ConnectionInfo:
        found = await load()
        return connection(found, await found.get_api_key_with_prefix("BearerToken", "authorization") or "")

    async def event(event: Mapping[str, Any], **_: Any) -> None:
        tell(event["type"], dict(event["object"]))

    for kind in kinds:
        kopf.on.event(kind.group, kind.version, kind.plural, registry=made, id="heard")(event)
    return made


def settings(kinds: Iterable[Kind]) -> kopf.OperatorSettings:
    """What facts/operators.md section 4 recommends, and nothing written anywhere."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.scanning.disabled = True
    made.peering.standalone = True
    made.process.ultimate_exiting_timeout = None
    made.watching.server_timeout = 300
    made.watching.client_timeout = 310
    made.watching.connect_timeout = 10
    made.networking.request_timeout = 60
    made.persistence.diffbase_storage = _Nothing()
    for kind in kinds:
        if kind != POOL:
            made.watching.label_selectors[kind.group, kind.version, kind.plural] = OURS
    return made


def connection(found: Configuration, key: str) -> kopf.ConnectionInfo:
    """The official client's idea of where the cluster is and who we are, as kopf has it. ``key``: what goes
    into the header, ``Bearer …``."""
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
