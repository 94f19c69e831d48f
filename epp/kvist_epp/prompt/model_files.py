"""The files of a model: where they come from, and what engines read in them."""

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from kvist_epp.errors import ModelFilesError
from kvist_epp.prompt.tiktoken_vocab import kimi_tokenizer

HUB: Final = "hf://"
TEKKEN: Final = "tekken.json"
TIKTOKEN: Final = "tiktoken.model"
PARAMS: Final = "params.json"
"""The configuration of a model in Mistral's own format."""
HUB_FILES: Final = (
    "config.json",
    TEKKEN,
    PARAMS,
    TIKTOKEN,
    "tokenizer.model.v*",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""Files that are fetched from the hub: never weights, never pickles, never code."""

SPECIALS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that transformers passes to a template."""

AUTO: Final = "auto"
TOKENIZER_MODES: Final = {
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "DeepseekV4ForConditionalGeneration": "deepseek_v4",
    "DeepseekV41ForCausalLM": "deepseek_v41",
    "KimiK3ForConditionalGeneration": "kimi_k3",
    "InklingForCausalLM": "inkling",
    "InklingForConditionalGeneration": "inkling",
}
"""Engines' ``--tokenizer-mode`` for architectures whose chats they write in code of their own, whatever
template the files hold (``vllm.config.model``, 0.33)."""
MISTRAL: Final = "mistral"
"""Mode of engines that use Mistral's own tokenizer."""
_WEIGHTS_OF_MISTRAL: Final = "consolidated*.safetensors"
TEMPLATE_MODES: Final = ("hf", "slow")
"""Modes of engines that render the template in the model's files."""


def model_folder(source: str) -> Path:
    """Return the folder with a model's files: ``source`` itself, or a snapshot of ``hf://repo[@revision]``.

    Raises:
        ModelFilesError: the folder is absent or the download failed; names the remedy.
    """
    if source.startswith(HUB):
        return _snapshot(source)
    found = Path(source)
    if not found.is_dir():
        raise ModelFilesError(
            f"no folder {source}: give a folder with tokenizer.json, or hf://repo[@revision]"
        )
    return found


def _snapshot(source: str) -> Path:
    import huggingface_hub

    repo, revision = _repository(source)
    try:
        found = huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=list(HUB_FILES))
    except Exception as error:
        raise ModelFilesError(f"cannot fetch {source} ({type(error).__name__}): {_remedy(error)}") from error
    return Path(found)


def _repository(source: str) -> tuple[str, str | None]:
    """Return the repository and the revision of a source on the hub."""
    repo, _, revision = source.removeprefix(HUB).partition("@")
    return repo, revision or None


def _remedy(error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, (errors.GatedRepoError, errors.RepositoryNotFoundError)):
        return "check the name, and set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.RevisionNotFoundError):
        return "check the revision after the @"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "not in the cache: unset HF_HUB_OFFLINE, let the picker reach HF_ENDPOINT, or mount the folder"
    return "let the picker reach the hub (HF_ENDPOINT, HF_TOKEN), or give a folder"


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one if there is no such file.

    Raises:
        ModelFilesError: the file cannot be read, or holds something else.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFilesError(
            f"cannot read {path} as JSON ({type(error).__name__}): fetch it again"
        ) from error
    if not isinstance(found, dict):
        raise ModelFilesError(f"{path} is no JSON object: fetch it again")
    return found


