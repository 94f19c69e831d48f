"""What a model is made of: the nouns the memory arithmetic counts.

Dimensions are elements, never bytes; a dtype makes bytes of them.
"""

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
    """Tokens that a layer looks back; 0 = all of them."""
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
    """None in a sparse layer = it shares the choice of an earlier one."""


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
    """What tensor parallelism has to divide."""
    state_dtype: str
    """``float32`` where config.json says so, else the model's own."""


Mixer = Attention | Latent | Recurrent


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """A dense feed-forward block."""

    width: int
    gated: bool = True
    """Three matrices (gate, up, down) instead of two."""

    @property
    def matrices(self) -> int:
        return 3 if self.gated else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routed experts, and those every token goes through."""

    count: int
    per_token: int
    width: int
    shared_width: int = 0
    """Width of the shared experts together."""
    inner: int = 0
    """What experts read and write where that is not the hidden size (a latent MoE); 0 = the hidden size."""
    gated: bool = True

    @property
    def matrices(self) -> int:
        return 3 if self.gated else 2


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; any part may be missing (hybrids have layers of one part only)."""

    mixer: Mixer | None
    mlp: Mlp | None = None
    experts: Experts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """The tower that turns pictures into tokens of the text model."""

    layers: int
    hidden: int
    width: int
    heads: int
    merge: int
    """Patches of one side that become one token."""
    tokens: int
    """The most tokens one picture becomes."""
    output: int
    """What the projector writes: the hidden size of the text model."""
