"""The facts of a pool's model: from the spec, a local folder, the catalogue of the package, or the hub.

This module asks the network, and no other of the package. It gets config.json, ModelOpt's
quantization file and the size of the weights from the hub, never the weights; the hub's client caches them.
"""

import json
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from kvist_operator.errors import ModelError, ModelNotFound
from kvist_operator.spec.pool import ModelRef, Shape, Source

from .catalogue import from_catalogue, listed_name, near_names, with_parsers
from .config_json import Keys
from .pooling import LENGTH, MODULES, SentenceFiles, pooling_path, read_pooling, read_sentence_files
from .quantization import REFUSED
from .shape import COMPUTED, Facts, ModelFiles, read_shape

CONFIG: Final = "config.json"
QUANT_CONFIG: Final = "hf_quant_config.json"
INDEX: Final = "model.safetensors.index.json"
TIMEOUT_SECONDS: Final = 5
ENDPOINT: Final = "https://huggingface.co"
CONNECT_SECONDS: Final = 1.0
"""Time in which the hub, or the proxy before it, has to accept a connection, its name's lookup included."""


class ModelHub:
    """The hub by its own client, set by ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME``, ``HF_HUB_OFFLINE``."""

    def __init__(self) -> None:
        self._cached_only = False

    def commit(self, repository: str, revision: str) -> str:
        """Return the commit of a branch or tag, of the default branch if empty; that in the client's cache if
        the hub does not answer.

        The client repeats downloads for 24 s before it gives up, but this request is sent once.

        Raises:
            ModelNotFound: the hub does not answer and the cache is empty, or it refuses the repository.
        """
        try:
            check_connection(os.environ.get("HF_ENDPOINT") or ENDPOINT)
        except OSError as error:
            return self._cached_commit(repository, revision, error)
        from huggingface_hub import HfApi, errors

        try:
            info = HfApi().model_info(repository, revision=revision or None, timeout=TIMEOUT_SECONDS)
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
            raise _unreachable(repository, error, revision) from error
        except Exception as error:  # noqa: BLE001 - whatever the client raises, the cache may have the commit
            return self._cached_commit(repository, revision, error)
        return info.sha or revision

    def _cached_commit(self, repository: str, revision: str, error: Exception) -> str:
        """Return the commit in the client's cache. Raises ModelNotFound if it has none."""
        folder = _cache_folder() / f"models--{repository.replace('/', '--')}"
        if not folder.is_dir():  # without the client, whose import takes half a second
            raise _unreachable(repository, error, revision) from error
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(repository, CONFIG, revision=revision or None)
        if not isinstance(cached, str):
            raise _unreachable(repository, error, revision) from error
        self._cached_only = True
        return Path(cached).parent.name  # …/snapshots/<commit>/config.json

    def text(self, repository: str, revision: str, file: str) -> str | None:
        """Return the text of a file; None if the repository does not have it.

        Raises:
            ModelNotFound: the hub, the repository or the revision cannot be reached.
        """
        from huggingface_hub import errors, hf_hub_download

        try:
            path = hf_hub_download(
                *(repository, file),
                revision=revision or None,
                etag_timeout=TIMEOUT_SECONDS,
                local_files_only=self._cached_only,
            )
        except errors.LocalEntryNotFoundError as error:
            if self._cached_only and file != CONFIG:
                return None
            raise _unreachable(repository, error, revision) from error
        except errors.EntryNotFoundError:
            return None
        except Exception as error:
            raise _unreachable(repository, error, revision) from error
        return Path(path).read_text(encoding="utf-8")

    def sizes(self, repository: str, revision: str) -> Mapping[str, int]:
        """Return the bytes of each file of the repository; none without the hub. Raises ModelNotFound."""
        from huggingface_hub import HfApi

        if self._cached_only:
            return {}

        try:
            info = HfApi().model_info(
                repository, revision=revision or None, files_metadata=True, timeout=TIMEOUT_SECONDS
            )
        except Exception as error:
            raise _unreachable(repository, error, revision) from error
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _cache_folder() -> Path:
    """Return the folder of the hub's client for downloads, as it finds it itself."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def check_connection(endpoint: str) -> None:
    """Raise OSError if the hub, or the proxy before it, accepts no connection within a second.

    A client's timeout does not bound the lookup of a name, which takes 20 s where packets are dropped; so
    both are done in a thread that may outlast this call.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise OSError("HF_HUB_OFFLINE is set")
    url = urlsplit(endpoint)
    proxy = getproxies().get(url.scheme)
    if proxy and not proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    address = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    answers: list[OSError | None] = []

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=CONNECT_SECONDS).close()
            answers.append(None)
        except OSError as error:
            answers.append(error)

    thread = threading.Thread(target=connect, name="connection to the hub", daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    error = answers[0] if answers else TimeoutError(f"{address[0]} does not answer")
    if error is not None:
        raise error


def model_facts(ref: ModelRef, hub: ModelHub | None = None, field: str = "spec.model.source") -> Facts:
    """Return the facts of a pool's model, from the best source that has them.

    Raises:
        ModelError: the facts cannot be used. The message begins with ``field``, or another field of the spec.
        ModelNotFound: no source has the facts; the message names the fields to set.
    """
    try:
        if ref.shape is not None:
            return _from_spec(ref.shape, ref.location)
        if ref.kind is Source.PATH and Path(ref.location).is_dir():
            return from_folder(Path(ref.location))
        if ref.kind is Source.HUB:
            found = from_catalogue(ref.location) if not ref.revision else None
            return found or from_hub(ref.location, ref.revision, hub or ModelHub())
        raise ModelNotFound(
            f"spec.model.shape: {ref.location} cannot be read from here: set spec.model.shape.config to the "
            "keys of its config.json and spec.model.shape.checkpointSize to the size of its files"
        )
    except ModelError as error:
        text = str(error)
        raise type(error)(text if text.startswith("spec.") else f"{field}: {text}") from error


def draft_facts(name: str, shape: Shape | None, hub: ModelHub | None = None) -> Facts:
    """Return the facts of a draft model: ``hf://org/draft`` or a path. Raises like ``facts``."""
    if shape is not None:
        return _from_spec(shape, name)
    location = name.removeprefix("hf://")
    kind = Source.PATH if location.startswith("/") else Source.HUB
    return model_facts(ModelRef(kind=kind, location=location), hub, "spec.engine.speculative.model")


def _from_spec(shape: Shape, name: str) -> Facts:
    found = Facts(
        shape=read_shape(shape.config, name="spec.model.shape.config"),
        checkpoint_bytes=shape.checkpoint_bytes,
        source=f"spec.model.shape for {name}",
        checkpoint_source="spec.model.shape.checkpointSize" if shape.checkpoint_bytes else COMPUTED,
    )
    return with_parsers(found)


def from_folder(folder: Path) -> Facts:
    """Return the facts of a folder with config.json and safetensors files. Raises ModelError."""
    config, quant = folder / CONFIG, folder / QUANT_CONFIG
    if not config.is_file():
        raise _without_config(str(folder), [path.name for path in folder.iterdir()])
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    prefix = f"{folder}/"
    modules = _text_of(folder / MODULES)
    pooling = pooling_path(modules, prefix) if modules else ""
    sentence = read_sentence_files(
        modules, _text_of(folder / pooling) if pooling else "", _text_of(folder / LENGTH), prefix
    )
    return _from_files(
        config.read_text(encoding="utf-8"),
        _text_of(quant) or None,
        prefix=prefix,
        size=size,
        source=f"folder {folder}",
        sentence=sentence,
    )


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def from_hub(repository: str, revision: str, hub: ModelHub) -> Facts:
    """Return the facts of a repository of the hub. Raises ModelError, ModelNotFound."""
    commit = hub.commit(repository, revision)
    # by its name, so that the client's cache knows the commit of the branch when the hub is away
    config = hub.text(repository, revision, CONFIG)
    if config is None:
        raise _without_config(f"hf://{repository}", list(hub.sizes(repository, commit)))
    quant = hub.text(repository, commit, QUANT_CONFIG)
    modules = hub.text(repository, commit, MODULES) or ""
    pooling = pooling_path(modules, f"{repository}: ") if modules else ""
    index = hub.text(repository, commit, INDEX)
    listed = _json_object(index, f"{repository}: {INDEX}") if index else {}
    total = listed.get("metadata", {}).get("total_size")
    size_source = "total_size of the safetensors index"
    if not isinstance(total, int | float) or total <= 0:
        files = hub.sizes(repository, commit).items()
        total = sum(size for name, size in files if name.endswith(".safetensors") and "/" not in name)
        size_source = "size of the files"
    return from_model_files(
        ModelFiles(
            repository=repository,
            revision=commit,
            config=config,
            quant_config=quant or "",
            modules=modules,
            pooling_config=(hub.text(repository, commit, pooling) or "") if pooling else "",
            # of a model that generates text nothing but config.json limits the length
            sentence_config=(hub.text(repository, commit, LENGTH) or "")
            if _may_embed(config, modules)
            else "",
            sentence_read=True,
            checkpoint_bytes=int(total),
            checkpoint_source=size_source,
        )
    )


def from_model_files(files: ModelFiles) -> Facts:
    """Return the facts of a repository from files of the hub that were read earlier. Raises ModelError."""
    source = f"hub, {files.repository}" + (f" at {files.revision}" if files.revision else "")
    prefix = f"{files.repository}: "
    texts = files.modules, files.pooling_config, files.sentence_config
    found = _from_files(
        files.config,
        files.quant_config or None,
        prefix=prefix,
        sentence=read_sentence_files(*texts, prefix) if files.sentence_read else None,
        size=files.checkpoint_bytes,
        size_source=files.checkpoint_source,
        source=source,
    )
    return replace(found, revision=files.revision, files=files)


def _may_embed(config: str, modules: str) -> bool:
    """Return whether vLLM would serve it with its pooling runner, so that a file may limit its length."""
    try:
        keys = Keys(json.loads(config))
    except (ValueError, AttributeError):
        return False  # an error that is reported where the file is read
    return bool(modules) or read_pooling(keys, SentenceFiles()) is not None


def _from_files(
    config: str,
    quant_config: str | None,
    *,
    prefix: str,
    size: int,
    source: str,
    size_source: str = "size of the files",
    sentence: SentenceFiles | None = None,
) -> Facts:
    name = f"{prefix}{CONFIG}"
    quant = _json_object(quant_config, f"{prefix}{QUANT_CONFIG}") if quant_config else None
    shape = read_shape(_json_object(config, name), name=name, quant_config=quant, sentence=sentence)
    size_source = size_source if size else COMPUTED
    return with_parsers(
        Facts(shape=shape, checkpoint_bytes=size, source=source, checkpoint_source=size_source)
    )


def _without_config(where: str, files: list[str]) -> ModelError:
    if any(name.lower().endswith(".gguf") for name in files):
        return ModelError(f"{where}: {REFUSED['gguf']}")
    return ModelError(f"{where}: there is no {CONFIG}: give the facts as spec.model.shape")


def _json_object(text: str, name: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{name} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ModelError(f"{name} is not a JSON object")
    return found


def _unreachable(repository: str, error: Exception, revision: str) -> ModelNotFound:
    kind, hub = type(error).__name__, "the hub refused"
    if kind in ("GatedRepoError", "RepositoryNotFoundError"):
        remedy = "check the name, and that HF_TOKEN (spec.model.tokenSecretRef for engines) may read it"
    elif kind == "RevisionNotFoundError":
        remedy = "check spec.model.revision"
    else:
        hub = "the hub did not answer"
        remedy = "let this machine reach the hub (HF_ENDPOINT), or give the facts as spec.model.shape"
    near = ", ".join(near_names(repository))
    why = f"not in the catalogue (similar names there: {near})" if near else "not in the catalogue"
    if revision and listed_name(repository):
        why = "the catalogue, which has it, has no revisions"
        remedy += "; or leave spec.model.revision out, to plan with the catalogue's facts"
    return ModelNotFound(f"hf://{repository}: {why}, and {hub}: {remedy}")
