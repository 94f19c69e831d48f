"""Continuous batching with chunked prefill, step by step (``vllm/v1/core/sched/scheduler.py``). Pure.

A step is two calls: ``schedule`` decides how many tokens each sequence computes and takes the blocks,
``complete`` lets the finished computations yield a token each. The caller decides how much time passes in
between. As in vLLM, a block is cached when its computation is scheduled, not when it is done.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from kvist_sim.engine.blocks import BlockPool, Digest, Hasher


class State(Enum):
    """State of a sequence."""

    WAITING = "waiting"
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
    """Prompt tokens found in the cache when the sequence was first admitted."""
    preemptions: int = 0
    finish: str | None = None
    """Finish reason: stop, length or abort."""
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> int:
        """Number of output tokens, the end included."""
        return len(self.tokens) - len(self.prompt)

    @property
    def prefilling(self) -> bool:
        """True if the next computation is of prompt tokens (or, after a preemption, of lost ones)."""
        return len(self.tokens) - self.computed > 1 or self.computed < len(self.prompt)


@dataclass(frozen=True, slots=True)
class Limits:
    """vLLM's scheduler flags."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """A prompt computes at most this many tokens a step; 0 is no limit."""
    reserve_full_prompt: bool = True
    """Admit a sequence only when its whole prompt fits."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Work of one step."""

    work: tuple[tuple[Sequence, int], ...] = ()
    """Pairs of sequence and number of tokens."""
    prefill_tokens: int = 0
    decoding: int = 0
    """Number of sequences that compute one token after their prompt."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the step."""
        return self.prefill_tokens + self.decoding


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    queries: int = 0
    """Tokens looked up in the prefix cache, counted once per sequence."""
    hits: int = 0
    preemptions: int = 0


