"""Events into the index: which count, as what text, and what they reveal about requests.

Only full-attention and MLA groups are learned, one group a publisher: the same prefix has the same hash in
each group, and a removal names only hash and group. Text is the token ids decoded to bytes. Blocks that hold
generated tokens go through the ``DecodeChecker`` first: an engine stores a prompt in events of many blocks
and its answer one block at a time.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from kvist_epp.engines.vllm.kv_events import GPU, Batch, Removed, Stored
from kvist_epp.index.byte_index import Index
from kvist_epp.index.snapshot.section import Captured, Section
from kvist_epp.kvevents.canonical import Encode, Piece
from kvist_epp.kvevents.decode_blocks import DecodeBlock
from kvist_epp.kvevents.decode_check import DecodeChecker, PublisherState
from kvist_epp.kvevents.observation import Observation, RecentSessions
from kvist_epp.kvevents.publisher_stats import PublisherStats
from kvist_epp.kvevents.quarantine import Quarantine
from kvist_epp.kvevents.removals import joined
from kvist_epp.kvevents.texts import Texts

FULL_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention", "unknown"})
"""``KVCacheSpecKind`` values (``vllm/v1/kv_cache_interface.py``) whose blocks hold a prefix for ever."""

SLICE_BLOCKS = 512
"""Blocks learned between two chances to let a pick run: about half a millisecond."""


class Vocabulary(Protocol):
    """The part of ``prompt.model.Model`` that the ingestor uses."""

    @property
    def pieces(self) -> Sequence[bytes]:
        """Bytes of each token id; b"" where the id does not exist."""

    def encode(self, text: str) -> list[int]:
        """The tokenizer: specials recognised in the text, none added."""


class _Source:
    """One publisher: its ward (number, pending blocks, counters) and what waits for a parent."""

    __slots__ = ("endpoint", "group", "name", "quarantine", "ward")

    def __init__(self, name: str, ward: PublisherState) -> None:
        self.name = name
        self.endpoint = name.rpartition("/")[0]
        self.ward = ward
        self.group: int | None = None
        """The one KV cache group learned; None: not known yet."""
        self.quarantine = Quarantine()


class Ingestor:
    """Applies batches; the only writer of the index.

    ``encode`` is taken from the model; ``check=False`` leaves blocks born in decode without credit.
    ``on_prefill_started(source, endpoint, session)`` is called before the first event of a request is
    applied, while the index still is as the engine's cache was when it admitted the request.
    """

    def __init__(
        self,
        index: Index,
        model: Vocabulary,
        *,
        check: bool = True,
        on_prefill_started: Callable[[str, str, str], None] = lambda _source, _endpoint, _session: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._vocabulary = Texts(model.pieces)
        encode: Encode | None = model.encode if check else None
        self.checker = DecodeChecker(index, self._vocabulary.pieces, encode)
        self._clock = clock
        self._sources: dict[str, _Source] = {}
        self._sessions = RecentSessions()
        self._on_prefill_started = on_prefill_started
        self.unswept = False
        """Something was forgotten whose memory ``sweep`` has to free."""

    def join(self, source: str, endpoint: str) -> None:
        """Names the endpoint ("namespace/name") of a publisher whose name does not tell it (a pod UID)."""
        self._source(source).endpoint = endpoint

    def stats(self, source: str) -> PublisherStats:
        """The counters of a publisher; the subscriber fills in its own part."""
        return self._source(source).ward.stats

    def apply(self, source: str, batch: Batch) -> list[Observation]:
        """Learns a whole batch at once."""
        return [seen for seen in self.steps(source, batch) if seen is not None]

    def steps(self, source: str, batch: Batch) -> Iterator[Observation | None]:
        """Learns a batch, and yields after every event or 512 blocks so that the caller can pause."""
        state = self._source(source)
        stats = state.ward.stats
        stats.unknown += batch.unknown
        stats.malformed += batch.malformed
        for event, count in joined(batch.events):
            if isinstance(event, Stored):
                yield from self._stored(state, event)
            elif isinstance(event, Removed):
                stats.removed += count
                self._removed(state, event)
                yield None
            else:
                self._cleared(state)
                yield None

    def forget(self, source: str) -> None:
        """Nothing the publisher said holds any more: it restarted, or messages were lost."""
        state = self._source(source)
        self._index.forget(state.ward.number)
        state.ward.pending.clear()
        state.quarantine.clear()
        state.group = None
        state.ward.stats.resets += 1
        self.unswept = True

    def leave(self, source: str) -> None:
        """The publisher is gone for good."""
        state = self._sources.pop(source, None)
        if state is not None:
            state.ward.pending.clear()
            self._index.leave(state.ward.number)
            self.unswept = True

    def retry(self, source: str) -> Iterator[Observation | None]:
        """A replay has ended: events whose parents it brought are learned, as ``steps`` does."""
        state = self._source(source)
        known = [name for name in state.quarantine.parents() if self._depth(state, name) is not None]
        for event in state.quarantine.children(known):
            yield from self._learn(state, event)

    def capture(self, source: str) -> Captured:
        """The publisher's blocks, to be recorded before its next event is learned.

        Its blocks born in decode are copied first: one that is credited while the others are recorded is then
        in both, never in none. Events that wait for their parents are left out: they were never credited. So
        is which requests have begun to generate: what they compute again after a preemption passes unchecked.
        """
        state = self._source(source)
        pending = tuple(replace(born, media=list(born.media)) for born in state.ward.pending.all())
        return Captured(state.group, pending, self._index.capture(state.ward.number))

    def restore(self, source: str, group: int | None) -> Section:
        """The publisher's section of a peer's snapshot comes in, instead of whatever was known of it."""
        state = self._source(source)
        state.ward.pending.clear()
        state.quarantine.clear()
        state.group = group
        self.unswept = True
        return Section(self._index.restore(state.ward.number), state.ward, self.checker)

    def expire(self) -> None:
        """Drops events whose parents never came, and forgets requests that have been silent for long."""
        now = self._clock()
        self._sessions.age(now)
        for state in self._sources.values():
            state.ward.stats.orphans_dropped += state.quarantine.expire(now)

    def sweep(self, budget: int = 256) -> int:
        """Frees memory of what was forgotten, up to ``budget`` segments; returns how many are left."""
        left = self._index.sweep(budget)
        self.unswept = left > 0
        return left

    def expect(self, session: str, source: str) -> None:
        """A request with this id was just routed: its next event is a first one, though the id was used."""
        self._sessions.expect(source, session)

    def _source(self, name: str) -> _Source:
        state = self._sources.get(name)
        if state is None:
            state = _Source(name, PublisherState(self._index.publisher(name), PublisherStats()))
            self._sources[name] = state
        return state

    def _removed(self, state: _Source, event: Removed) -> None:
        ward = state.ward
        if not _same_group(state.group, event.group):
            ward.stats.other_groups += 1
            return
        hashes = event.hashes
        if len(state.quarantine):
            for name in hashes:
                state.quarantine.removed(name)
        if len(ward.pending):
            hashes = [name for name in hashes if not ward.pending.removed(name, event.medium)]
        if hashes:
            self._index.removed(ward.number, hashes, medium=event.medium)

    def _cleared(self, state: _Source) -> None:
        state.ward.stats.cleared += 1
        state.ward.pending.clear()
        state.quarantine.clear()
        self._index.cleared(state.ward.number)

    def _stored(self, state: _Source, event: Stored) -> Iterator[Observation | None]:
        stats = state.ward.stats
        stats.stored += 1
        if not self._is_learned(state, event):
            stats.other_groups += 1
        elif not event.token_ids and event.block_size == 0:
            self._held(state, event)
        elif len(event.token_ids) != len(event.hashes) * event.block_size or not event.hashes:
            stats.missized += 1
        else:
            yield from self._learn(state, event)
            return
        yield None

    def _is_learned(self, state: _Source, event: Stored) -> bool:
        if event.kind not in FULL_KINDS:
            return False
        if state.group is None and event.token_ids:
            state.group = event.group
        return _same_group(state.group, event.group)

    def _held(self, state: _Source, event: Stored) -> None:
        """Add blocks of an offload tier, which events name by hash alone."""
        pending = state.ward.pending
        waiting = [born for name in event.hashes if (born := pending.uncredited(name)) is not None]
        for born in waiting:
            born.media.append(event.medium)
        rest = (
            [name for name in event.hashes if pending.uncredited(name) is None] if waiting else event.hashes
        )
        known = self._index.held(state.ward.number, rest, event.medium)
        state.ward.stats.held_unknown += len(rest) - known

    def _learn(self, state: _Source, event: Stored) -> Iterator[Observation | None]:
        work = deque(_slices(event))
        while work:
            part = work.popleft()
            seen = self._place(state, part)
            if seen is None:
                self._quarantine(state, part)
            elif len(state.quarantine):
                work.extend(state.quarantine.children(part.hashes))
            yield seen

    def _quarantine(self, state: _Source, event: Stored) -> None:
        state.ward.stats.orphans += 1
        state.ward.stats.orphans_dropped += state.quarantine.add(event, self._clock())

    def _place(self, state: _Source, event: Stored) -> Observation | None:
        """One event into the index or the checker's hands; None when its parent is unknown."""
        if event.session is not None and not self._sessions.known(state.name, event.session):
            self._on_prefill_started(state.name, state.endpoint, event.session)
        before = self._depth(state, event.parent)
        decode = self._is_decode(state, event)
        texts = self._texts(event, state.ward.stats)
        if texts and not self._place_texts(state, event, texts, decode=decode):
            return None
        if len(texts) < len(event.hashes):
            self._place_opaque(state, event, len(texts))
        state.ward.stats.blocks += len(event.hashes)
        return self._observe(state, event, before, decode=decode)

    def _place_texts(self, state: _Source, event: Stored, texts: list[bytes], *, decode: bool) -> bool:
        if event.medium != GPU:
            return self._place_on_tier(state, event, texts)
        ward = state.ward
        above = ward.pending.uncredited(event.parent)
        if above is not None and not decode and self._proves(event, above):
            above = None if self.checker.prove(ward, above) else above
        if above is None and not (decode and self._needs_check(state, event, texts)):
            return self._place_credited(state, event, texts)
        self._place_pending(state, event, texts, above)
        return True

    def _place_credited(self, state: _Source, event: Stored, texts: list[bytes]) -> bool:
        return self._index.stored(
            state.ward.number,
            (event.lora, event.salt),
            event.parent,
            event.hashes[: len(texts)],
            texts,
            block_size=event.block_size,
            medium=event.medium,
        )

    def _place_pending(
        self, state: _Source, event: Stored, texts: list[bytes], above: DecodeBlock | None
    ) -> None:
        size = event.block_size
        parent = event.parent
        depth = above.depth if above else self._depth(state, parent)
        for position, (name, text) in enumerate(zip(event.hashes, texts, strict=False)):
            depth = None if depth is None else depth + size
            ids = event.token_ids[position * size : (position + 1) * size]
            root = (event.lora, event.salt)
            born = DecodeBlock(name, parent, root, Piece(ids, text), size, depth, event.session)
            self.checker.add(state.ward, born)
            parent = name

    def _place_opaque(self, state: _Source, event: Stored, start: int) -> None:
        parent = event.hashes[start - 1] if start else event.parent
        self._index.opaque(state.ward.number, parent, event.hashes[start:], medium=event.medium)
        state.ward.stats.opaque_blocks += len(event.hashes) - start

    def _place_on_tier(self, state: _Source, event: Stored, texts: list[bytes]) -> bool:
        """An offload tier that says which tokens: mostly blocks known from the GPU."""
        ward = state.ward
        pending = any(ward.pending.uncredited(name) for name in event.hashes)
        known = all(self._index.depth(name, ward.number) is not None for name in event.hashes)
        if not (pending or known or len(event.hashes) == 1):
            return self._place_credited(state, event, texts)
        self._held(state, event)
        return True

    def _is_decode(self, state: _Source, event: Stored) -> bool:
        """Whether the blocks may hold generated tokens.

        A prompt comes many blocks at a time. What follows a single block in the same request may be the
        recomputation of its own answer after a preemption.
        """
        if len(event.hashes) == 1:
            return True
        return self._sessions.decoding(state.name, event.session)

    def _needs_check(self, state: _Source, event: Stored, texts: list[bytes]) -> bool:
        """Not when the parent is unknown or opaque (the index tells which), nor when the block is known."""
        if event.parent is not None and self._index.depth(event.parent, state.ward.number) is None:
            return False
        return self._index.tail(event.hashes[-1], len(texts[-1])) != texts[-1]

    @staticmethod
    def _proves(event: Stored, above: DecodeBlock) -> bool:
        """A prompt hit the chain; the request that generated it proves nothing by computing it again."""
        return event.session is None or event.session != above.session

    def _depth(self, state: _Source, name: int | None) -> int | None:
        if name is None:
            return 0
        born = state.ward.pending.uncredited(name)
        return born.depth if born else self._index.depth(name, state.ward.number)

    def _texts(self, event: Stored, stats: PublisherStats) -> list[bytes]:
        """The bytes of each block up to the first that is not (only) text."""
        ids = event.token_ids
        if event.opaque_from is not None:
            ids = ids[: event.opaque_from * event.block_size]
        texts, complete = self._vocabulary.spell(ids, event.block_size)
        stats.unknown_ids += not complete
        return texts

    def _observe(self, state: _Source, event: Stored, before: int | None, *, decode: bool) -> Observation:
        tokens = len(event.token_ids)
        first = self._sessions.heard(state.name, event.session, single=len(event.hashes) == 1)
        return Observation(
            source=state.name,
            endpoint=state.endpoint,
            session=event.session,
            tokens=tokens,
            cached=before if first else None,
            born="decode" if decode else "prompt",
            depth=None if before is None else before + tokens,
        )


def _same_group(learned: int | None, group: int | None) -> bool:
    return learned is None or group is None or learned == group


def _slices(event: Stored) -> list[Stored]:
    """Equal parts of at most 512 blocks; never one of a single block, which would look born in decode."""
    blocks = len(event.hashes)
    if blocks <= SLICE_BLOCKS:
        return [event]
    width = -(-blocks // -(-blocks // SLICE_BLOCKS))
    return [_slice(event, start, min(start + width, blocks)) for start in range(0, blocks, width)]


def _slice(event: Stored, start: int, end: int) -> Stored:
    opaque_from = None if event.opaque_from is None else max(0, event.opaque_from - start)
    return msgspec.structs.replace(
        event,
        hashes=event.hashes[start:end],
        parent=event.hashes[start - 1] if start else event.parent,
        token_ids=event.token_ids[start * event.block_size : end * event.block_size],
        opaque_from=opaque_from if opaque_from is not None and opaque_from < end - start else None,
    )
