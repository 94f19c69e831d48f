"""Whether an object in the cluster is what was intended, so that at rest nothing is written. Pure.

Two questions. Was this intent the last one applied (a hash in an annotation: fields we no longer set)? Does
the object still say all of it (drift)? What others add beside is theirs: defaults of the API server, items of
keyed lists.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from kvist_operator.manifests.names import INTENT
from kvist_operator.manifests.nouns import Json
from kvist_operator.manifests.overlay import MERGED_BY

AMOUNTS: Final = ("limits", "requests", "sizeLimit")
"""Fields with quantities, which come back in another spelling than they were sent in."""
_SCALES: Final[Mapping[str, Decimal]] = {
    **{suffix: Decimal(10) ** power for suffix, power in (("n", -9), ("u", -6), ("m", -3), ("", 0))},
    **{suffix: Decimal(1000) ** i for i, suffix in enumerate("kMGTP", 1)},
    **{f"{suffix}i": Decimal(1024) ** i for i, suffix in enumerate("KMGTP", 1)},
}
_KEYS: Final[Mapping[str, str]] = {**MERGED_BY, "ownerReferences": "uid"}


def stamped(desired: Json) -> Json:
    """The object with the hash of its intent, which is what is applied."""
    digest = hashlib.sha256(json.dumps(desired, sort_keys=True).encode()).hexdigest()[:16]
    meta = desired["metadata"]
    return {**desired, "metadata": {**meta, "annotations": {**meta.get("annotations", {}), INTENT: digest}}}


def as_intended(desired: Json, observed: Json) -> bool:
    """Whether applying ``desired`` (stamped or not) would change nothing of ours."""
    return _within(stamped(_bare(desired)), observed, "")


def _bare(desired: Json) -> Json:
    """Without a stamp of its own."""
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
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]i|[numkMGTP]|)", str(value))
    return Decimal(matched[1]) * _SCALES[matched[2]] if matched else None
