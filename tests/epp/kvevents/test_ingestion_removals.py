from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.engines.vllm.kv_events import Cleared, Event, Removed, Stored
from kvist_epp.kvevents.ingestion import MAX_BLOCKS, merge_removals

REMOVED = st.builds(
    Removed,
    hashes=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    medium=st.sampled_from(["GPU", "CPU"]),
    group=st.sampled_from([None, 0, 1]),
)
STORED = st.builds(
    Stored, hashes=st.just([1]), parent=st.none(), token_ids=st.just([]), block_size=st.just(0)
)


def flat(events: list[Event]) -> list[object]:
    """Return the events block by block."""
    return [
        (event.medium, event.group, name) if isinstance(event, Removed) else event
        for event in events
        for name in (event.hashes if isinstance(event, Removed) else [None])
    ]


@given(st.lists(REMOVED | STORED | st.just(Cleared()), max_size=20))
def test_joining_changes_neither_what_happens_nor_its_order(events: list[Event]) -> None:
    """Block by block the joined events are the same in the same order, and none is lost from the count."""
    result = list(merge_removals(events))
    assert flat([event for event, _ in result]) == flat(events)
    assert sum(count for _, count in result) == len(events)


def test_one_call_stays_short() -> None:
    """A pool that is emptied block by block comes in pieces, so that a pick gets its turn."""
    events: list[Event] = [Removed(hashes=[n]) for n in range(2 * MAX_BLOCKS + 1)]
    assert [count for _, count in merge_removals(events)] == [MAX_BLOCKS, MAX_BLOCKS, 1]
