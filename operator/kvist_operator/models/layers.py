"""Records of one decoder layer and of a vision tower; the number of their weights, and their sharding. Pure.

Dimensions are elements, not bytes. The counts are exact for the families that the tests compare with
published checkpoint sizes; norms and biases, under a thousandth of a model, are left out except for one norm
vector per block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Keys and values per head: MHA, GQA (fewer KV heads) or MQA (one)."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0
    """Size of the sliding window in tokens; 0 = full attention."""
    shared: bool = False
    """Reads the keys and values of an earlier layer and has no cache of its own."""
    gated: bool = False
    """Has an output gate as large as its queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """The key cache of sparse MLA (DeepSeek sparse attention): one 8-bit key and a scale per token."""

    heads: int
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """MLA: one compressed row per token for all heads, so every tensor-parallel rank keeps all of it."""

    heads: int
    q_rank: int
    """0 = queries are not compressed."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    sparse: bool = False
    """Uses the sparse kernels, whose 8-bit row is 656 bytes instead of one byte an element."""
    indexer: Indexer | None = None
    """None in a sparse layer that uses the selection of an earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """A state per sequence instead of keys per token: Mamba 2, gated delta net, KDA."""

    kind: str
    params: int
    """Weights of the mixer."""
    conv_width: int
    """Channels of the convolution's state."""
    conv_kernel: int
    state: int
    """Elements of the recurrent state."""
    heads: int
    """A multiple of the tensor parallelism."""
    state_dtype: str
    """``float32`` where config.json says so, otherwise empty: the model's dtype."""


Mixer = Attention | Latent | Recurrent


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """A dense feed-forward block."""

    width: int
    matrices: int = 3
    """Gate, up and down; 2 without a gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routed experts, and the shared ones that process every token."""

    count: int
    per_token: int
    width: int
    hidden: int
    """Size of an expert's input and output: the hidden size, or less in a latent MoE."""
    shared_width: int = 0
    """Width of all shared experts together."""
    latent: bool = False
    """Projects from the hidden size to a smaller one and back."""
    matrices: int = 3
    """Weight matrices of one expert: gate, up and down; 2 without a gate."""

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert."""
        return self.matrices * self.hidden * self.width


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; layers of hybrid models may have only one of the parts."""

    mixer: Mixer | None
    mlp: Mlp | None = None
    experts: Experts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """The vision tower, which turns images into tokens of the text model."""

    layers: int
    hidden: int
    width: int
    merge: int
    """Number of patches that become one token."""
    tokens: int
    """Maximum number of tokens of one image."""
    output: int
    """Output size of the projector: the hidden size of the text model."""
    patches: int = 0
    """Patches of the largest image where they are pooled rather than merged; 0 = tokens × ``merge``."""
    matrices: int = 2
    """Matrices of a feed-forward block: 3 with a gate."""

    @property
    def patches_each(self) -> int:
        """Patches of the largest image."""
        return self.patches or self.tokens * self.merge


SHARDED: Final = "sharded"
"""Split over tensor-parallel ranks."""
REPLICATED: Final = "replicated"
"""Whole on every tensor-parallel rank."""
ROUTED: Final = "routed"
"""Split over tensor-parallel ranks, or over expert-parallel ranks."""
KV: Final = "kv"
"""Split over tensor-parallel ranks down to one KV head, then replicated."""


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Weights that are quantized and sharded alike."""

    name: str
    """Part that a quantization covers or not: attention, mlp, experts, …"""
    params: int
    spread: str
    kv_heads: int = 0
    """KV heads, if ``spread`` is ``KV``."""


def layer_parts(layer: Layer, hidden: int) -> Iterator[WeightPart]:
    """Yield the weights of one decoder layer; ``hidden`` is the hidden size."""
    match layer.mixer:
        case Attention() as a:
            queries = hidden * a.heads * a.key_dim * (2 if a.gated else 1)
            yield WeightPart("attention", queries + hidden * a.heads * a.value_dim, SHARDED)
            if not a.shared:
                cached = hidden * a.kv_heads * (a.key_dim + a.value_dim)
                yield WeightPart("attention", cached, KV, a.kv_heads)
        case Latent() as m:
            yield from _latent_parts(m, hidden)
        case Recurrent() as r:
            yield WeightPart("recurrent", r.params, SHARDED)
    if layer.mlp:
        yield WeightPart("mlp", layer.mlp.matrices * hidden * layer.mlp.width, SHARDED)
    if layer.experts:
        e = layer.experts
        yield WeightPart("experts", e.count * e.expert_params, ROUTED)
        if e.latent:
            yield WeightPart("shared", 2 * hidden * e.hidden, REPLICATED)
        if e.shared_width:
            yield WeightPart("shared", e.matrices * hidden * e.shared_width, SHARDED)
        yield WeightPart("router", hidden * e.count, REPLICATED)
    yield WeightPart("norms", 2 * hidden, REPLICATED)


def _latent_parts(m: Latent, hidden: int) -> Iterator[WeightPart]:
    down = hidden * (m.q_rank + m.kv_rank + m.rope_dim)
    up = (m.q_rank or hidden) * m.heads * (m.nope_dim + m.rope_dim)
    up += m.kv_rank * m.heads * (m.nope_dim + m.value_dim)
    yield WeightPart("attention", down, REPLICATED)
    yield WeightPart("attention", up + m.heads * m.value_dim * hidden, SHARDED)
    if m.indexer:
        keys = m.q_rank * m.indexer.heads * m.indexer.dim + hidden * (m.indexer.dim + m.indexer.heads)
        yield WeightPart("attention", keys, REPLICATED)


def encoder_part(encoder: Encoder | None) -> WeightPart:
    """Return the weights of the vision tower and its projector."""
    if encoder is None:
        return WeightPart("encoder", 0, SHARDED)
    layer = 4 * encoder.hidden**2 + encoder.matrices * encoder.hidden * encoder.width
    merged = encoder.hidden * encoder.merge
    return WeightPart("encoder", encoder.layers * layer + merged**2 + merged * encoder.output, SHARDED)
