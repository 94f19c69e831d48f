"""config.json → ``ModelShape``: everything the plan needs to know of a model. Pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvist_operator.errors import ModelError

from .encoder import encoder, has_audio
from .feedforward import feedforward
from .keys import Keys
from .layers import DTYPE_BYTES, Attention, Encoder, Experts, Latent, Layer, Recurrent
from .mixers import hidden, mixers, windows
from .quantization import Quantisation, quantisation

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The fields of a model's config.json that decide its memory."""

    architecture: str
    kind: str
    """``model_type`` of the text part."""
    dtype: str
    hidden: int
    vocab: int
    tied: bool
    """The output head is the embedding."""
    layers: tuple[Layer, ...]
    max_len: int
    """Positions the model was made for, tokens."""
    rope: Mapping[str, Any]
    """The RoPE parameters, as config.json has them."""
    quantisation: Quantisation
    encoder: Encoder | None
    mtp_layers: int
    """Layers that predict further tokens; loaded only for speculative decoding by MTP."""
    notes: tuple[str, ...]
    """What is not modelled: a plan for such a model is unverified."""

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def heads(self) -> tuple[int, ...]:
        """Every number of heads that tensor parallelism has to divide."""
        found = {layer.mixer.heads for layer in self.layers if layer.mixer}
        return tuple(sorted(found))

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """Every number of cached heads, each a divisor or a multiple of the tensor parallelism."""
        mixers = (layer.mixer for layer in self.layers)
        return tuple(sorted({m.kv_heads for m in mixers if isinstance(m, Attention)}))

    @property
    def latent(self) -> Latent | None:
        return next((layer.mixer for layer in self.layers if isinstance(layer.mixer, Latent)), None)

    @property
    def attention(self) -> Attention | None:
        return next((layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)), None)

    @property
    def experts(self) -> Experts | None:
        return next((layer.experts for layer in self.layers if layer.experts), None)

    @property
    def recurrent(self) -> bool:
        return any(isinstance(layer.mixer, Recurrent) for layer in self.layers)

    @property
    def windowed(self) -> bool:
        return bool(windows([layer.mixer for layer in self.layers]))

    def describe(self) -> str:
        """One line: ``64 layers of GQA 64/8, FP8 (blocks of 128)``."""
        counted = Counter(_mixer_name(layer) for layer in self.layers)
        mixed = " + ".join(f"{n} {name}" for name, n in counted.items() if name)
        experts = self.experts
        routed = f", {experts.count} experts ({experts.per_token} at once)" if experts else ""
        return f"{mixed}{routed}, {self.quantisation.label or self.dtype}"


def from_config(
    config: Mapping[str, Any], *, name: str = "config.json", beside: Mapping[str, Any] | None = None
) -> ModelShape:
    """The shape a config.json describes; ``beside`` is ModelOpt's hf_quant_config.json where there is one.

    Raises:
        ModelError: a key is missing, a kind of layer is not known, or vLLM does not load such a checkpoint.
    """
    keys = Keys(config, name)
    if keys.kind in ENCODER_DECODER or keys.flag("is_encoder_decoder"):
        raise ModelError(
            f"{name}: encoder-decoder models ({keys.kind}) have no prefix cache; not planned here"
        )
    mixed = mixers(keys)
    parts = feedforward(keys, len(mixed))
    return ModelShape(
        architecture=_architecture(config, keys),
        kind=keys.kind,
        dtype=_dtype(keys),
        hidden=hidden(keys),
        vocab=keys.number("vocab_size"),
        tied=_tied(config, keys),
        layers=tuple(Layer(m, *part) for m, part in zip(mixed, parts, strict=True)),
        max_len=_max_len(keys),
        rope=_rope(keys),
        quantisation=quantisation(keys, beside),
        encoder=encoder(keys),
        mtp_layers=keys.number("num_nextn_predict_layers", "mtp_num_hidden_layers", default=0),
        notes=_notes(config, keys),
    )


def _architecture(config: Mapping[str, Any], keys: Keys) -> str:
    found = config.get("architectures") or keys.text.get("architectures")
    return str(found[0]) if isinstance(found, list) and found else ""


def _dtype(keys: Keys) -> str:
    dtype = keys.word("dtype", "torch_dtype", default="bfloat16").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"{keys.name}: dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    # vLLM serves float32 checkpoints in 16 bits unless --dtype says otherwise
    return "bfloat16" if dtype in ("float32", "float") else dtype


def _tied(config: Mapping[str, Any], keys: Keys) -> bool:
    own = keys.text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    return bool(own)


def _rope(keys: Keys) -> Mapping[str, Any]:
    """The newer ``rope_parameters`` hold theta too; beside the older ``rope_scaling`` it stands alone."""
    theta = keys.text.get("rope_theta")
    own = dict(keys.mapping("rope_parameters", "rope_scaling"))
    return own if theta is None else {"rope_theta": theta, **own}


def _max_len(keys: Keys) -> int:
    names = (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "seq_length",
        "model_max_length",
        "max_seq_length",
    )
    found = [value for name in names if (value := keys.number(name, default=0))]
    if not found:
        raise ModelError(
            f"{keys.name}: max_position_embeddings is missing: how many tokens the model was made for"
        )
    return min(found)


def _notes(config: Mapping[str, Any], keys: Keys) -> tuple[str, ...]:
    notes = []
    if keys.kind in NOT_MODELLED:
        notes.append(f"{keys.kind} has {NOT_MODELLED[keys.kind]}")
    if has_audio(config):
        notes.append("the audio tower is not counted")
    return tuple(notes)


def _mixer_name(layer: Layer) -> str:
    match layer.mixer:
        case Attention(window=0) as a:
            return f"layers of {_heads(a)}"
        case Attention() as a:
            return f"of {_heads(a)} with a window of {a.window}"
        case Latent(sparse=sparse):
            return "layers of sparse MLA" if sparse else "layers of MLA"
        case Recurrent(kind=kind):
            return f"of {kind}"
    return ""


def _heads(attention: Attention) -> str:
    name = "MHA" if attention.heads == attention.kv_heads else "MQA" if attention.kv_heads == 1 else "GQA"
    return f"{name} {attention.heads}/{attention.kv_heads}"
