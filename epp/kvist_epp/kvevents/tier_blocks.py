"""Blocks on slower tiers: their place in the index, from events in any order. Pure.

vLLM's offloading connector reports each block of a tier in an event of its own, children before parents, and
before or after the events of the GPU. These events have no extra keys, so they do not tell salted blocks, or
blocks with media, from others (vLLM issue 49413). They may lack everything but the hash, which is vLLM's
default (``self_describing_kv_events``). A hash names the same block on all media, however. A block of a tier
therefore is

- the block of the same hash that this engine's GPU events, or another engine's, have put into the index;
- else the block that follows its parent, if the event has token ids and the parent is in the index;
- else a block that waits for events that say so. A first block of a prompt that no event has explained in
  time is taken for one without salt, unless an event of some engine has shown a salt.

vLLM's disk tier never removes a block, so no event tells when a file is gone. Such blocks are believed for
the time of a lease, which is renewed when the block is stored again or loaded.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from msgspec.structs import replace

from kvist_epp.engines.vllm.kv_events import CPU, LMCACHE, SHARED, STORAGE, Stored
from kvist_epp.index.byte_index import Index
from kvist_epp.kvevents.decode_blocks import BlockTokens, DecodeBlock
from kvist_epp.kvevents.decode_check import DecodeChecker
from kvist_epp.kvevents.lmcache_blocks import LmcacheServer
from kvist_epp.kvevents.publisher_state import PublisherState
from kvist_epp.kvevents.tier_state import COUNTED, WAITING_SECONDS, WaitingBlock, joined_media
from kvist_epp.names import LMCACHE_PREFIX

STORAGE_PREFIX: Final = "storage/"
"""Before the name of a shared storage among the publishers of the index."""


class Decoder(Protocol):
    """The part of ``ingestion.BlockDecoder`` that is used here."""

    def decode(self, ids: Sequence[int], block_size: int) -> tuple[list[bytes], bool]:
        """Return the bytes of each block up to the first unknown id, and whether all ids are known."""

    def texts(self, event: Stored) -> tuple[list[bytes], bool]:
        """Return the bytes of each block of an event up to the first that is not text, and whether all ids
        are known."""


class TierBlocks:
    """Places blocks of slower tiers, of all publishers."""

    def __init__(
        self,
        index: Index,
        decoder: Decoder,
        checker: DecodeChecker,
        publishers: Mapping[str, PublisherState],
        clock: Callable[[], float],
        lease_seconds: float,
    ) -> None:
        """``publishers``: all engines, by the names of their publishers."""
        self._publishers = publishers
        self.storages: dict[str, PublisherState] = {}
        """Storages that several engines share, by name. They outlive their engines, as the files do; leases
        empty those that nothing renews."""
        self.numbers: dict[str, int] = {}
        """Their numbers in the index."""
        self.servers: dict[str, LmcacheServer] = {}
        """Those of them that are servers of LMCache."""
        self.chunks: dict[str, int] = {}
        """Tokens of the servers' blocks."""
        self._lease_seconds = lease_seconds
        self.salted = False
        """An event with a salt was seen: a first block of a prompt may have one."""
        self._index = index
        self._decoder = decoder
        self._checker = checker
        self._clock = clock

    def attach(self, state: PublisherState, name: str, tokens: int | None = None) -> None:
        """Count what an engine stores in the storage of this name as held by all engines that share it.

        With a name that is all of its storage, without one the part of which its events say that others read
        it (locality REMOTE). ``tokens``: what a server of LMCache can hold; None: not known.
        """
        state.storage_name = name
        state.shared_media = frozenset({STORAGE, SHARED} if name else {SHARED})
        if name.startswith(LMCACHE_PREFIX):
            state.shared_media, state.tiered = frozenset({CPU, LMCACHE}), True
            storage = self.holder(state, CPU)
            if name not in self.servers:
                self.servers[name] = LmcacheServer(name, storage, self._index)
                self.chunks[name] = self.servers[name].chunk
            self.servers[name].limit(tokens)

    def holder(self, state: PublisherState, medium: str) -> PublisherState:
        """Return the publisher whose blocks are those of a medium of an engine: its own, or the storage that
        it shares, made when new."""
        name = state.storage_name
        if name is None or medium not in state.shared_media:
            return state
        return self.storage(name)

    def storage(self, name: str) -> PublisherState:
        """Return the storage of this name, made when new."""
        if (found := self.storages.get(name)) is None:
            full = f"{STORAGE_PREFIX}{name}"
            found = PublisherState(full, self._index.publisher(full), self._lease_seconds)
            found.tiered = True
            self.storages[name], self.numbers[name] = found, found.number
        return found

    def sharers(self, publishers: Iterable[str]) -> Mapping[str, Sequence[str]]:
        """Return the storages that some of these publishers share, by their name in snapshots, with all
        publishers that share each."""
        known = self._publishers
        names = dict.fromkeys(known[source].storage_name for source in publishers if source in known)
        return {
            f"{STORAGE_PREFIX}{name}": [one for one, state in known.items() if state.storage_name == name]
            for name in names
            if name is not None and name in self.storages
        }

    def shared(self, source: str) -> PublisherState | None:
        """Return the storage that has this name in snapshots, made when new; None: no publisher shares it."""
        name = source.removeprefix(STORAGE_PREFIX)
        is_storage = name != source and source not in self._publishers
        if is_storage and any(state.storage_name == name for state in self._publishers.values()):
            return self.storage(name)
        return None

    def on_stored(self, state: PublisherState, event: Stored) -> list[int]:
        """Apply an event of a tier; return the hashes whose place is known now."""
        if event.medium == CPU and (server := self._server(state)):
            texts, _ = self._decoder.texts(replace(event, block_size=server.block_size))
            state.stats.held_unknown += not server.on_stored(event, texts)
            self.chunks[server.name] = server.chunk
            return []
        size, medium, parent, placed = event.block_size, event.medium, event.parent, list[int]()
        holder = self.holder(state, medium)
        medium = medium if holder is state else SHARED
        if medium not in COUNTED:
            if holder.cleaned_since(state):
                return []
            holder.leases.add(medium, event.hashes)
        for at, name in enumerate(event.hashes):
            ids = event.token_ids[at * size : (at + 1) * size]
            block = WaitingBlock(name, parent, ids, size, event.lora, self._clock(), [medium])
            if self._place(holder, block):
                placed.append(name)
            parent = name if size else None
        return placed + self.on_known(state, placed)

    def loaded(self, state: PublisherState, hashes: Sequence[int]) -> int:
        """Return how many of these blocks, which the GPU is about to hold, only slower tiers have held."""
        if (server := self._server(state)) is not None:
            return server.loaded(hashes)
        waiting = sum(name in state.waiting for name in hashes) if len(state.waiting) else 0
        return waiting + self._index.loaded(state.number, hashes)

    def on_computed(
        self, state: PublisherState, event: Stored, texts: Sequence[bytes], *, decode: bool
    ) -> None:
        """Note blocks that the GPU of an engine has now: its server of LMCache will have them."""
        if (server := self._server(state)) is not None:
            server.on_computed(event, texts, decode=decode)

    def on_known(self, state: PublisherState, hashes: Sequence[int]) -> list[int]:
        """Place the blocks that waited for these hashes; return their hashes.

        Renews leases: blocks that the GPU has again were loaded, or will be stored again.
        """
        placed: list[int] = []
        if state.storage_name is not None and (storage := self.storages.get(state.storage_name)):
            placed = self.on_known(storage, hashes)
        if state.leases:
            state.leases.renew(hashes)
        work = deque(state.waiting.take(hashes))
        while work:
            block = work.popleft()
            if self._place(state, block):
                placed.append(block.hash)
                work.extend(state.waiting.take([block.hash]))
        return placed

    def on_removed(self, state: PublisherState, hashes: Iterable[int], medium: str) -> None:
        """Note that blocks have left a tier; the index is the caller's, but for shared storage."""
        if medium == CPU and (server := self._server(state)) is not None:
            if server.on_removed(list(hashes)):
                server.forget()
            return
        holder = self.holder(state, medium)
        medium = medium if holder is state else SHARED
        holder.waiting.remove(hashes, medium)
        if medium not in COUNTED:
            holder.leases.remove(medium, hashes)
        if holder is not state:
            self._index.removed(holder.number, list(hashes), medium=medium)

    def expire(self, state: PublisherState) -> None:
        """Stop waiting for events that did not come, and let leases run out."""
        now = self._clock()
        old = state.waiting.old(now - WAITING_SECONDS)
        for block in old:  # another engine's events may have told what the hash means
            if block.hash in state.waiting and self._hold(state, block) and state.waiting.give_up(block):
                self.on_known(state, [block.hash])
        for block in () if self.salted else old:
            if block.parent is None and block.ids and state.waiting.give_up(block):
                self._check(state, block)
                self.on_known(state, [block.hash])
        for block in old:
            if state.waiting.give_up(block):
                self._drop(state, block)
        state.leases.age(now)

    def remove_expired(self, state: PublisherState) -> bool:
        """Remove some of the blocks whose leases have run out; return whether more are left."""
        for medium, names in state.leases.take_expired():
            state.waiting.remove(names, medium)
            left = [name for name in names if not state.decode_blocks.on_removed(name, medium)]
            self._index.removed(state.number, left, medium=medium)
        return state.leases.expired

    def forget(self, state: PublisherState, medium: str) -> None:
        """Remove all blocks of one medium, leased ones in steps (``remove_expired``); those of a storage that
        the engine shares for all engines: what one does not find there, the others will not."""
        if medium == LMCACHE and (server := self._server(state)) is not None:
            server.forget()
            return
        holder, publishers = self.holder(state, medium), self._publishers.values()
        held = medium if holder is state else SHARED
        if held in COUNTED:
            self._index.cleared(holder.number, medium=held)
        else:
            holder.leases.end(held)
            sharers = [one for one in publishers if self.holder(one, medium) is holder]
            holder.cleaned_at = {**{one.name: one.events_at for one in sharers}, "": state.events_at}

    def on_restored(self, state: PublisherState) -> None:
        """Lease the blocks that another replica's snapshot has brought."""
        state.tiered = True
        for medium in self._index.blocks(state.number):
            if medium not in COUNTED:
                state.leases.add(medium, self._index.names_on(state.number, medium))

    def _server(self, state: PublisherState) -> LmcacheServer | None:
        """Return the server of LMCache that an engine uses."""
        return None if state.storage_name is None else self.servers.get(state.storage_name)

    def _place(self, state: PublisherState, block: WaitingBlock) -> bool:
        """Add a block to the index, or to those that wait; return False if it waits."""
        pending = state.decode_blocks.uncredited(block.hash)
        if pending is not None:
            pending.media = joined_media(pending.media, block.media)
            return True
        if self._hold(state, block):
            return True
        parent = block.parent
        if block.ids and parent is not None:
            known = state.decode_blocks.uncredited(parent) is not None
            if known or self._index.depth(parent, state.number) is not None:
                self._check(state, block)
                return True
            if self._index.knows_opaque(state.number, parent):
                self._hide(state, block)
                return True
        if dropped := state.waiting.add(block):
            self._drop(state, dropped)
        return False

    def _hold(self, state: PublisherState, block: WaitingBlock) -> bool:
        """Add a block whose hash is known in the index."""
        index, number, name = self._index, state.number, block.hash
        for medium in block.media:
            known = index.held(number, [name], medium, counted=medium in COUNTED)
            if not known and not index.held_as_others(number, name, medium):
                return False
        return True

    def _check(self, state: PublisherState, block: WaitingBlock) -> None:
        """Add a block whose parent is known: to the index, once it has proved canonical."""
        texts, complete = self._decoder.decode(block.ids, block.block_size)
        if not (texts and complete):
            self._hide(state, block)
            return
        tokens = BlockTokens(block.ids, texts[0])
        size, root = block.block_size, (block.lora, None)
        above = state.decode_blocks.uncredited(block.parent)
        before = 0 if block.parent is None else self._index.depth(block.parent, state.number)
        before = above.depth if above is not None else before
        depth = None if before is None else before + size
        added = DecodeBlock(block.hash, block.parent, root, tokens, size, depth, copies=0, media=block.media)
        self._checker.add(state, added)

    def _hide(self, state: PublisherState, block: WaitingBlock) -> None:
        for medium in block.media:
            self._index.opaque(state.number, block.parent, [block.hash], medium=medium)
        state.stats.opaque_blocks += 1

    def _drop(self, state: PublisherState, block: WaitingBlock) -> None:
        state.stats.held_unknown += 1
        for medium in block.media:
            state.leases.remove(medium, (block.hash,))
