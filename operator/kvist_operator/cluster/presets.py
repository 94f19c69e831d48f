"""Presets of the cluster, listed from time to time. No I/O but by the ``Cluster``.

They are not watched: an operator of some namespaces would need the right to watch its own namespace too, and
a change of a preset never has to take effect at once.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvist_operator.errors import Forbidden, NotServed, SpecError

from .cluster_api import Cluster, Json
from .kinds import PRESET, Target, target_of

logger = logging.getLogger(__name__)

FIELD = "spec.presetRef"


@dataclass(slots=True)
class Presets:
    """Presets by namespace and name.

    A pool's preset is looked up in its own namespace, then in the operator's, ``home``. ``namespaces`` are
    those that the operator manages; empty for all.
    """

    cluster: Cluster
    namespaces: Sequence[str] = ()
    home: str = ""
    _known: dict[Target, Json] = field(default_factory=dict)

    async def refresh(self) -> bool:
        """List all presets; return whether one has changed. Raises ClusterError, and then keeps the former
        ones."""
        spaces = dict.fromkeys([*self.namespaces, *filter(None, [self.home])]) if self.namespaces else ("",)
        try:
            pages = [await self.cluster.find(PRESET, space) for space in spaces]
        except (NotServed, Forbidden) as error:
            logger.debug("presets cannot be listed: %s", error)
            pages = []
        found = {target_of(each): each for page in pages for each in page}
        before = {target: _version(each) for target, each in self._known.items()}
        self._known = found
        return before != {target: _version(each) for target, each in found.items()}

    async def find(self, namespace: str, name: str) -> Json:
        """Return the preset for a pool in this namespace; one that is not known yet is looked up.

        Raises:
            SpecError: there is none of this name.
            ClusterError: the operator may not read presets, or the API server does not answer.
        """
        spaces = list(dict.fromkeys(filter(None, [namespace, self.home])))
        targets = [Target(PRESET, space, name) for space in spaces]
        for target in targets:
            if target in self._known:
                return self._known[target]
        for target in targets:
            found = await self.cluster.get(target)
            if found is not None:
                self._known[target] = found
                return found
        if PRESET not in await self.cluster.served([PRESET]):
            problem = (
                f"this cluster has no {PRESET.resource}: kubectl apply --server-side "
                f"-f crds/{PRESET.plural}.yaml"
            )
            raise SpecError(FIELD, problem)
        where = " or ".join(spaces)
        raise SpecError(FIELD, f"there is no {PRESET.kind} {name} in {where}: create it, or correct the name")


def _version(found: Json) -> str:
    return str(found["metadata"].get("resourceVersion", ""))
