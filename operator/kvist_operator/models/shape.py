"""config.json → ``ModelShape``: the facts that decide a model's memory, and its number of weights. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.errors import ModelError
from kvist_operator.spec.pool import Task

from .config_json import Keys, read_encoder
from .decoder import read_layers
from .layers import (
    DTYPE_BYTES,
    SHARDED,
    Attention,
    Encoder,
    Experts,
    Latent,
    Layer,
    Mixer,
    Recurrent,
    WeightPart,
    encoder_part,
    layer_parts,
)
from .pooling import (
    UNKNOWN_ENCODERS,
    Pooling,
    SentenceFiles,
    architecture_of,
    is_encoder,
    positions,
    read_pooling,
)
from .quantization import Quantization, read_quantization

NOT_MODELLED: Final[Mapping[str, str]] = {
    "deepseek_v4": "compressed attention, whose cache is much smaller than the one counted here",
    "deepseek_ref": "compressed attention, whose cache is much smaller than the one counted here",
    "minimax_m3": "block-sparse attention, whose index cache is not counted",
    "minimax_m3_vl": "block-sparse attention, whose index cache is not counted",
    "jamba": "Mamba 1 layers",
    "falcon_h1": "layers with attention and Mamba side by side",
    "zamba2": "attention layers whose weights are shared",
    "nemotron-nas": "layers of different widths: all are counted like the widest",
}
ENCODER_DECODER: Final = ("whisper", "t5", "bart", "mbart")
AUDIO: Final = ("audio_config", "audio_encoder_config", "speech_config")
CONTEXT: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_seq_length",
)
COMPUTED: Final = "computed from the shape"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The fields of a model's config.json that decide its memory."""

    model_type: str
    dtype: str
    hidden: int
    vocab: int
    tied: bool
    """The output head is the embedding."""
    layers: tuple[Layer, ...]
    max_len: int
    """Tokens of the context the model was made for."""
    rope: Mapping[str, Any]
    """The RoPE parameters, as config.json has them."""
    quantization: Quantization
    encoder: Encoder | None
    key_bias: bool
    """Keys have a bias and are not normalized; then a few of their channels are very large."""
    mtp_layers: int
    """Layers for multi-token prediction; loaded only for speculative decoding by MTP."""
    notes: tuple[str, ...]
    """Parts that are not modelled; a plan for a model with such parts is unverified."""
    architecture: str = ""
    """The first of ``architectures``."""
    pooling: Pooling | None = None
    """How vLLM's pooling runner serves it by its files; None for a model that generates text."""
    causal: bool = True
    """Tokens attend to earlier ones only; False for encoders, which have no KV cache."""
    stored_bytes: int = 2
    """Bytes of an element in the files that is not quantized: 4 for float32, which vLLM serves in 16 bits."""
    positions: int = 0
    """Positions in config.json, more than ``max_len`` where the first ones are not used; 0 = ``max_len``."""
    length_known: bool = False
    """The files that may limit prompts further than config.json were read."""

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element of ``dtype``."""
        return DTYPE_BYTES[self.dtype]

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Each different mixer among the layers."""
        return tuple({layer.mixer: None for layer in self.layers if layer.mixer})

    @property
    def heads(self) -> tuple[int, ...]:
        """Each number of heads among the layers; tensor parallelism has to divide all of them."""
        return tuple(sorted({mixer.heads for mixer in self.mixers}))

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """Each number of KV heads among the layers; a divisor or a multiple of the tensor parallelism."""
        return tuple(sorted({m.kv_heads for m in self.mixers if isinstance(m, Attention)}))

    @property
    def latent(self) -> Latent | None:
        """The first layer's MLA, if any layer has MLA."""
        return next((layer.mixer for layer in self.layers if isinstance(layer.mixer, Latent)), None)

    @property
    def experts(self) -> Experts | None:
        """The first layer's experts, if any layer has experts."""
        return next((layer.experts for layer in self.layers if layer.experts), None)

    def describe(self) -> str:
        """Return one line such as ``64 layers of GQA 64/8, FP8 (blocks of 128)``."""
        counted = Counter(_mixer_name(layer) for layer in self.layers)
        mixed = " + ".join(f"{n} {name}" for name, n in counted.items() if name)
        experts = self.experts
        routed = f", {experts.count} experts ({experts.per_token} per token)" if experts else ""
        return f"{mixed}{routed}, {self.quantization.label or self.dtype}"


