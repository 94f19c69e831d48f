"""The short way of most events: one more block of an answer, behind a block that is credited. Pure.

An engine that serves a thousand requests stores far more blocks of answers, each in an event of its own, than
events of prompts. Nearly all of them are alike: one whole block of text on the GPU, in the group that is
indexed, with tokens that are known to be canonical, behind the last block of a segment of the tree. Nothing
else that ``Ingestor`` does for events applies to them, and without it they take half of the time.
"""

from kvist_epp.engines.vllm.cache_groups import FULL_KINDS
from kvist_epp.engines.vllm.kv_events import GPU, Stored
from kvist_epp.index.media_marks import TOKEN
from kvist_epp.kvevents.decode_blocks import BlockTokens, DecodeBlock
from kvist_epp.kvevents.decode_check import DecodeChecker
from kvist_epp.kvevents.observation import Observation, RecentSessions
from kvist_epp.kvevents.publisher_state import PublisherState


def append_to_answer(
    state: PublisherState, event: Stored, sessions: RecentSessions, checker: DecodeChecker
) -> Observation | None:
    """Apply an event as ``Ingestor`` would, if it is one of these; else return None, and change nothing."""
    parent = state.decode_blocks.get(event.parent)
    if parent is None or not _is_text_block(event) or not _is_plain(state, event):
        return None
    if event.session is not None and not sessions.decoding(state.name, event.session):
        return None
    block = DecodeBlock(
        hash=event.hashes[0],
        parent=parent.hash,
        root=(event.lora, event.salt),
        tokens=BlockTokens(event.token_ids, b"".join(event.pieces or ())),
        block_size=event.block_size,
        depth=None,
        session=event.session,
    )
    if TOKEN in block.tokens.data or not checker.append(state, parent, block):
        return None
    sessions.add(state.name, event.session, single=True)
    state.stats.stored += 1
    state.stats.blocks += 1
    return Observation(
        publisher=state.name,
        endpoint=state.endpoint,
        session=event.session,
        tokens=event.block_size,
        cached=None,
        phase="decode",
        depth=block.depth,
        last_block=block.hash,
    )


def _is_text_block(event: Stored) -> bool:
    """Return whether an event is one whole block of text on the GPU, with ids that all exist."""
    return (
        len(event.hashes) == 1
        and event.pieces is not None
        and len(event.pieces) == event.block_size
        and event.medium == GPU
        and not event.media
        and event.opaque_from is None
    )


def _is_plain(state: PublisherState, event: Stored) -> bool:
    """Return whether an event is of the indexed group, of an engine of which nothing else depends on it."""
    return (
        event.group == state.group
        and event.kind in FULL_KINDS
        and not len(state.quarantine)
        and (not state.tiered or _has_its_own_tiers(state))
    )


def _has_its_own_tiers(state: PublisherState) -> bool:
    """Return whether what slower tiers hold concerns this engine only, and no block waits for its place.

    Blocks with a lease are in the index, so that a new one is none of them.
    """
    return state.storage_name is None and not len(state.waiting)
