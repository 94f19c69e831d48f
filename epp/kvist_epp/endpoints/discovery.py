"""Where the fleet comes from: a file, pods by a label selector, or the pods of an InferencePool."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvist_epp.endpoints.endpoint import Fleet
from kvist_epp.endpoints.file_watcher import FileWatch
from kvist_epp.errors import SettingsError
from kvist_epp.settings.settings import Settings

Follow = Callable[[Fleet], None]
Objectives = Callable[[Mapping[str, int]], None]


class Watched(NamedTuple):
    """How one resource of the Kubernetes API is followed, for the metrics."""

    resource: str
    open: bool
    """Whether a watch is open just now."""
    silent_seconds: float | None
    """Since the API was last heard; None: never."""
    lists: int
    errors: Mapping[str, int]
    """By HTTP status, ``connection`` where there was no answer."""


class Discovery(Protocol):
    """Hands every new ``Fleet`` to whoever follows; never a smaller one because of an error."""

    @property
    def problem(self) -> str:
        """Why the fleet may not be up to date, or is not known yet; empty when all is well."""

    async def run(self) -> None:
        """Discover for ever; cancelled, it lets go of everything."""

    def describe(self) -> dict[str, Any]:
        """For ``/debug/fleet``: the source, its state, its counters."""

    def watches(self) -> Sequence[Watched]:
        """What is followed in Kubernetes; nothing for a file."""


def open_discovery(
    settings: Settings,
    follow: Follow,
    environment: Mapping[str, str],
    *,
    refused: Callable[[str], None] = lambda _problem: None,
    objectives: Objectives = lambda _priorities: None,
) -> Discovery:
    """The source that the flags name. ``refused``: a file could not be used. ``objectives``: priorities by
    name, each time they change.

    Raises ``SettingsError`` when no cluster can be found.
    """
    if settings.endpoints_file:
        return FileWatch(Path(settings.endpoints_file), follow, refused)
    try:
        from kvist_epp import access
        from kvist_epp.endpoints.kubernetes import api, pools, reflector
        from kvist_epp.endpoints.kubernetes import pod_discovery as discovery
    except ImportError as error:
        raise SettingsError(f"{error.name} is not installed: pip install 'kvist[epp]'") from error
    wanted: pools.Selection | discovery.PoolName
    if settings.pool_name:
        wanted = discovery.PoolName(settings.pool_group, settings.pool_name)
    else:
        wanted = pools.Selection(settings.endpoint_selector, settings.target_ports)
    return discovery.KubeDiscovery(
        api.Api(access.cluster(environment)),
        settings.pool_namespace or access.own_namespace(environment),
        wanted,
        follow,
        objectives=objectives,
        pace=reflector.Pace(resync=settings.resync_interval),
    )
