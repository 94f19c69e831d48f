"""Which of a pool's children is which. Pure."""

from collections.abc import Iterable
from typing import Final

from kvist_operator.cluster.kinds import DEPLOYMENT, Kind, kind_of
from kvist_operator.manifests.names import Names
from kvist_operator.manifests.nouns import Json
from kvist_operator.status import Observed

_ROUTE: Final = "HTTPRoute"
_GROUPS: Final = ("LeaderWorkerSet",)


def children_of(pool: str, children: Iterable[Json]) -> Observed:
    """The workloads and the route of a pool, by their names."""
    by_name = {(kind_of(each), each["metadata"]["name"]): each for each in children}
    names = Names(pool, "")

    def deployment(name: str) -> Json | None:
        return by_name.get((DEPLOYMENT, name))

    return Observed(
        workload=deployment(names.engine) or _other(by_name, _GROUPS, names.engine),
        picker=deployment(names.picker),
        envoy=deployment(names.envoy),
        route=_other(by_name, (_ROUTE,), names.engine),
    )


def _other(by_name: dict[tuple[Kind, str], Json], kinds: tuple[str, ...], name: str) -> Json | None:
    return next((made for (kind, of), made in by_name.items() if kind.kind in kinds and of == name), None)
