"""Opens the source of endpoints that the flags name: a file, a label selector, or an InferencePool."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kvist_epp.endpoints.endpoint import EndpointSet
from kvist_epp.endpoints.endpoints_file import EndpointsFileWatcher
from kvist_epp.errors import SettingsError
from kvist_epp.settings.settings import Settings
from kvist_kube.errors import ClusterNotFound
from kvist_kube.object_cache import WatchStatus

OnEndpoints = Callable[[EndpointSet], None]
"""Called with all endpoints, each time they change."""
OnPriorities = Callable[[Mapping[str, int]], None]
"""Called with the priority of each objective by name, each time one changes."""


class Discovery(Protocol):
    """A source of endpoints. An error never makes it publish fewer endpoints."""

    @property
    def problem(self) -> str:
        """Why the endpoints may be out of date, or are not known yet; empty when all is well."""

    async def run(self) -> None:
        """Discover until cancelled, and release everything then."""

    def describe(self) -> dict[str, Any]:
        """Return the source, its state and its counters, for ``/debug/fleet``."""

    def watches(self) -> Sequence[WatchStatus]:
        """Return the state of each watch in Kubernetes; none for a file."""


def open_discovery(
    settings: Settings,
    on_endpoints: OnEndpoints,
    environment: Mapping[str, str],
    *,
    on_bad_file: Callable[[str], None] = lambda _problem: None,
    on_priorities: OnPriorities = lambda _priorities: None,
) -> Discovery:
    """Return the source that the flags name. ``on_bad_file`` is called with the reason when an endpoints file
    cannot be used.

    Raises ``SettingsError`` when no cluster can be found.
    """
    if settings.endpoints_file:
        return EndpointsFileWatcher(Path(settings.endpoints_file), on_endpoints, on_bad_file)
    try:
        from kvist_epp.endpoints.kubernetes.pod_discovery import PodDiscovery, PoolName
        from kvist_epp.endpoints.kubernetes.pools import PodSelection
        from kvist_kube.connection import Connection, find_cluster, own_namespace
        from kvist_kube.informer import InformerTimes
    except ImportError as error:
        raise SettingsError(f"{error.name} is not installed: pip install 'kvist[epp]'") from error
    wanted: PodSelection | PoolName
    if settings.pool_name:
        wanted = PoolName(settings.pool_group, settings.pool_name)
    else:
        wanted = PodSelection(settings.endpoint_selector, settings.target_ports)
    try:
        connection = Connection(find_cluster(environment))
    except ClusterNotFound as error:
        raise SettingsError(str(error)) from error
    return PodDiscovery(
        connection,
        settings.pool_namespace or own_namespace(environment),
        wanted,
        on_endpoints,
        on_priorities=on_priorities,
        times=InformerTimes(resync=settings.resync_interval),
    )
