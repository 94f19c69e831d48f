"""One prompt and its output on its way through an engine. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from kvist_sim.engine.blocks import Digest


class State(Enum):
    """State of a sequence."""

    WAITING = "waiting"
    LOADING = "loading"
    """Its blocks are on their way from slower places."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One prompt and its output."""

    id: str
    prompt: list[int]
    output: Iterator[int | None]
    """Tokens that the model would generate; None or the end of the iterator is where it would stop."""
    max_tokens: int
    arrived: float
    adapter: tuple[str, str] | None = None
    """(name, path) of the LoRA adapter."""
    salt: str | None = None
    session: str | None = None
    report_hits: bool = False
    """True for vLLM's ``kv_cache_report_mode: full``."""
    eos: int | None = None
    """Token that ends the output; it counts but is not shown."""
    load_tiers: frozenset[str] | None = None
    """Media from which its blocks may be loaded; None: all."""

    tokens: list[int] = field(init=False)
    """Prompt and output so far."""
    state: State = State.WAITING
    computed: int = 0
    """Number of tokens whose keys and values are in blocks."""
    blocks: list[int] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    stored: int = 0
    """Number of its blocks that are cached."""
    cached: int | None = None
    """Prompt tokens found in the cache, or loaded into it, when the sequence was first admitted."""
    loaded: dict[str, int] = field(default_factory=dict)
    """Of ``cached``: tokens that were loaded, by medium."""
    on_gpu: int = 0
    """Number of its first blocks that were on the GPU before others were loaded."""
    ready_at: float = -1.0
    """Time at which its blocks are loaded; -1: none were."""
    preemptions: int = 0
    finish: str | None = None
    """Finish reason: stop, length or abort."""
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def hashes(self) -> list[Digest]:
        """Return the digests: a ``tiers.Chain``."""
        return self.digests

    @property
    def generated(self) -> int:
        """Number of output tokens, the end included."""
        return len(self.tokens) - len(self.prompt)

    @property
    def prefilling(self) -> bool:
        """True if the next computation is of prompt tokens (or, after a preemption, of lost ones)."""
        return len(self.tokens) - self.computed > 1 or self.computed < len(self.prompt)
