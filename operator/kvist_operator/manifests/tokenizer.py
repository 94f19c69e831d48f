"""Where the picker finds the tokenizer: the model's own source where it can be read there. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvist_operator.plan.resources import MODEL_MOUNT
from kvist_operator.spec.pool import Pool, Source
from kvist_operator.spec.pool_reader import split_source

from .cluster_facts import Json, Note, Site
from .sources import Mounted, mounted, token

SHARED: Final = frozenset({"ReadOnlyMany", "ReadWriteMany"})
VOLUME: Final = "tokenizer"
REASON: Final = "NoTokenizer"
REMEDY: Final = "set spec.picker.tokenizer, such as hf://org/model; until then it goes by its routing history"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """Tokenizer settings for the picker."""

    model: str = ""
    """``--model``; empty = approximate mode."""
    mount: Mounted | None = None
    env: tuple[Json, ...] = ()
    note: Note | None = None
    """Why there is none."""


def tokenizer(pool: Pool, site: Site) -> Tokenizer:
    """From ``spec.picker.tokenizer``, else from the model's source."""
    if pool.picker.mode == "Approximate" or not pool.engine.prefix_caching:
        return Tokenizer()
    if pool.picker.tokenizer:
        kind, location = split_source(pool.picker.tokenizer, "spec.picker.tokenizer")
        return _at(pool, kind, location, "")
    if pool.model.kind is Source.PATH:
        return _none(f"the picker's image does not contain {pool.model.location}")
    if pool.model.kind is Source.CLAIM and not site.claims.get(pool.model.claim, frozenset()) & SHARED:
        return _none(_claimed(pool.model.claim, site))
    return _at(pool, pool.model.kind, pool.model.location, pool.model.revision)


def _at(pool: Pool, kind: Source, location: str, revision: str) -> Tokenizer:
    if kind is Source.HUB:
        name = f"hf://{location}@{revision}" if revision else f"hf://{location}"
        return Tokenizer(model=name, env=tuple(token(pool.model)))
    if kind is Source.PATH:
        return Tokenizer(model=location)
    folder = location.partition("/")[2] if kind is Source.CLAIM else ""
    mount = mounted(VOLUME, kind, location, MODEL_MOUNT, whole=True)
    return Tokenizer(model=f"{MODEL_MOUNT}/{folder}".rstrip("/"), mount=mount)


def _claimed(claim: str, site: Site) -> str:
    modes = site.claims.get(claim)
    if modes is None:
        return f"the access modes of claim {claim} are unknown"
    return f"claim {claim} ({', '.join(sorted(modes))}) can be mounted by one node only"


def _none(why: str) -> Tokenizer:
    return Tokenizer(note=Note("Precise", REASON, f"the picker has no tokenizer: {why}; {REMEDY}"))


def notes(found: Tokenizer) -> Iterable[Note]:
    """At most one."""
    return () if found.note is None else (found.note,)
