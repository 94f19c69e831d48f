"""Reads from config.json and the files of sentence-transformers how vLLM pools a model's output. Pure.

A pooling model turns each prompt into vectors or scores (embedding, rerank, classification, reward models).
The rules are those of vLLM 0.30 to 0.33: ``config/model.py`` (``_SUFFIX_TO_DEFAULTS``, ``attn_type``,
``is_chunked_prefill_supported``, ``is_prefix_caching_supported``), ``model_executor/models/registry.py`` and
``config.py``, ``transformers_utils/config.py`` (``get_pooling_config``).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvist_operator.errors import ModelError
from kvist_operator.spec.pool import Task

from .config_json import Keys

FIELD: Final = "spec.model.task"
MODULES: Final = "modules.json"
LENGTH: Final = "sentence_bert_config.json"
POOLING_MODULES: Final = (
    "sentence_transformers.models.Pooling",
    "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
)
SUFFIXES: Final[tuple[tuple[str, Task], ...]] = (
    ("ForCausalLM", Task.GENERATE),
    ("ForConditionalGeneration", Task.GENERATE),
    ("ChatModel", Task.GENERATE),
    ("LMHeadModel", Task.GENERATE),
    ("ForMaskedLM", Task.EMBED),
    ("ForTextEncoding", Task.EMBED),
    ("EmbeddingModel", Task.EMBED),
    ("ForSequenceClassification", Task.CLASSIFY),
    ("ForTokenClassification", Task.CLASSIFY),
    ("ClassificationModel", Task.CLASSIFY),
    ("ForRewardModeling", Task.CLASSIFY),
    ("ForProcessRewardModel", Task.CLASSIFY),
    ("RewardModel", Task.CLASSIFY),
    ("Model", Task.EMBED),
)
"""End of an architecture's name → its task, the first that matches. vLLM calls reward models ``embed``, but
they answer at /pooling with rewards, not embeddings."""
GENERATING: Final = (
    "ChatGLMModel",
    "MiDashengLMModel",
    "MossAudioModel",
    "Qwen2_5OmniModel",
    "UltravoxModel",
)
"""Architectures that generate text, whatever their names end with (vLLM's registry)."""
HEADS: Final = ("ForSequenceClassification", "ForTokenClassification")
"""Ends of architectures with a classification head."""
ENCODERS: Final = (
    "Bert",
    "Roberta",
    "XLMRoberta",
    "ModernBert",
    "NomicBert",
    "GteNew",
    "GteModel",
    "NewModel",
    "NewForSequenceClassification",
    "BgeM3",
    "HF_ColBERT",
    "ColBERTModernBert",
    "ColBERTJinaRoberta",
    "LlamaBidirectional",
    "VoyageQwen3Bidirectional",
)
"""Beginnings of architectures in which each token attends to all others: vLLM keeps no KV cache for them."""
UNKNOWN_ENCODERS: Final = ("Camembert", "MPNet", "DistilBert", "Albert", "Electra", "Deberta", "XLNet")
"""Beginnings of architectures of encoders that vLLM's registry does not have."""
ENCODER_TYPES: Final = ("bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert", "new", "gte")
"""``model_type`` of encoders, for a config.json without ``architectures``."""
OFFSET_TYPES: Final = ("roberta", "xlm-roberta", "camembert")
"""Types whose first position is that after the padding token's (``models/roberta.py``)."""
RENAMED: Final[Mapping[str, str]] = {
    "NewModel": "GteNewModel",
    "NewForSequenceClassification": "GteNewForSequenceClassification",
}
"""Architecture → the name by which vLLM's registry knows it (documentation of vLLM's pooling models)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceFiles:
    """Content of the files of sentence-transformers besides config.json."""

    listed: bool = False
    """modules.json has a pooling module, from which vLLM concludes the pooling runner."""
    method: str = ""
    """``LAST``, ``MEAN``, ``CLS``; empty where the file does not say."""
    max_length: int = 0
    """Tokens of a text at most; 0 = no limit of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """Facts that decide how vLLM's pooling runner serves a model."""

    task: Task
    architecture: str
    causal: bool
    """Tokens attend to earlier ones only, so that vLLM has a KV cache for it."""
    method: str
    """Tokens of which a result is made: ``LAST``, ``CLS``, ``MEAN``, ``ALL`` or ``STEP``."""
    source: str
    """The file that says so."""
    labels: int = 0
    """Classes of a classification head; 0 without one."""

    @property
    def whole_prompts(self) -> bool:
        """Whether a step computes whole prompts, because vLLM cannot divide them (chunked prefill)."""
        return not self.causal or self.method in ("MEAN", "CLS", "STEP")

    @property
    def caches_prefixes(self) -> bool:
        """Whether vLLM turns its prefix cache on by default."""
        return not self.whole_prompts


def read_sentence_files(modules: str, pooling: str, length: str, name: str = "") -> SentenceFiles:
    """Return what modules.json, the pooling module's config.json and sentence_bert_config.json say.

    Raises:
        ModelError: one of the texts is not JSON.
    """
    listed = bool(modules) and bool(pooling_path(modules, name))
    method = ""
    for key, value in _json(pooling, f"{name}1_Pooling/config.json").items() if pooling else ():
        text = value if key == "pooling_mode" and isinstance(value, str) else key if value is True else ""
        method = _method(text) or method
    limit = _json(length, f"{name}{LENGTH}").get("max_seq_length") if length else None
    return SentenceFiles(
        listed=listed, method=method, max_length=limit if isinstance(limit, int) and limit > 0 else 0
    )


def pooling_path(modules: str, name: str = "") -> str:
    """Return the path of the pooling module's config.json by modules.json; empty without such a module.

    Raises:
        ModelError: the text is not JSON.
    """
    found = _json(modules, f"{name}{MODULES}")
    for module in found if isinstance(found, list) else ():
        if isinstance(module, Mapping) and module.get("type") in POOLING_MODULES:
            return f"{module.get('path') or '1_Pooling'}/config.json"
    return ""


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ModelError(f"{name} is not JSON ({error})") from error


def _method(text: str) -> str:
    """Return vLLM's name of a pooling mode such as ``pooling_mode_lasttoken`` (``parse_pooling_type``)."""
    word = text.removeprefix("pooling_mode_").partition("_")[0]
    found = "LAST" if "lasttoken" in word else word.upper()
    return found if found in ("LAST", "MEAN", "CLS") else ""


def architecture_of(keys: Keys) -> str:
    """Return the first of ``architectures``; empty without one."""
    listed = keys.file.get("architectures")
    return str(listed[0]) if isinstance(listed, list) and listed else ""


def is_encoder(keys: Keys) -> bool:
    """Return whether every token attends to all others, as vLLM decides it."""
    architecture = architecture_of(keys)
    if architecture.startswith("Gemma3Text") and keys.text.get("use_bidirectional_attention"):
        return True
    if architecture.startswith("JinaEmbeddingsV5") and keys.file.get("is_decoder") is False:
        return True
    named = architecture.startswith((*ENCODERS, *UNKNOWN_ENCODERS))
    bare = not architecture and keys.model_type in ENCODER_TYPES
    return named or bare or keys.file.get("is_causal") is False


def read_pooling(keys: Keys, sentence: SentenceFiles) -> Pooling | None:
    """Return how vLLM's pooling runner serves a model; None for one that generates text.

    ``--runner auto`` decides in this order: a pooling module of sentence-transformers, then the name of the
    architecture.
    """
    architecture = architecture_of(keys)
    task, source = _task(architecture), f"config.json: architectures, {architecture}"
    if not architecture and keys.model_type in ENCODER_TYPES:
        task, source = Task.EMBED, f"config.json: model_type, {keys.model_type}"
    if task is Task.GENERATE:
        if not sentence.listed:
            return None
        task, source = Task.EMBED, f"{MODULES} of sentence-transformers"
    labels = _labels(keys) if task is Task.CLASSIFY and architecture.endswith(HEADS) else 0
    if labels == 1 and architecture.endswith("ForSequenceClassification"):
        task = Task.SCORE
    return Pooling(
        task=task,
        architecture=architecture,
        causal=not is_encoder(keys),
        method=sentence.method or _default_method(keys),
        source=source,
        labels=labels,
    )


def as_requested(
    found: Pooling | None, task: Task, *, architecture: str, causal: bool = True
) -> Pooling | None:
    """Return how a model is served for ``spec.model.task``; ``found`` is what its files say.

    Raises:
        ModelError: the model cannot do this; the message is the remainder of a sentence about the field.
    """
    if found is None:
        if task is Task.GENERATE:
            return None
        # a decoder of text, of which vLLM pools the last hidden state
        return Pooling(task=task, architecture=architecture, causal=causal, method="LAST", source=FIELD)
    if task is Task.GENERATE:
        if found.source.startswith(MODULES) and found.causal:
            return None  # vLLM generates with an embedding model of this kind, if it is told to
        raise ModelError(
            f"{architecture or 'this model'} generates no text: leave it out, or set {found.task}"
        )
    head = architecture.endswith(HEADS)
    if task is Task.EMBED and head:
        raise ModelError(f"{architecture} has a classification head: leave it out, or set {found.task}")
    if task is Task.SCORE and found.labels > 1:
        raise ModelError(
            f"Score needs one label, and {architecture} has {found.labels}: leave it out, or set Classify"
        )
    if task is Task.CLASSIFY and not head and found.task is Task.EMBED:
        raise ModelError(f"{architecture} has no classification head: leave it out, or set Embed")
    return found if task is found.task else replace(found, task=task, source=FIELD)


def _task(architecture: str) -> Task:
    if architecture in GENERATING or not architecture:
        return Task.GENERATE
    return next((task for end, task in SUFFIXES if architecture.endswith(end)), Task.GENERATE)


def _labels(keys: Keys) -> int:
    """Return ``num_labels`` as transformers has it: of ``id2label``, two without one."""
    names = keys.file.get("id2label")
    number = keys.file.get("num_labels")
    if isinstance(names, Mapping) and names:
        return len(names)
    return number if isinstance(number, int) and not isinstance(number, bool) and number > 0 else 2


def _default_method(keys: Keys) -> str:
    """Return the pooling of vLLM's class where no file of sentence-transformers has one."""
    architecture = architecture_of(keys)
    if architecture.endswith("ForProcessRewardModel"):
        return "STEP"
    if architecture.endswith(("ForRewardModel", "ForTokenClassification")):
        return "ALL"
    word = keys.word("pooling")
    if architecture.startswith("LlamaBidirectional") and word:
        return {"avg": "MEAN", "cls": "CLS", "last": "LAST"}.get(word, "MEAN")
    return "CLS" if architecture.startswith((*ENCODERS, *UNKNOWN_ENCODERS)) else "LAST"


def positions(keys: Keys, native: int) -> int:
    """Return the tokens that a prompt may have, of ``native`` positions in config.json."""
    if keys.model_type not in OFFSET_TYPES:
        return native
    return native - keys.number("pad_token_id", default=1) - 1
