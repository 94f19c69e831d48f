"""Requests in virtual time, and their stay on one engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Any, Final, Protocol

from kvist_sim.virtual.policy import BYTES_PER_TOKEN

BLOCK: Final = 64
"""Tokens a block: what vLLM takes with FlashMLA. Usual are 16, which quadruples the work of a run and changes
no decision by more than 48 tokens."""
BLOCK_BYTES: Final = BLOCK * BYTES_PER_TOKEN
HASH_BITS: Final = 64
REMOTE: Final = "remote"
"""Key of ``Call.loaded`` for tokens that came from another engine."""


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """Prefix of prompts, a prompt, or a prompt with its answer."""

    tokens: int
    blocks: list[int]
    """Hashes of the full blocks."""
    text: bytes

    def on(self, tokens: int, random: Random) -> "Passage":
        """Return the passage extended by new tokens. The block in which it ended is a new one, too."""
        if tokens <= 0:
            return self
        total = self.tokens + tokens
        fresh = total // BLOCK - len(self.blocks)
        bits = random.getrandbits
        blocks = self.blocks + [bits(HASH_BITS) for _ in range(fresh)]
        return Passage(total, blocks, self.text + random.randbytes(tokens * BYTES_PER_TOKEN))


NOTHING: Final = Passage(0, [], b"")


class CallStatus(Enum):
    """Way in which a request ended."""

    DONE = "done"
    LOST = "lost"
    """The pod was removed before the answer was complete."""


@dataclass(slots=True, eq=False)
class Call:
    """One request: the part that routers see (``policy.Request``), and the part that only the engine
    knows."""

    number: int
    session: str
    prompt: Passage
    whole: Passage
    """Prompt and answer together."""
    max_tokens: int
    arrived: float
    measured: bool = True
    """True if the request counts; False during the warm-up."""
    turns: Iterator[Any] | None = None
    """Further turns of the session."""
    cached: int = 0
    """Prompt tokens found in the engine's cache, or loaded into it."""
    load_tiers: frozenset[str] | None = None
    """Media from which the engine may load blocks (``kv_load_tiers`` of vLLM); None = all."""
    loaded: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that were loaded, by medium."""
    first_token: float | None = None
    last_token: float | None = None
    status: CallStatus | None = None
    """Way in which the request ended; None while in flight."""
    tokens: int = field(init=False)
    """Number of prompt tokens."""
    output: int = field(init=False)
    """Number of tokens of the answer."""
    leg: str = ""
    """Ends the session id of a leg that computes the prompt of another call; empty: a whole request."""

    def __post_init__(self) -> None:
        self.tokens = self.prompt.tokens
        self.output = self.whole.tokens - self.tokens

    @property
    def blocks(self) -> Sequence[int]:
        """Hashes of the prompt's full blocks."""
        return self.prompt.blocks

    @property
    def text(self) -> bytes:
        """Return the text of the prompt."""
        return self.prompt.text

    def forget(self) -> None:
        """Drop the prompt, which is not needed any more."""
        self.prompt = self.whole = NOTHING


class Transfer(Protocol):
    """The blocks of a prompt on another engine (``legs.Transfer``)."""

    seconds: float
    """Time that the transfer took, as far as it has begun."""

    def begin(self, tokens: int, now: float) -> float:
        """Return when so many tokens are there; 0: none are needed."""


@dataclass(slots=True, eq=False)
class Job:
    """A call on one engine. While it decodes, ``length`` and ``computed`` are those at step ``since``."""

    call: Call
    prompt: int
    total: int
    """Number of tokens at the end."""
    hashes: list[int]
    """Hashes of all full blocks that the job will ever have, including those of the answer."""
    length: int
    """Number of tokens so far: prompt and answer."""
    computed: int = 0
    """Number of tokens whose keys and values are in blocks."""
    held: list[int] = field(default_factory=list)
    stored: int = 0
    """Number of its blocks that are cached."""
    order: int = 0
    """Number in the order of admission."""
    since: int = -1
    """First step in which it decodes; -1: it does not."""
    last: int = -1
    """Step that ends with its last token."""
    scheduled: float | None = None
    preemptions: int = 0
    on_gpu: int = 0
    """Number of its first blocks that were on the GPU before others were loaded."""
    ready_at: float = -1.0
    """Time at which its blocks are loaded; -1: none were."""
    transfer: Transfer | None = None
    """Where the blocks of its prompt come from; None: it is computed."""

    @classmethod
    def of(cls, call: Call) -> "Job":
        """Create the job of a call that arrives at an engine."""
        whole = call.whole
        return cls(call, call.tokens, call.tokens + call.output, whole.blocks, call.tokens)


def block_text(call: Call, first: int, end: int) -> list[bytes]:
    """Return the bytes of some of the call's blocks, the answer's included."""
    text, size = call.whole.text, BLOCK_BYTES
    return [text[at : at + size] for at in range(first * size, end * size, size)]
