"""The fields of the spec that a pod of each component is changed by: what remedies name. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.manifests.object_names import COMPONENT, ENGINE, ENVOY, PICKER

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ComponentFields:
    """One component; each field as it stands in a sentence."""

    component: str
    main: str
    """Name of its own container; others come from an overlay or a webhook."""
    image: str
    resources: str
    starting: str
    """What gives it longer to start; empty where nothing does."""
    command: str
    """What its arguments come from."""
    volumes: str


PARTS: Final[Mapping[str, ComponentFields]] = {
    ENGINE: ComponentFields(
        component=ENGINE,
        main=ENGINE,
        image="spec.engine.image",
        resources="spec.podTemplate.spec.containers[engine].resources",
        starting="spec.rollout.startupSeconds",
        command="spec.engine.extraArgs and spec.engine.env",
        volumes="spec.model.source and spec.podTemplate.spec.volumes",
    ),
    PICKER: ComponentFields(
        component=PICKER,
        main=PICKER,
        image="spec.picker.image",
        resources="spec.picker.resources",
        starting="",
        command="spec.picker (an image of the operator's own version?)",
        volumes="spec.picker.tokenizer",
    ),
    ENVOY: ComponentFields(
        component=ENVOY,
        main=ENVOY,
        image="the Envoy image that the operator was installed with",
        resources="the namespace's limits",
        starting="",
        command="spec.gateway (an Envoy image of another version?)",
        volumes="the ConfigMaps of the pool",
    ),
}


def part_of(pod: Object) -> ComponentFields:
    """By the pod's label; engines' where it has none."""
    labels = pod["metadata"].get("labels") or {}
    return PARTS.get(labels.get(COMPONENT, ENGINE), PARTS[ENGINE])
