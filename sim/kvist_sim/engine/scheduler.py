"""Continuous batching with chunked prefill, step by step (``vllm/v1/core/sched/scheduler.py``). Pure.

A step is two calls: ``schedule`` decides how many tokens each sequence computes and takes the blocks,
``complete`` lets the finished computations yield a token each. The caller decides how much time passes in
between. As in vLLM, a block is cached when its computation is scheduled, not when it is done.
"""

from collections import deque
from dataclasses import dataclass, replace

from kvist_sim.engine.blocks import BlockPool, Digest, Hasher
from kvist_sim.engine.sequence import Sequence, State
from kvist_sim.engine.tiers import EngineTiers


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
    loaded_at: float | None = None
    """With no work: when the first blocks that are waited for have been loaded."""

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
    """On the GPU."""
    preemptions: int = 0
    external_queries: int = 0
    """Tokens looked up in slower places."""
    external_hits: int = 0


class Scheduler:
    """One rank: a queue, a batch and a pool."""

    def __init__(
        self,
        pool: BlockPool,
        hasher: Hasher,
        limits: Limits,
        tiers: EngineTiers[Digest] | None = None,
        *,
        prompts_only: bool = True,
    ) -> None:
        """``tiers``: where blocks are copied to; ``prompts_only``: not those of answers."""
        self.pool = pool
        self.tiers = tiers
        self._prompts_only = prompts_only
        self._loading: list[Sequence] = []
        self._computed: list[tuple[Sequence, int, int]] = []
        """Blocks that this step computes: (sequence, first, end)."""
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
        return not self.running and not self.waiting and not self._loading

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its prompt must fit in the pool and in ``max_model_len``."""
        self.waiting.append(sequence)

    def end(self, sequence: Sequence, reason: str = "abort") -> None:
        """End a sequence in any state; no effect if it has ended."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.LOADING:
            self._loading.remove(sequence)
        if sequence.state is not State.FINISHED:
            self._finish(sequence, reason)

    def schedule(self, now: float) -> Plan:
        """Schedule running sequences in order of admission, then the queue while budget and blocks last."""
        work: dict[Sequence, int] = {}
        if self._loading:
            self._take_loaded(now)
        budget, preempted = self._continue(work)
        if not preempted:
            self._admit(work, budget, now)
        waits = bool(self._loading) and not work
        return replace(_plan(work), loaded_at=self._loading[0].ready_at) if waits else _plan(work)

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
            if self.tiers is not None and self._load(self.tiers, self.waiting[0], now):
                self._loading.append(self.waiting.popleft())
                self._loading.sort(key=lambda one: one.ready_at)
                continue
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

    def _load(self, tiers: EngineTiers[Digest], sequence: Sequence, now: float) -> bool:
        """Begin to load blocks that follow those on the GPU; return whether there are any."""
        if sequence.ready_at >= 0 or not self._caching:
            return False
        pool, hit = self.pool, self._hit(sequence)
        most = (len(sequence.tokens) - 1) // pool.block_size
        found = tiers.find(sequence.digests[len(hit) : most], sequence.load_tiers)
        if not found or len(found) + pool.evictable(hit) > pool.free_blocks:
            return False
        pool.hold(hit)
        sequence.on_gpu, sequence.blocks = len(hit), hit + pool.allocate(len(found))
        sequence.ready_at, sequence.state = tiers.load(sequence, len(hit), found, now), State.LOADING
        for store in found:
            medium = store.kind.medium
            sequence.loaded[medium] = sequence.loaded.get(medium, 0) + pool.block_size
        return True

    def _take_loaded(self, now: float) -> None:
        """Cache the blocks that have arrived; their sequences are the next that are admitted."""
        there: list[Sequence] = []
        while self._loading and self._loading[0].ready_at <= now:
            sequence = self._loading.pop(0)
            sequence.stored = sequence.on_gpu
            self._store(sequence, len(sequence.blocks))
            self.pool.release(reversed(sequence.blocks))
            sequence.blocks, sequence.stored, sequence.state = [], 0, State.WAITING
            there.append(sequence)
        self.waiting.extendleft(reversed(there))

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
            self._count_hits(sequence)
        if sequence.report_hits and hit:
            self.pool.announce(
                sequence.digests[: len(hit)],
                sequence.tokens[: sequence.computed],
                parent=None,
                lora=_name(sequence),
                salt=sequence.salt,
                session=sequence.session,
            )

    def _count_hits(self, sequence: Sequence) -> None:
        loaded, counters = sum(sequence.loaded.values()), self.counters
        counters.hits += sequence.computed - loaded
        if self.tiers is not None:
            counters.external_queries += len(sequence.tokens) - sequence.computed + loaded
            counters.external_hits += loaded

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
            last = min(full, len(sequence.prompt) // self.pool.block_size) if self._prompts_only else full
            if self.tiers is not None and sequence.stored < last:
                self._computed.append((sequence, sequence.stored, last))
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
        if self.tiers is not None:
            for sequence, first, end in self._computed:
                self.tiers.offload(sequence, first, end)
            self._computed = []
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
