"""Scheduler of the simulator for virtual time: the same decisions, without work per sequence and step.

``kvist_sim.engine.scheduler`` visits every running sequence in every step. Here decoding sequences are
visited only when they need a block, fill one, or end: all others only get one token more, which the number
of the step tells. Tests hold both against each other. Two limits follow: a batch leaves budget for prompts
(``max_num_seqs`` below ``max_num_batched_tokens``), and prompts are computed in chunks as large as the
budget, so at most one is half done, and it was admitted last.
"""

from collections import deque
from typing import Final

from kvist_epp.engines.vllm.engine_metrics import EngineSample
from kvist_epp.engines.vllm.tier_metrics import NO_TIERS
from kvist_epp.engines.vllm.transfer_metrics import TransferCounters
from kvist_sim.engine.tiers import EngineTiers
from kvist_sim.virtual.hardware import Hardware, Totals
from kvist_sim.virtual.jobs import REMOTE, Call, Job, Transfer
from kvist_sim.virtual.noting_pool import Note, NotingPool

LEAST_STEP: Final = 1e-4
"""Seconds of a step that only waits for a load."""


class VirtualEngine:
    """Engine of one rank.

    ``plan`` begins a step, ``complete`` ends it; between the two only ``add`` may be called.
    """

    def __init__(self, hardware: Hardware, pool: NotingPool, tiers: EngineTiers[int] | None = None) -> None:
        if hardware.max_num_seqs >= hardware.max_num_batched_tokens:
            raise ValueError("max_num_seqs must be below max_num_batched_tokens")
        self.hardware = hardware
        self.pool = pool
        self.tiers = tiers
        self.totals = Totals()
        self.waiting: deque[Job] = deque()
        self.running: dict[Job, None] = {}
        """Jobs in order of admission."""
        self._loading: list[Job] = []
        """Jobs whose blocks are on their way from slower places, the first that will be there first."""
        self._computed: list[tuple[Job, int, int]] = []
        """Blocks of prompts that this step computes: (job, first, end)."""
        self._partial: Job | None = None
        """Job whose prompt is half computed; the last of ``running``."""
        self._kept: dict[Call, list[int]] = {}
        """Blocks of prompts that another engine has not received yet."""
        self._fresh: list[Job] = []
        """Jobs whose prompt will be computed when the present step ends."""
        self._step = 0
        self._admitted = 0
        self._phases: tuple[dict[Job, None], ...] = tuple({} for _ in range(hardware.block_size))
        """Decoding jobs by the step, modulo the block size, that needs a new block."""
        self._ends: dict[int, list[Job]] = {}
        self._refused: tuple[Job | None, int, int] = (None, 0, 0)
        """The job that found no capacity last, the free blocks it needs, and the pool's ``changes`` at
        that time."""

    @property
    def idle(self) -> bool:
        """True without any job."""
        return not self.running and not self.waiting and not self._loading

    def add(self, job: Job) -> None:
        """Queue a job. All its blocks together must fit in the pool."""
        self.waiting.append(job)

    def plan(self, now: float) -> float:
        """Begin a step; return its length in seconds."""
        self._step += 1
        if self._loading:
            self._take_loaded(now)
        preempted = self._decode()
        decoding = len(self.running) - (self._partial is not None)
        budget = left = self.hardware.max_num_batched_tokens - decoding
        if self._partial is not None:
            left -= self._go_on(self._partial, left)
            preempted = preempted or left == budget
        if not preempted and self.waiting:
            left = self._admit(left, now)
        singles = sum(job.computed == job.length - 1 >= job.prompt for job in self._fresh)
        if self._loading and not self.running:
            wait = max(LEAST_STEP, self._loading[0].ready_at - now)
            return min(self.hardware.timing.step(0, 0), wait)
        return self.hardware.timing.step(budget - left - singles, decoding + singles)

    def complete(self, now: float) -> tuple[list[Job], list[Job]]:
        """End the step; return the jobs whose first token this is, and those that ended, in batch order."""
        if self.tiers is not None:
            for job, start, end in self._computed:
                self.tiers.offload(job, start, end)
            self._computed = []
        finished = self._ended()
        decoders = len(self.running) - len(self._fresh) - (self._partial is not None)
        self.totals.generated += decoders + len(self._fresh)
        first = [job for job in self._fresh if job.call.first_token is None]
        for job in self._fresh:
            job.computed = job.length
            job.length += 1
            if job.length >= job.total:
                finished.append(job)
            else:
                self._decodes(job)
        self._fresh = []
        for job in first:
            job.call.first_token = now
            self.totals.prompt_tokens += job.prompt
            self.totals.computed_tokens += _computed(job)
        for job in finished:
            self._finish(job, now)
        return first, finished

    def abandon(self) -> list[Job]:
        """Stop the engine and return the jobs it had."""
        return [*self.running, *self._loading, *self.waiting]

    def release(self, call: Call) -> None:
        """Drop the blocks of a prompt that another engine has received."""
        self.pool.take([])  # one more change
        self.pool.release(reversed(self._kept.pop(call, [])))

    def take_notes(self) -> list[Note]:
        """Return the events since the last call: loads into memory, then the GPU's, then what is copied from
        the GPU."""
        gpu = self.pool.take_notes()
        if self.tiers is None:
            return gpu
        return [*self.tiers.take_loads(), *gpu, *self.tiers.take_offloads()]

    def sample(self) -> EngineSample:
        """Return the values that ``/metrics`` would report now."""
        totals = self.totals
        return EngineSample(
            running=len(self.running),
            waiting=len(self.waiting),
            cache_usage=self.pool.usage,
            block_size=self.pool.block_size,
            blocks=self.pool.capacity + 1,
            queries=totals.queries,
            hits=totals.hits,
            prompt_tokens=totals.prompt_tokens,
            computed_tokens=totals.computed_tokens,
            generation_tokens=totals.generated,
            prefills=totals.prefills,
            prefill_seconds=totals.prefill_seconds,
            prefill_tokens=totals.prefill_tokens,
            decodes=totals.prefills,
            decode_seconds=totals.decode_seconds,
            token_times=totals.token_times,
            token_seconds=totals.token_seconds,
            transfers=TransferCounters(totals.transfer_seconds, 0.0, float(totals.received_tokens)),
            tiers=NO_TIERS if self.tiers is None else self.tiers.counters(totals.hits),
        )

    # Decoding

    def _decode(self) -> bool:
        """Take blocks for jobs that need one, credit jobs that fill one.

        Return whether a job was preempted.
        """
        step, size = self._step, self.hardware.block_size
        need, fill = self._phases[step % size], self._phases[(step + 1) % size]
        if len(need) <= self.pool.free_blocks:
            for job, block in zip(need, self.pool.allocate(len(need)), strict=True):
                job.held.append(block)
            for job in fill:
                self._fill(job)
            return False
        return self._decode_scarce(need, fill)

    def _decode_scarce(self, need: dict[Job, None], fill: dict[Job, None]) -> bool:
        preempted = False
        for job in sorted([*need, *fill], key=_order):
            if job not in self.running:
                continue
            if job in need:
                while not self.pool.free_blocks and job in self.running:
                    self._preempt()
                    preempted = True
                if job in self.running:
                    job.held += self.pool.allocate(1)
            if job in fill and job in self.running:
                self._fill(job)
        return preempted

    def _fill(self, job: Job) -> None:
        at = job.stored
        name, refused = job.hashes[at], self._refused[0]
        self.pool.cache((job.held[at],), (name,))
        job.stored = at + 1
        if refused is not None and at < len(refused.hashes) and refused.hashes[at] == name:
            self._refused = (None, 0, 0)

    def _preempt(self) -> None:
        """The last of the batch gives its blocks back; what is lost of them is computed again."""
        job, _ = self.running.popitem()
        if job is self._partial:
            self._partial = None
        self._tell_answer(job)
        self._leaves_batch(job)
        self.pool.release(reversed(job.held))
        job.held, job.computed, job.stored = [], 0, 0
        job.preemptions += 1
        self.totals.preemptions += 1
        self.waiting.appendleft(job)

    def _tell_answer(self, job: Job) -> None:
        """Announce the blocks filled during decode. An engine announces each at once; but before the answer
        has ended no request can use them, and one note costs a tenth of fifteen."""
        if job.since >= 0 and job.stored > (first := job.computed // self.hardware.block_size):
            self.pool.note(job, first, job.stored)

    def _leaves_batch(self, job: Job) -> None:
        if job.since >= 0:
            job.length += self._step - job.since
            self._phases[self._phase(job)].pop(job)
            job.since = job.last = -1

    def _phase(self, job: Job) -> int:
        return (job.since - job.computed) % self.hardware.block_size

    def _decodes(self, job: Job) -> None:
        """From the next step on."""
        job.since = self._step + 1
        job.last = self._step + job.total - job.length
        self._phases[self._phase(job)][job] = None
        self._ends.setdefault(job.last, []).append(job)

    def _ended(self) -> list[Job]:
        ending = self._ends.pop(self._step, None)
        if not ending:
            return []
        return sorted((job for job in ending if job.last == self._step and job in self.running), key=_order)

    def _finish(self, job: Job, now: float) -> None:
        self._tell_answer(job)
        if job.since >= 0:
            del self._phases[self._phase(job)][job]
        del self.running[job]
        call = job.call
        if call.leg:
            self._kept[call] = job.held
        else:
            self.pool.release(reversed(job.held))
        job.held = []
        call.last_token = now
        self._account(job, call.first_token or now, now)

    def _account(self, job: Job, first: float, now: float) -> None:
        totals, more = self.totals, job.total - job.prompt - 1
        totals.prefills += 1
        totals.prefill_seconds += first - (job.scheduled or 0.0)
        totals.prefill_tokens += _computed(job)
        totals.decode_seconds += now - first
        totals.token_times += 1
        totals.token_seconds += (now - first) / more if more > 0 else 0.0

    # Prompts

    def _go_on(self, job: Job, budget: int) -> int:
        """The next piece of the half-computed prompt; 0: there was no room, and it was preempted."""
        count = min(job.length - job.computed, budget)
        if self._missing(job, job.computed + count) > self.pool.free_blocks:
            self._preempt()
            return 0
        self._take(job, count)
        return count

    def _admit(self, budget: int, now: float) -> int:
        """Takes up who waits while budget and blocks last; the budget left."""
        while self.waiting and budget > 0 and len(self.running) < self.hardware.max_num_seqs:
            if self._load(self.waiting[0], now):
                self.waiting.popleft()
                continue
            count = self._start(self.waiting[0], budget, now)
            if not count:
                break
            self.waiting.popleft()
            budget -= count
        return budget

    def _start(self, job: Job, budget: int, now: float) -> int:
        """Takes the cached prefix and blocks for the first piece; 0 when the whole prompt does not fit."""
        pool, size = self.pool, self.hardware.block_size
        if self._refused[0] is job and self._still_refused():
            return 0
        hit = pool.hit(job.hashes, job.length)
        need = -(-job.length // size) - len(hit) + pool.evictable(hit)
        if need > pool.free_blocks:
            self._refused = (job, need, pool.changes)
            return 0
        pool.take(hit)
        job.held, job.stored, job.computed = hit, len(hit), len(hit) * size
        self._admitted += 1
        job.order = self._admitted
        self.running[job] = None
        if job.scheduled is None:
            job.scheduled = now
            if job.transfer is None:  # else the first leg knows
                job.call.cached = job.computed
            self.totals.queries += job.length
            self.totals.hits += job.computed - sum(job.call.loaded.values())
        count = min(job.length - job.computed, budget)
        self._take(job, count)
        return count

    def _load(self, job: Job, now: float) -> bool:
        """Begin to load blocks that follow those on the GPU; return whether there are any."""
        pool, size = self.pool, self.hardware.block_size
        if job.ready_at >= 0 or (self.tiers is None and job.transfer is None):
            return False
        hit = pool.hit(job.hashes, job.length)
        if job.transfer is not None:
            return self._receive(job, hit, job.transfer, now)
        assert self.tiers is not None
        most = (job.length - 1) // size
        found = self.tiers.find(job.hashes[len(hit) : most], job.call.load_tiers)
        if not found or len(found) + pool.evictable(hit) > pool.free_blocks:
            return False
        pool.take(hit)
        job.on_gpu, job.held = len(hit), hit + pool.allocate(len(found))
        job.ready_at = self.tiers.load(job, len(hit), found, now)
        for store in found:
            medium = store.kind.medium
            job.call.loaded[medium] = job.call.loaded.get(medium, 0) + size
        self._wait_for_blocks(job)
        return True

    def _receive(self, job: Job, hit: list[int], transfer: Transfer, now: float) -> bool:
        """Begin to receive blocks that follow those on the GPU; return whether there are any, and room."""
        size = self.hardware.block_size
        count = (job.prompt - 1) // size - len(hit)
        if count <= 0:
            job.ready_at = transfer.begin(0, now)
            return False
        if count + self.pool.evictable(hit) > self.pool.free_blocks:
            return False
        self.pool.take(hit)
        job.on_gpu, job.held = len(hit), hit + self.pool.allocate(count)
        job.ready_at = transfer.begin(count * size, now)
        job.call.loaded[REMOTE] = count * size
        self.totals.received_tokens += count * size
        self.totals.transfer_seconds += transfer.seconds
        self._wait_for_blocks(job)
        return True

    def _wait_for_blocks(self, job: Job) -> None:
        at = next((n for n, each in enumerate(self._loading) if each.ready_at > job.ready_at), None)
        self._loading.insert(len(self._loading) if at is None else at, job)

    def _take_loaded(self, now: float) -> None:
        """Cache the blocks that have arrived; their jobs are the next that are admitted."""
        there = []
        while self._loading and self._loading[0].ready_at <= now:
            job = self._loading.pop(0)
            first, end = job.on_gpu, len(job.held)
            self.pool.load(job, first, end)
            self.pool.release(reversed(job.held))
            job.held = []
            there.append(job)
        self.waiting.extendleft(reversed(there))

    def _still_refused(self) -> bool:
        _, need, changes = self._refused
        return changes == self.pool.changes and need > self.pool.free_blocks

    def _missing(self, job: Job, upto: int) -> int:
        return -(-upto // self.hardware.block_size) - len(job.held)

    def _take(self, job: Job, count: int) -> None:
        """Computes so many tokens of its prompt in this step."""
        upto = job.computed + count
        missing = self._missing(job, upto)
        if missing > 0:
            job.held += self.pool.allocate(missing)
        size = self.hardware.block_size
        full = upto // size
        if full > job.stored:
            self.pool.store(job, job.stored, full)
            if self.tiers is not None and job.stored < (last := min(full, job.prompt // size)):
                self._computed.append((job, job.stored, last))
            job.stored = full
        if upto == job.length:
            self._partial = None
            self._fresh.append(job)
        else:
            job.computed = upto
            self._partial = job


def _order(job: Job) -> int:
    return job.order


def _computed(job: Job) -> int:
    """Return the prompt tokens that its engine had to compute."""
    return job.prompt - job.call.cached if job.transfer is None else 1