def _mixer_name(layer: Layer) -> str:
    match layer.mixer:
        case Attention(heads=heads, kv_heads=kv_heads, window=window):
            kind = "MHA" if heads == kv_heads else "MQA" if kv_heads == 1 else "GQA"
            name = f"of {kind} {heads}/{kv_heads}"
            return f"{name} with a window of {window}" if window else f"layers {name}"
        case Latent(sparse=sparse):
            return "layers of sparse MLA" if sparse else "layers of MLA"
        case Recurrent(kind=kind):
            return f"of {kind}"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The files of a repository of the hub that facts are read from, as they were at one commit."""

    repository: str
    revision: str
    """The commit; empty if it is not known."""
    config: str
    """Text of config.json."""
    quant_config: str = ""
    """Text of hf_quant_config.json; empty without one."""
    modules: str = ""
    """Text of modules.json of sentence-transformers; empty without one."""
    pooling_config: str = ""
    """Text of the config.json of its pooling module; empty without one."""
    sentence_config: str = ""
    """Text of sentence_bert_config.json; empty without one."""
    sentence_read: bool = False
    """Whether the three files of sentence-transformers were looked for."""
    checkpoint_bytes: int = 0
    checkpoint_source: str = COMPUTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of a model that a plan is made from; the sources are shown to users."""

    shape: ModelShape
    checkpoint_bytes: float = 0
    """Size of the files; 0 = computed from the shape."""
    source: str
    checkpoint_source: str = COMPUTED
    tool_parser: str = ""
    reasoning_parser: str = ""
    parser_source: str = "catalogue"
    task: Task | None = None
    """Task of a model whose files do not say it; None if they do."""
    remote_code: bool = False
    """The tokenizer is code of the repository, which vLLM runs only with --trust-remote-code."""
    revision: str = ""
    """Commit of the hub that these facts are of; empty if it was not looked up."""
    files: ModelFiles | None = None
    """The files of the hub that they were read from."""


def read_shape(
    config: Mapping[str, Any],
    *,
    name: str = "config.json",
    quant_config: Mapping[str, Any] | None = None,
    sentence: SentenceFiles | None = None,
) -> ModelShape:
    """Return the shape of a config.json; ``quant_config`` is ModelOpt's hf_quant_config.json, if any, and
    ``sentence`` what the files of sentence-transformers say, None if they were not looked for.

    Raises:
        ModelError: a key is missing or invalid, a kind of layer is not known, or vLLM does not load such a
            checkpoint.
    """
    keys = Keys(config, name)
    if keys.model_type in ENCODER_DECODER or keys.text.get("is_encoder_decoder"):
        raise ModelError(f"{name}: {keys.model_type} is an encoder-decoder model, which has no prefix cache")
    lengths = [value for key in CONTEXT if (value := keys.number(key, default=0))]
    theta = keys.text.get("rope_theta")
    rope = dict(keys.mapping("rope_parameters", "rope_scaling"))
    notes = []
    if keys.model_type in NOT_MODELLED:
        notes.append(f"{keys.model_type} has {NOT_MODELLED[keys.model_type]}")
    if any(config.get(tower) for tower in AUDIO):
        notes.append("the audio tower is not counted")
    layers = read_layers(keys)
    pooling, encoder_only = read_pooling(keys, sentence or SentenceFiles()), is_encoder(keys)
    if pooling and pooling.architecture.startswith(UNKNOWN_ENCODERS):
        notes.append(f"vLLM has no class of its own for {pooling.architecture}")
    stored = _stored_dtype(keys, "float32" if encoder_only else "bfloat16")
    hidden, vocab = keys.hidden, keys.number("vocab_size")
    if not lengths:
        raise ModelError(f"{name}: max_position_embeddings is missing: the context the model was made for")
    native = min(lengths)
    longest = positions(keys, native)
    if sentence and sentence.max_length:
        longest = min(longest, sentence.max_length)
    return ModelShape(
        model_type=keys.model_type,
        dtype=_served_dtype(stored, pooling),
        hidden=hidden,
        vocab=vocab,
        tied=bool(keys.flag("tie_word_embeddings")) or encoder_only,  # encoders have no output head
        layers=layers,
        max_len=longest,
        # the newer rope_parameters hold theta too; beside the older rope_scaling it stands alone
        rope=rope if theta is None else {"rope_theta": theta, **rope},
        quantization=read_quantization(keys, quant_config),
        encoder=read_encoder(keys),
        key_bias=_has_key_bias(keys),
        mtp_layers=keys.number("num_nextn_predict_layers", "mtp_num_hidden_layers", default=0),
        notes=tuple(notes),
        architecture=architecture_of(keys),
        pooling=pooling,
        causal=not encoder_only,
        stored_bytes=DTYPE_BYTES[stored],
        positions=native,
        length_known=sentence is not None,
    )