def read_tokenizer(home: Path, settings: dict[str, Any], specials: dict[str, str]) -> Tokenizer:
    """Return the tokenizer, with the tokens that only its configuration (``settings``) names.

    Raises:
        ModelFilesError: there is none, or it cannot be read; names the remedy.
    """
    path, other = home / "tokenizer.json", home / TIKTOKEN
    if not path.exists() and other.exists():
        return kimi_tokenizer(other.read_bytes(), settings)
    if not path.exists():
        raise ModelFilesError(
            f"no {path}: kvist reads fast tokenizers; transformers' AutoTokenizer.save_pretrained writes one"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelFilesError(f"cannot read {path}: fetch it again, or upgrade `tokenizers`") from error
    _add_missing(tokenizer, settings, specials)
    return tokenizer


def _add_missing(tokenizer: Tokenizer, settings: dict[str, Any], specials: dict[str, str]) -> None:
    """Add the tokens that only the configuration lists, in the order of transformers."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder") or {}
    described = [listed[key] for key in sorted(listed, key=int)]
    tokens = [AddedToken(**token) for token in described if token["content"] not in known]
    known |= {token.content for token in tokens}
    tokens += [
        AddedToken(text, special=True) for text in dict.fromkeys(specials.values()) if text not in known
    ]
    if tokens:
        tokenizer.add_tokens(tokens)


def special_tokens(home: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the named special tokens; the older file counts only if no tokens are configured."""
    found = {name: settings.get(name) for name in SPECIALS}
    if "added_tokens_decoder" not in settings:
        named = read_json(home / "special_tokens_map.json")
        found |= {name: named[name] for name in SPECIALS if name in named}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def tokenizer_code(settings: dict[str, Any]) -> str:
    """Return the class beside the model that engines use as its tokenizer, ``module.Class``; empty: none."""
    found = settings.get("auto_map")
    named = found.get("AutoTokenizer") if isinstance(found, dict) else None
    first = named[0] if isinstance(named, list) and named else named
    return first if isinstance(first, str) else ""


def chat_templates(home: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return templates by name: files take precedence; ``chat_template.json`` belongs to a processor."""
    files = {
        path.stem: path.read_text(encoding="utf-8") for path in home.glob("additional_chat_templates/*.jinja")
    }
    if (home / "chat_template.jinja").exists():
        files["default"] = (home / "chat_template.jinja").read_text(encoding="utf-8")
    if files:
        return files
    configured = settings.get("chat_template")
    named = _named(configured)
    if (home / "chat_template.json").exists():
        processor = _named(read_json(home / "chat_template.json").get("chat_template"))
        return {"tool_use": named["default"], **named, **processor} if "default" in named else processor
    return named


def tokenizer_mode(source: str, home: Path, described: dict[str, Any]) -> str:
    """Return the ``--tokenizer-mode`` that engines choose by themselves: by architecture or by files.

    ``described``: the configuration of the model, ``home``: the folder of its ``source``.

    Raises:
        ModelFilesError: the hub does not say what it has to say.
    """
    named = described.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    if isinstance(first, str) and first in TOKENIZER_MODES:
        return TOKENIZER_MODES[first]
    has_tekken = (home / TEKKEN).exists()
    if has_tekken and not (home / "tokenizer.json").exists():
        return MISTRAL
    if (has_tekken or any(home.glob("tokenizer.model.v*"))) and _has_weights_of_mistral(source, home):
        return MISTRAL
    return TEMPLATE_MODES[0]


def _has_weights_of_mistral(source: str, home: Path) -> bool:
    """Return whether weights are in the format of Mistral: those of others, who quantize them, are not.

    Weights are not fetched, so that the hub has to say it; offline, the configuration of that format does.

    Raises:
        ModelFilesError: the hub does not answer.
    """
    if not source.startswith(HUB):
        return any(home.rglob(_WEIGHTS_OF_MISTRAL))
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled

    repo, revision = _repository(source)
    try:
        files = huggingface_hub.list_repo_files(repo, revision=revision)
    except OfflineModeIsEnabled:
        return (home / PARAMS).exists()
    except Exception as error:
        raise ModelFilesError(
            f"cannot list the files of {source} ({type(error).__name__}), by which engines choose the "
            f"mode of their tokenizer: set --tokenizer-mode, or {_remedy(error)}"
        ) from error
    return any(fnmatch(file.rpartition("/")[2], _WEIGHTS_OF_MISTRAL) for file in files)


def _named(template: Any) -> dict[str, str]:
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return template if isinstance(template, dict) else {}
