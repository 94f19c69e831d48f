"""Apply events to the index: which blocks count, with what text, and what they reveal about requests. Pure.

Of each publisher one group is indexed, one with full attention or MLA: the same prefix has the same hash in
each group, and a removal names only hash and group. Of groups with a window the index keeps which blocks
they have. The text of a block is its token ids decoded to bytes. Blocks with generated tokens pass through
the ``DecodeChecker`` first; they are recognised by their number, since an engine stores a prompt in events of
many blocks and its answer one block at a time.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvist_epp.engines.vllm.cache_groups import FULL_KINDS, window_blocks
from kvist_epp.engines.vllm.kv_events import GPU, Batch, Removed, Stored
from kvist_epp.index.byte_index import Index
from kvist_epp.index.media_marks import TOKEN
from kvist_epp.index.snapshot.sections import Captured, Section
from kvist_epp.kvevents.answer_blocks import append_to_answer
from kvist_epp.kvevents.block_decoder import BlockDecoder
from kvist_epp.kvevents.decode_blocks import BlockTokens, DecodeBlock
from kvist_epp.kvevents.decode_check import Chunks, DecodeChecker, Encode
from kvist_epp.kvevents.evicted_blocks import EvictedBlocks
from kvist_epp.kvevents.observation import Observation, RecentSessions
from kvist_epp.kvevents.publisher_state import LEASE_SECONDS, PublisherState, PublisherStats
from kvist_epp.kvevents.tier_blocks import TierBlocks

MAX_BLOCKS = 512
"""Blocks placed or removed in one step, between which a pick may run: about half a millisecond to place, a
millisecond to remove."""


class TokenText(Protocol):
    """The part of ``prompt.model.Model`` that the ingestor uses."""

    @property
    def pieces(self) -> Sequence[bytes]:
        """Bytes of each token id; b"" where the id does not exist."""

    @property
    def chunks(self) -> Chunks | None:
        """Which chunks of tokens are canonical; None if it is not known where texts are cut."""

    def encode(self, text: str) -> list[int]:
        """Tokenize, with special tokens recognised in the text and none added."""


class Ingestor:
    """Applies batches of events to the index, as its only writer.

    ``check=False`` leaves blocks from decode without credit. ``on_prefill_started(publisher, endpoint,
    session)`` is called before the first event of a request is applied, while the index still is as the
    engine's cache was when it admitted the request.
    """

    def __init__(
        self,
        index: Index,
        model: TokenText,
        *,
        check: bool = True,
        lease_seconds: float = LEASE_SECONDS,
        on_prefill_started: Callable[[str, str, str], None] = lambda _publisher, _endpoint, _session: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._decoder = BlockDecoder(model.pieces)
        encode: Encode | None = model.encode if check else None
        self.evicted = EvictedBlocks(index)
        """Counts blocks that are computed again after their eviction."""
        self.checker = DecodeChecker(index, self._decoder.pieces, encode, model.chunks if check else None)
        self._publishers: dict[str, PublisherState] = {}
        self.tiers = TierBlocks(index, self._decoder, self.checker, self._publishers, clock, lease_seconds)
        """Blocks on slower tiers."""
        self._lease_seconds = lease_seconds
        self._on_prefill_started = on_prefill_started
        self._clock = clock
        self._sessions = RecentSessions()
        self.needs_sweep = False
        """True if blocks were removed whose memory ``sweep`` has to free."""

    def add_publisher(
        self, publisher: str, endpoint: str, storage: str | None = None, storage_tokens: int | None = None
    ) -> None:
        """Set the endpoint ("namespace/name") of a publisher whose name does not contain it (a pod UID), and
        the storage that its engine shares, with the tokens that it can hold; None: it shares none."""
        state = self._state(publisher)
        state.endpoint = endpoint
        if storage is not None:
            self.tiers.attach(state, storage, storage_tokens)

    def remove_publisher(self, publisher: str) -> None:
        """Remove a publisher that has left, with all its blocks."""
        state = self._publishers.pop(publisher, None)
        if state is not None:
            state.decode_blocks.clear()
            self._index.leave(state.number)
            self.needs_sweep = True

    def stats(self, publisher: str) -> PublisherStats:
        """Return the counters of a publisher; its feed adds those of messages and replays."""
        return self._state(publisher).stats

    def decode(self, payload: bytes) -> Batch:
        """Decode a message of an engine. Raises EventError if it is no batch of events."""
        return self._decoder.events.decode(payload)

    def apply(self, publisher: str, batch: Batch) -> list[Observation]:
        """Apply a whole batch at once."""
        return [seen for seen in self.apply_in_steps(publisher, batch) if seen is not None]

    def apply_in_steps(self, publisher: str, batch: Batch) -> Iterator[Observation | None]:
        """Apply a batch, and yield after every event or 512 blocks so that the caller can pause."""
        state = self._state(publisher)
        stats, state.events_at = state.stats, batch.ts
        stats.unknown += batch.unknown
        stats.malformed += batch.malformed
        for event in batch.events:
            if isinstance(event, Stored):
                if (seen := append_to_answer(state, event, self._sessions, self.checker)) is not None:
                    yield seen
                else:
                    yield from self._apply_stored(state, event)
            elif isinstance(event, Removed):
                stats.removed += event.events
                for at in range(0, len(event.hashes), MAX_BLOCKS):
                    self._apply_removed(state, event, event.hashes[at : at + MAX_BLOCKS])
                    yield None
            else:
                stats.cleared += 1
                state.clear_gpu()
                self._index.cleared(state.number)
                yield None

    def forget(self, publisher: str) -> None:
        """Remove all blocks of a publisher: its engine restarted, or messages were lost."""
        state = self._state(publisher)
        self._index.forget(state.number)
        state.clear()
        state.group = None
        state.stats.resets += 1
        self.needs_sweep = True

    def forget_tier(self, publisher: str, medium: str) -> None:
        """Remove all blocks that a publisher has on a slower medium: its engine did not find them there."""
        state = self._state(publisher)
        self.tiers.forget(state, medium)
        self.needs_sweep = True

    def retry_quarantined(self, publisher: str) -> Iterator[Observation | None]:
        """Apply the events whose parents a replay has brought, in steps as ``apply_in_steps`` does."""
        state = self._state(publisher)
        known = [parent for parent in state.quarantine.parents() if self._depth(state, parent) is not None]
        for event in state.quarantine.take_children(known):
            yield from self._place_in_steps(state, event)

    def capture(self, publisher: str) -> Captured:
        """Return the publisher's blocks, to be recorded before its next event is applied.

        Its blocks from decode are copied first: one that is credited while the others are recorded is then in
        both parts, never in none. Events that wait for their parents are left out, since they were never
        credited. So are the requests that have begun to generate: blocks that they compute again after a
        preemption pass unchecked.
        """
        state = self._state(publisher)
        pending = state.decode_blocks.copies()
        return Captured(state.group, pending, self._index.capture(state.number))

    def restore(self, publisher: str, group: int | None) -> Section:
        """Replace what is known of the publisher by its section of another replica's snapshot."""
        state = self._state(publisher)
        state.clear()
        state.group = group
        self.needs_sweep = True
        return Section(self._index.restore(state.number), state, self.checker, self.tiers.on_restored)

    def expire(self) -> None:
        """Drop events whose parents never came, and forget requests that have been silent for long."""
        now = self._clock()
        self._sessions.age(now)
        for state in (*self._publishers.values(), *self.tiers.storages.values()):
            state.stats.orphans_dropped += state.quarantine.expire(now)
            if state.tiered:
                self.tiers.expire(state)
                self.needs_sweep |= state.leases.expired

    def sweep(self, budget: int = 256) -> int:
        """Free the memory of up to ``budget`` forgotten segments; return how many are left."""
        left = self._index.sweep(budget)
        states = (*self._publishers.values(), *self.tiers.storages.values())
        if (expired := next((state for state in states if state.leases.expired), None)) is not None:
            left += self.tiers.remove_expired(expired) or len(states) > 1
        self.needs_sweep = left > 0
        return left

    def expect(self, session: str, publisher: str) -> None:
        """Note that a request was routed: its next event is its first, although the session id was used."""
        self._sessions.remove(publisher, session)

    def _state(self, publisher: str) -> PublisherState:
        state = self._publishers.get(publisher)
        if state is None and (state := self.tiers.shared(publisher)) is None:
            state = PublisherState(publisher, self._index.publisher(publisher), self._lease_seconds)
            self._publishers[publisher] = state
        return state

    def _apply_removed(self, state: PublisherState, event: Removed, hashes: list[int]) -> None:
        """Remove some of the event's blocks."""
        if event.medium == GPU and self._index.window_removed(state.number, event.group, hashes):
            return
        if not _same_group(state.group, event.group):
            state.stats.other_groups += 1
            return
        self.evicted.on_removed(hashes)
        if event.medium != GPU:
            self.tiers.on_removed(state, hashes, event.medium)
            self._index.evicted(state.number, hashes[-1], event.medium)
        if len(state.quarantine):
            for block in hashes:
                state.quarantine.on_removed(block)
        if len(state.decode_blocks):
            hashes = [block for block in hashes if not state.decode_blocks.on_removed(block, event.medium)]
        if hashes:
            self._index.removed(state.number, hashes, medium=event.medium)

    def _apply_stored(self, state: PublisherState, event: Stored) -> Iterator[Observation | None]:
        stats = state.stats
        stats.stored += 1
        if event.kind in FULL_KINDS and state.group is None and event.tokens:
            state.group = event.group
        if event.kind not in FULL_KINDS or not _same_group(state.group, event.group):
            self._apply_window(state, event)
        elif not event.tokens and event.block_size == 0:
            yield from self._place_on_tier(state, event)
        elif event.tokens != len(event.hashes) * event.block_size or not event.hashes:
            stats.missized += 1
        elif event.medium != GPU:
            yield from self._place_on_tier(state, event)
        else:
            yield from self._place_in_steps(state, event)
            return
        yield None

    def _apply_window(self, state: PublisherState, event: Stored) -> None:
        """Follow a group with a window, and count the events of one that is not understood."""
        size, group = event.block_size, event.group
        needed = window_blocks(event.kind, event.window, size)
        if needed is None or group is None or event.medium != GPU:
            state.stats.other_groups += 1
        else:
            self._note_start(state, event.session)
            self._index.window_stored(state.number, group, event.hashes, needed=needed, block_size=size)

    def _note_start(self, state: PublisherState, session: str | None) -> None:
        """Call ``on_prefill_started`` before a request's first event, of whatever group, is applied."""
        if session is not None and not self._sessions.known(state.name, session):
            self._on_prefill_started(state.name, state.endpoint, session)

    def _place_on_tier(self, state: PublisherState, event: Stored) -> Iterator[Observation | None]:
        """Place an event of a slower tier, and the quarantined events that follow from it."""
        state.tiered = True
        placed = self.tiers.on_stored(state, event)
        state.stats.blocks += len(placed)
        if len(state.quarantine):
            for child in state.quarantine.take_children(placed):
                yield from self._place_in_steps(state, child)

    def _place_in_steps(self, state: PublisherState, event: Stored) -> Iterator[Observation | None]:
        """Place an event and the quarantined events that follow from it."""
        work = deque(event.parts(MAX_BLOCKS))
        while work:
            part = work.popleft()
            seen = self._place(state, part)
            if seen is None:
                state.stats.orphans += 1
                state.stats.orphans_dropped += state.quarantine.add(part, self._clock())
            elif len(state.quarantine):
                work.extend(state.quarantine.take_children(part.hashes))
            yield seen

    def _place(self, state: PublisherState, event: Stored) -> Observation | None:
        """Add one event to the index or to the checker; return None if its parent is unknown."""
        session, single = event.session, len(event.hashes) == 1
        self._note_start(state, session)
        before = self._depth(state, event.parent)
        # A prompt comes many blocks at a time. Blocks that follow a single block in the same request may be
        # the recomputation of its own answer after a preemption.
        decode = single or self._sessions.decoding(state.name, session)
        loaded = self.tiers.loaded(state, event.hashes) if state.tiered else 0
        texts, complete = self._decoder.texts(event)
        state.stats.unknown_ids += not complete
        if decode and (event.media or (texts and TOKEN in texts[0])):
            decode = False  # no model generates media
        if texts and not self._place_texts(state, event, texts, before, decode=decode):
            return None
        if opaque := event.hashes[len(texts) :]:
            parent = event.hashes[len(texts) - 1] if texts else event.parent
            self._index.opaque(state.number, parent, opaque, medium=event.medium)
            state.stats.opaque_blocks += len(opaque)
        if event.salt is not None:
            self.tiers.salted = True
        if state.tiered:
            self.tiers.on_known(state, event.hashes)
            self.tiers.on_computed(state, event, texts, decode=decode)
        state.stats.blocks += len(event.hashes)
        tokens = event.tokens
        first = self._sessions.add(state.name, session, single=decode and single)
        return Observation(
            publisher=state.name,
            endpoint=state.endpoint,
            session=session,
            tokens=tokens,
            loaded=loaded * event.block_size,
            cached=before if first else None,
            phase="decode" if decode else "prefill",
            depth=None if before is None else before + tokens,
            last_block=event.hashes[-1],
        )

    def _place_texts(
        self, state: PublisherState, event: Stored, texts: list[bytes], before: int | None, *, decode: bool
    ) -> bool:
        """Add blocks of text behind ``before`` tokens; return False if the parent is unknown."""
        parent = state.decode_blocks.uncredited(event.parent)
        if parent is not None and not decode and (event.session is None or event.session != parent.session):
            # A prompt hit the chain. The request that generated it would prove nothing by computing it again.
            parent = None if self.checker.prove(state, parent) else parent
        if parent is None and not (decode and before is not None and self._is_new(event, texts)):
            placed = self._place_credited(state, event, texts)
            if placed and not decode and state.stats.warm:  # what a first replay tells happened long ago
                self.evicted.on_stored(state.number, event.hashes, event.block_size)
            return placed
        size, previous, depth = event.block_size, event.parent, before
        for block_hash, ids, text in zip(event.hashes, self._decoder.ids(event), texts, strict=False):
            depth = None if depth is None else depth + size
            tokens = BlockTokens(ids, text)
            root = (event.lora, event.salt)
            block = DecodeBlock(block_hash, previous, root, tokens, size, depth, event.session)
            self.checker.add(state, block)
            previous = block_hash
        return True

    def _place_credited(self, state: PublisherState, event: Stored, texts: list[bytes]) -> bool:
        return self._index.stored(
            state.number,
            (event.lora, event.salt),
            event.parent,
            event.hashes[: len(texts)],
            texts,
            block_size=event.block_size,
        )

    def _is_new(self, event: Stored, texts: list[bytes]) -> bool:
        """Return False if the last block is known with this text."""
        return self._index.tail(event.hashes[-1], len(texts[-1])) != texts[-1]

    def _depth(self, state: PublisherState, block_hash: int | None) -> int | None:
        if block_hash is None:
            return 0
        block = state.decode_blocks.uncredited(block_hash)
        return block.depth if block else self._index.depth(block_hash, state.number)


def _same_group(indexed: int | None, group: int | None) -> bool:
    return indexed is None or group is None or indexed == group