def _has_key_bias(keys: Keys) -> bool:
    """Return whether keys have a bias that no normalization follows.

    vLLM: ``models/qwen2.py`` has the bias without a key in config.json; other files read it from one of
    these. gpt-oss has one too, but vLLM's recipe caches its keys in FP8 on Blackwell.
    """
    normalized = keys.model_type.startswith(("qwen3", "gpt_oss")) or bool(keys.flag("use_qk_norm"))
    if normalized:
        return False
    names = ("attention_bias", "qkv_bias", "add_qkv_bias")
    return keys.model_type.startswith("qwen2") or any(keys.flag(name) for name in names)


def _stored_dtype(keys: Keys, default: str) -> str:
    dtype = keys.word("dtype", "torch_dtype", default=default).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"{keys.name}: dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    return dtype


def _served_dtype(stored: str, pooling: Pooling | None) -> str:
    """Return the dtype in which vLLM serves it without ``--dtype``: float32 in 16 bits, those of pooling
    models in float16 (``config/model.py``: ``_resolve_auto_dtype``)."""
    if stored not in ("float32", "float"):
        return stored
    return "float16" if pooling else "bfloat16"


def embedding_and_head(shape: ModelShape) -> tuple[WeightPart, WeightPart]:
    """Return the token embedding and the output head; a tied head has no weights of its own.

    The embedding is on the first pipeline stage, the head on the last.
    """
    params = shape.vocab * shape.hidden
    return WeightPart("embedding", params, SHARDED), WeightPart("head", 0 if shape.tied else params, SHARDED)


def mtp_parts(shape: ModelShape) -> list[WeightPart]:
    """Return one layer for multi-token prediction: a decoder layer and the projection into it."""
    if not shape.mtp_layers:
        return []
    return [*layer_parts(shape.layers[-1], shape.hidden), WeightPart("mtp", 2 * shape.hidden**2, SHARDED)]


def _loaded_parts(shape: ModelShape) -> Iterator[WeightPart]:
    """Yield all weights that vLLM loads: everything but the layers for multi-token prediction."""
    yield from embedding_and_head(shape)
    yield encoder_part(shape.encoder)
    for layer in shape.layers:
        yield from layer_parts(layer, shape.hidden)


def parameters(shape: ModelShape) -> int:
    """Return the number of weights that vLLM loads."""
    return sum(part.params for part in _loaded_parts(shape))


def active_parameters(shape: ModelShape) -> int:
    """Return the weights one token is multiplied with: without idle experts, embedding and vision tower."""
    experts = (layer.experts for layer in shape.layers if layer.experts)
    idle = sum((e.count - e.per_token) * e.expert_params for e in experts)
    return parameters(shape) - idle - shape.vocab * shape.hidden - encoder_part(shape.encoder).params


def checkpoint_bytes(shape: ModelShape) -> float:
    """Return the bytes of the safetensors files, the layers for multi-token prediction included."""

    def stored(parts: Iterable[WeightPart]) -> float:
        each = shape.stored_bytes
        return sum(part.params * shape.quantization.bytes_of(part.name, each) for part in parts)

    return stored(_loaded_parts(shape)) + shape.mtp_layers * stored(mtp_parts(shape))
