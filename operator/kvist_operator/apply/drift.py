"""Decides whether an object in the cluster is as intended, so that nothing is written at rest. Pure.

Two conditions: this intent was the last one applied (a hash in an annotation, which also reveals fields that
are no longer set), and the object still has all its values (no drift). Additions of others are theirs:
defaults of the API server, items of keyed lists.
"""

import hashlib
import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from kvist_kube.quantity import parse_quantity
from kvist_operator.manifests.cluster_facts import Json
from kvist_operator.manifests.object_names import INTENT
from kvist_operator.manifests.overlay import MERGED_BY

AMOUNTS: Final = ("limits", "requests", "sizeLimit")
"""Fields with quantities, which the API server may return in another notation."""
_KEYS: Final[Mapping[str, str]] = {**MERGED_BY, "ownerReferences": "uid"}


def stamped(desired: Json) -> Json:
    """Return the object with the hash of its intent in an annotation, as it is applied."""
    digest = hashlib.sha256(json.dumps(desired, sort_keys=True).encode()).hexdigest()[:16]
    meta = desired["metadata"]
    return {**desired, "metadata": {**meta, "annotations": {**meta.get("annotations", {}), INTENT: digest}}}


def as_intended(desired: Json, observed: Json) -> bool:
    """Return whether applying ``desired`` (stamped or not) would change none of our fields."""
    return _within(stamped(_bare(desired)), observed, "")


def _bare(desired: Json) -> Json:
    """Return the object without a stamp."""
    meta = desired["metadata"]
    if INTENT not in meta.get("annotations", {}):
        return desired
    annotations = {name: value for name, value in meta["annotations"].items() if name != INTENT}
    rest = {name: value for name, value in meta.items() if name != "annotations"}
    return {**desired, "metadata": {**rest, **({"annotations": annotations} if annotations else {})}}


def _within(wanted: Any, found: Any, key: str) -> bool:
    if isinstance(wanted, Mapping):
        if not isinstance(found, Mapping):
            return not wanted and found is None  # the API server leaves out what is empty
        return all(_within(v, found.get(k), key if key in AMOUNTS else k) for k, v in wanted.items())
    if isinstance(wanted, list):
        return _lists(wanted, found, key)
    return wanted == found or (key in AMOUNTS and _amount(wanted) == _amount(found) is not None)


def _lists(wanted: list[Any], found: Any, key: str) -> bool:
    if not isinstance(found, list):
        return not wanted and found is None
    by = _KEYS.get(key)
    if by and all(isinstance(item, Mapping) and by in item for item in (*wanted, *found)):
        known = {item[by]: item for item in found}
        return all(_within(item, known.get(item[by]), "") for item in wanted)
    return len(wanted) == len(found) and all(_within(a, b, "") for a, b in zip(wanted, found, strict=True))


def _amount(value: Any) -> Decimal | None:
    try:
        return parse_quantity(str(value))
    except ValueError:
        return None
