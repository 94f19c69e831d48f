"""Facts and commit of a model in the pool's status: a hub that is away or has moved on changes nothing. Pure.

The commit of an unpinned model is looked up once, for the first plan, and stays until ``spec.model`` changes.
The files that facts were read from are kept too, unless they are very large: then the hub is asked again
after a restart of the operator.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.models.shape import COMPUTED, Facts, ModelFiles
from kvist_operator.spec.pool import Pool

MOST_BYTES: Final = 96 * 1024
"""Length of the files that are kept for one model: an object may have about 1.5 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """The commit of a pool's model, and its files and those of its draft model as far as they are kept."""

    revision: str = ""
    files: ModelFiles | None = None
    draft: ModelFiles | None = None


def known_model(pool: Pool, status: Mapping[str, Any]) -> KnownModel | None:
    """Return what a status says of the model that the pool has now; None if that is another one."""
    kept = status.get("model") or {}
    if kept.get("source") != _source(pool):
        return None
    draft = kept.get("draft") or {}
    return KnownModel(
        revision=kept.get("revision", ""),
        files=_files(pool.model.location, kept),
        draft=_files(draft["source"], draft) if draft else None,
    )


def model_status(pool: Pool, facts: Facts, draft: Facts | None) -> dict[str, Any]:
    """Return the value of ``status.model``."""
    made: dict[str, Any] = {"source": _source(pool), "revision": facts.revision, **_kept(facts.files)}
    if draft and draft.files:
        made["draft"] = {
            "source": draft.files.repository,
            "revision": draft.revision,
            **_kept(draft.files),
        }
    return made


def _source(pool: Pool) -> str:
    """Return the model as the spec names it; a change of any part makes another model of it."""
    model, proposer = pool.model, pool.engine.speculative
    revision = f"@{model.revision}" if model.revision else ""
    draft = f" with {proposer.model}" if proposer and proposer.model else ""
    return f"{model.kind}://{model.location}{revision}{draft}"


def _kept(files: ModelFiles | None) -> dict[str, Any]:
    if files is None:
        return {}
    texts = {
        "quantConfig": files.quant_config,
        "modules": files.modules,
        "poolingConfig": files.pooling_config,
        "sentenceConfig": files.sentence_config,
    }
    if len(files.config) + sum(map(len, texts.values())) > MOST_BYTES:
        return {}
    return {
        "config": files.config,
        **{name: text for name, text in texts.items() if text},
        **({"sentenceRead": True} if files.sentence_read else {}),
        "checkpointBytes": files.checkpoint_bytes,
        "checkpointSource": files.checkpoint_source,
    }


def _files(repository: str, kept: Mapping[str, Any]) -> ModelFiles | None:
    if not kept.get("config"):
        return None
    return ModelFiles(
        repository=repository,
        revision=kept.get("revision", ""),
        config=kept["config"],
        quant_config=kept.get("quantConfig", ""),
        modules=kept.get("modules", ""),
        pooling_config=kept.get("poolingConfig", ""),
        sentence_config=kept.get("sentenceConfig", ""),
        sentence_read=bool(kept.get("sentenceRead")),
        checkpoint_bytes=int(kept.get("checkpointBytes") or 0),
        checkpoint_source=kept.get("checkpointSource", COMPUTED),
    )
