"""Where a model's files come from: a folder, or the Hugging Face hub."""

from pathlib import Path
from typing import Final

from kvist_epp.errors import ModelFilesError

HUB: Final = "hf://"
PATTERNS: Final = (
    "config.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""What is fetched: never weights, never pickles, never code."""


def folder(source: str) -> Path:
    """The folder with a model's files: ``source`` itself, or a snapshot of ``hf://repo[@revision]``.

    Raises:
        ModelFilesError: no such folder, or the hub does not give it; names the remedy.
    """
    if source.startswith(HUB):
        return _snapshot(source[len(HUB) :])
    found = Path(source)
    if not found.is_dir():
        raise ModelFilesError(
            f"no folder {source}: give a folder with tokenizer.json, or hf://repo[@revision]"
        )
    return found


def _snapshot(name: str) -> Path:
    import huggingface_hub

    repo, _, revision = name.partition("@")
    try:
        found = huggingface_hub.snapshot_download(
            repo, revision=revision or None, allow_patterns=list(PATTERNS)
        )
    except Exception as error:
        raise ModelFilesError(
            f"cannot fetch {HUB}{name} ({type(error).__name__}): {_remedy(error)}"
        ) from error
    return Path(found)


def _remedy(error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, (errors.GatedRepoError, errors.RepositoryNotFoundError)):
        return "check the name, and set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.RevisionNotFoundError):
        return "check the revision after the @"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "not in the cache: unset HF_HUB_OFFLINE, let the picker reach HF_ENDPOINT, or mount the folder"
    return "let the picker reach the hub (HF_ENDPOINT, HF_TOKEN), or give a folder"