class Scheduler:
    """One rank: a queue, a batch and a pool."""

    def __init__(self, pool: BlockPool, hasher: Hasher, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.counters = Counters()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._hasher = hasher
        self._caching = pool.caching

    def __repr__(self) -> str:
        return f"<Scheduler {len(self.running)} running, {len(self.waiting)} waiting, {self.pool!r}>"

    @property
    def idle(self) -> bool:
        """True without any sequence."""
        return not self.running and not self.waiting

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its prompt must fit in the pool and in ``max_model_len``."""
        self.waiting.append(sequence)

    def end(self, sequence: Sequence, reason: str = "abort") -> None:
        """End a sequence in any state; no effect if it has ended."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        if sequence.state is not State.FINISHED:
            self._finish(sequence, reason)

    def schedule(self, now: float) -> Plan:
        """Schedule running sequences in order of admission, then the queue while budget and blocks last."""
        work: dict[Sequence, int] = {}
        budget, preempted = self._continue(work)
        if not preempted:
            self._admit(work, budget, now)
        return _plan(work)

    def _continue(self, work: dict[Sequence, int]) -> tuple[int, bool]:
        """Schedule running sequences.

        Return the remaining budget, and whether a sequence was preempted: then none is admitted in this step.
        """
        budget = self.limits.max_num_batched_tokens
        preempted = False
        position = 0
        while position < len(self.running) and budget > 0:
            sequence = self.running[position]
            count = self._chunk(len(sequence.tokens) - sequence.computed, budget)
            victims, fits = self._make_room(sequence, sequence.computed + count)
            preempted = preempted or bool(victims)
            budget += sum(work.pop(victim, 0) for victim in victims)
            if not fits:
                break
            self._take(sequence, count)
            work[sequence] = count
            budget -= count
            position += 1
        return budget, preempted

    def _make_room(self, sequence: Sequence, upto: int) -> tuple[list[Sequence], bool]:
        """Preempts from the end of the batch until blocks for `upto` tokens are free; perhaps itself, too."""
        victims: list[Sequence] = []
        while self._missing(sequence, upto) > self.pool.free_blocks:
            victim = self.running.pop()
            self._preempt(victim)
            victims.append(victim)
            if victim is sequence:
                return victims, False
        return victims, True

    def _preempt(self, sequence: Sequence) -> None:
        """Free a sequence's blocks, which stay cached until they are evicted; lost tokens are computed
        again."""
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.computed = sequence.stored = 0
        sequence.state = State.WAITING
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(sequence)

    def _admit(self, work: dict[Sequence, int], budget: int, now: float) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            count = self._start(self.waiting[0], budget, now)
            if count == 0:
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            work[sequence] = count
            budget -= count

    def _start(self, sequence: Sequence, budget: int, now: float) -> int:
        """Takes the cached prefix and blocks for the first chunk; 0 when budget or blocks do not allow it."""
        hit = self._hit(sequence)
        computed = len(hit) * self.pool.block_size
        todo = len(sequence.tokens) - computed
        if not self.limits.chunked_prefill and todo > budget:
            return 0
        count = self._chunk(todo, budget)
        upto = len(sequence.tokens) if self.limits.reserve_full_prompt else computed + count
        if _ceil(upto, self.pool.block_size) - len(hit) + self.pool.evictable(hit) > self.pool.free_blocks:
            return 0
        self._begin(sequence, hit, now)
        self._take(sequence, count)
        return count

    def _hit(self, sequence: Sequence) -> list[int]:
        if not self._caching:
            return []
        self._digest(sequence)
        return self.pool.hit(sequence.digests, len(sequence.tokens))

    def _begin(self, sequence: Sequence, hit: list[int], now: float) -> None:
        self.pool.hold(hit)
        sequence.blocks = hit
        sequence.stored = len(hit)
        sequence.computed = len(hit) * self.pool.block_size
        sequence.state = State.RUNNING
        if sequence.cached is None:
            sequence.cached = sequence.computed
            sequence.scheduled = now
            self.counters.queries += len(sequence.tokens) if self._caching else 0
            self.counters.hits += sequence.computed
        if sequence.report_hits and hit:
            self.pool.announce(
                sequence.digests[: len(hit)],
                sequence.tokens[: sequence.computed],
                parent=None,
                lora=_name(sequence),
                salt=sequence.salt,
                session=sequence.session,
            )

    def _chunk(self, todo: int, budget: int) -> int:
        threshold = self.limits.long_prefill_token_threshold
        return min(todo, budget, threshold) if threshold else min(todo, budget)

    def _missing(self, sequence: Sequence, upto: int) -> int:
        return _ceil(upto, self.pool.block_size) - len(sequence.blocks)

    def _take(self, sequence: Sequence, count: int) -> None:
        """Blocks for `count` more tokens; caches those the tokens fill."""
        upto = sequence.computed + count
        missing = self._missing(sequence, upto)
        if missing > 0:
            sequence.blocks += self.pool.allocate(missing)
        full = upto // self.pool.block_size
        if full > sequence.stored and self._caching:
            self._store(sequence, full)

    def _store(self, sequence: Sequence, full: int) -> None:
        self._digest(sequence)
        first, size = sequence.stored, self.pool.block_size
        self.pool.store(
            sequence.blocks[first:full],
            sequence.digests[first:full],
            sequence.tokens[first * size : full * size],
            parent=sequence.digests[first - 1] if first else None,
            lora=_name(sequence),
            salt=sequence.salt,
            session=sequence.session,
        )
        sequence.stored = full

    def _digest(self, sequence: Sequence) -> None:
        self._hasher.extend(sequence.digests, sequence.tokens, sequence.adapter, sequence.salt)

    def complete(self, plan: Plan, now: float) -> list[Sequence]:
        """End the step; return the sequences that got a token (or ended), in batch order.

        What was ended meanwhile is passed over.
        """
        advanced: list[Sequence] = []
        for sequence, count in plan.work:
            if sequence.state is not State.RUNNING:
                continue
            sequence.computed += count
            if sequence.computed == len(sequence.tokens):
                self._next_token(sequence, now)
                advanced.append(sequence)
        if any(sequence.finish for sequence in advanced):
            self.running = [sequence for sequence in self.running if sequence.state is State.RUNNING]
        return advanced

    def _next_token(self, sequence: Sequence, now: float) -> None:
        token = next(sequence.output, None)
        stops = token is None
        sequence.tokens.append(sequence.eos or 0 if token is None else token)
        sequence.last_token = now
        if sequence.first_token is None:
            sequence.first_token = now
        if stops:
            self._finish(sequence, "stop")
        elif sequence.generated >= sequence.max_tokens or len(sequence.tokens) >= self.limits.max_model_len:
            self._finish(sequence, "length")

    def _finish(self, sequence: Sequence, reason: str) -> None:
        sequence.finish = reason
        sequence.state = State.FINISHED
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []


def _plan(work: dict[Sequence, int]) -> Plan:
    decoding = sum(not sequence.prefilling for sequence in work)
    tokens = sum(work.values())
    return Plan(work=tuple(work.items()), prefill_tokens=tokens - decoding, decoding=decoding)


def _name(sequence: Sequence) -> str | None:
    return None if sequence.adapter is None else sequence.adapter[0]


def _ceil(tokens: int, size: int) -> int:
    return -(-tokens // size)
