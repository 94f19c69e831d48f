"""Volumes for what comes from claims and images: the model, its adapters, a tokenizer. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvist_operator.plan.resources import ADAPTER_MOUNT, MODEL_MOUNT
from kvist_operator.spec.pool import ModelRef, Pool, Source
from kvist_operator.spec.pool_reader import split_source

from .cluster_facts import Json

TOKEN_VARIABLE: Final = "HF_TOKEN"  # a name, not a token


@dataclass(frozen=True, slots=True)
class Mounted:
    """A volume, and where a container has it."""

    volume: Json
    mount: Json


def model_mounts(pool: Pool) -> list[Mounted]:
    """The model and its adapters, where they are claims or images; all of them read-only."""
    found = [mounted("model", pool.model.kind, pool.model.location, MODEL_MOUNT, whole=True)]
    for i, adapter in enumerate(pool.model.adapters):
        kind, location = split_source(adapter.source, f"spec.model.adapters[{i}].source")
        found.append(mounted(f"adapter-{i}", kind, location, f"{ADAPTER_MOUNT}/{adapter.name}"))
    return [each for each in found if each]


def mounted(name: str, kind: Source, location: str, path: str, *, whole: bool = False) -> Mounted | None:
    """None for what is fetched from the hub or is in the container's image.

    ``whole``: the claim is mounted as it is, else the folder of it that ``location`` names.
    """
    mount: Json = {"name": name, "mountPath": path, "readOnly": True}
    if kind is Source.IMAGE:
        return Mounted({"name": name, "image": {"reference": location, "pullPolicy": "IfNotPresent"}}, mount)
    if kind is not Source.CLAIM:
        return None
    claim, _, folder = location.partition("/")
    if folder and not whole:
        mount["subPath"] = folder
    volume = {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    return Mounted(volume, mount)


def token(model: ModelRef) -> Iterable[Json]:
    """The variable with the hub's token, from the user's Secret: the operator never reads it."""
    if model.token is None:
        return ()
    key = {"name": model.token.name, "key": model.token.key}
    return ({"name": TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": key}},)
