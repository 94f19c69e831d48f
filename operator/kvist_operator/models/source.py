"""Where a model's facts come from: what the user gives, a folder, the catalogue, the hub.

The only module of the core that reads files or asks the network. From the hub come config.json, ModelOpt's
quantisation file and the size of the weights, never the weights; the hub's client keeps them in its cache.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from kvist_operator.errors import ModelError, ModelNotFound
from kvist_operator.spec.pool import ModelRef, Shape, Source

from .catalogue import Entry, lookup
from .facts import COMPUTED, Facts, SizedModel
from .shape import from_config

CONFIG: Final = "config.json"
BESIDE: Final = "hf_quant_config.json"
INDEX: Final = "model.safetensors.index.json"
TIMEOUT_SECONDS: Final = 10


class ModelHub(Protocol):
    """The requests to a model hub."""

    def text(self, repository: str, revision: str, file: str) -> str | None:
        """The text of a file; None where the repository has no such file.

        Raises:
            ModelNotFound: the hub, the repository or the revision cannot be reached.
        """

    def sizes(self, repository: str, revision: str) -> Mapping[str, int]:
        """Bytes of each file of the repository. Raises ModelNotFound."""


def facts(ref: ModelRef, hub: ModelHub | None = None) -> Facts:
    """Return the facts of a pool's model, from the best source that has them.

    Raises:
        ModelError: the facts are there but cannot be used.
        ModelNotFound: no source has them; says what to set.
    """
    return _found("spec.model.source", ref, hub)


def _found(field: str, ref: ModelRef, hub: ModelHub | None) -> Facts:
    """An error is of the field that names the model, unless it names another."""
    try:
        return _looked_up(ref, hub)
    except ModelError as error:
        said = str(error)
        raise type(error)(said if said.startswith("spec.") else f"{field}: {said}") from error


def _looked_up(ref: ModelRef, hub: ModelHub | None) -> Facts:
    if ref.shape is not None:
        return given(ref.shape, ref.location)
    found = _folder(ref) or _known(ref)
    if found is not None:
        return found
    if ref.kind is Source.HUB:
        return from_hub(ref.location, ref.revision, hub or HuggingFace())
    raise ModelNotFound(
        f"spec.model.shape: nothing here can read {ref.location}: give the keys of its config.json as "
        "spec.model.shape.config and the size of its files as spec.model.shape.checkpointSize"
    )


def draft_facts(name: str, shape: Shape | None, hub: ModelHub | None = None) -> Facts:
    """Return the facts of a draft model: ``hf://org/draft`` or a path. Raises like ``facts``."""
    if shape is not None:
        return given(shape, name)
    location = name.removeprefix("hf://")
    kind = Source.PATH if location.startswith("/") else Source.HUB
    return _found("spec.engine.speculative.model", ModelRef(kind=kind, location=location), hub)


def given(shape: Shape, name: str) -> Facts:
    """Return the facts from ``spec.model.shape``."""
    size = shape.checkpoint_bytes
    return Facts(
        model=SizedModel(
            shape=from_config(shape.config, name="spec.model.shape.config"), checkpoint_bytes=size
        ),
        source=f"spec.model.shape for {name}",
        checkpoint_source="spec.model.shape.checkpointSize" if size else COMPUTED,
    )


def _known(ref: ModelRef) -> Facts | None:
    """The catalogue's, for a repository of the hub whose revision is not pinned."""
    entry = lookup(ref.location) if ref.kind is Source.HUB and not ref.revision else None
    return from_entry(entry) if entry else None


def from_entry(entry: Entry) -> Facts:
    """Return the facts from the catalogue."""
    return Facts(
        model=SizedModel(
            shape=from_config(entry.config, name=entry.name), checkpoint_bytes=entry.checkpoint_bytes
        ),
        source="catalogue",
        checkpoint_source=entry.checkpoint_source,
        tool_parser=entry.tool_parser,
        reasoning_parser=entry.reasoning_parser,
        remote_code=entry.remote_code,
    )


def _folder(ref: ModelRef) -> Facts | None:
    folder = Path(ref.location)
    if ref.kind is not Source.PATH or not folder.is_dir():
        return None
    return from_folder(folder)


def from_folder(folder: Path) -> Facts:
    """A folder with config.json and safetensors files. Raises ModelError."""
    config = folder / CONFIG
    if not config.is_file():
        raise _without_config(str(folder), [path.name for path in folder.iterdir()])
    beside = folder / BESIDE
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return _facts(
        _object(config.read_text(encoding="utf-8"), str(config)),
        _object(beside.read_text(encoding="utf-8"), str(beside)) if beside.is_file() else None,
        name=str(config),
        size=size,
        said=f"folder {folder}",
        sized="size of the files",
    )


def from_hub(repository: str, revision: str, hub: ModelHub) -> Facts:
    """A repository of the hub. Raises ModelError, ModelNotFound."""
    text = hub.text(repository, revision, CONFIG)
    if text is None:
        raise _without_config(f"hf://{repository}", list(hub.sizes(repository, revision)))
    beside = hub.text(repository, revision, BESIDE)
    size, sized = _hub_size(repository, revision, hub)
    return _facts(
        _object(text, f"{repository}: {CONFIG}"),
        _object(beside, f"{repository}: {BESIDE}") if beside else None,
        name=f"{repository}: {CONFIG}",
        size=size,
        said=f"hub, {repository}" + (f" at {revision}" if revision else ""),
        sized=sized,
    )


def _hub_size(repository: str, revision: str, hub: ModelHub) -> tuple[int, str]:
    index = hub.text(repository, revision, INDEX)
    total = _object(index, f"{repository}: {INDEX}").get("metadata", {}).get("total_size") if index else None
    if isinstance(total, int | float) and total > 0:
        return int(total), "total_size of the safetensors index"
    files = hub.sizes(repository, revision)
    size = sum(n for name, n in files.items() if name.endswith(".safetensors") and "/" not in name)
    return size, "size of the files" if size else COMPUTED


def _facts(
    config: Mapping[str, Any],
    beside: Mapping[str, Any] | None,
    *,
    name: str,
    size: int,
    said: str,
    sized: str,
) -> Facts:
    model = SizedModel(shape=from_config(config, name=name, beside=beside), checkpoint_bytes=size)
    return Facts(model=model, source=said, checkpoint_source=sized if size else COMPUTED)


def _without_config(where: str, files: list[str]) -> ModelError:
    if any(name.lower().endswith(".gguf") for name in files):
        return ModelError(
            f"{where}: GGUF checkpoints are refused: vLLM has no GGUF loader any more; use a safetensors "
            "repository of the model, with AWQ, GPTQ, FP8 or compressed-tensors if it has to be small"
        )
    return ModelError(f"{where}: there is no {CONFIG}: give the facts as spec.model.shape")


def _object(text: str | None, name: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text or "")
    except ValueError as error:
        raise ModelError(f"{name}: is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise ModelError(f"{name}: is no JSON object")
    return found


class HuggingFace:
    """The hub by its own client, set by ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME``, ``HF_HUB_OFFLINE``."""

    def text(self, repository: str, revision: str, file: str) -> str | None:
        from huggingface_hub import errors, hf_hub_download

        try:
            path = hf_hub_download(repository, file, revision=revision or None, etag_timeout=TIMEOUT_SECONDS)
        except (errors.EntryNotFoundError, errors.LocalEntryNotFoundError) as error:
            if isinstance(error, errors.LocalEntryNotFoundError):
                raise self._unreachable(repository, error) from error
            return None
        except Exception as error:
            raise self._unreachable(repository, error) from error
        return Path(path).read_text(encoding="utf-8")

    def sizes(self, repository: str, revision: str) -> Mapping[str, int]:
        from huggingface_hub import HfApi

        try:
            info = HfApi().model_info(
                repository, revision=revision or None, files_metadata=True, timeout=TIMEOUT_SECONDS
            )
        except Exception as error:
            raise self._unreachable(repository, error) from error
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}

    @staticmethod
    def _unreachable(repository: str, error: Exception) -> ModelNotFound:
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError | errors.RepositoryNotFoundError):
            remedy = "check the name, and that HF_TOKEN (spec.model.tokenSecretRef for engines) may read it"
        elif isinstance(error, errors.RevisionNotFoundError):
            remedy = "check spec.model.revision"
        else:
            remedy = "let this machine reach the hub (HF_ENDPOINT), or give the facts as spec.model.shape"
        return ModelNotFound(f"hf://{repository}: not in the catalogue, and the hub gives nothing: {remedy}")
