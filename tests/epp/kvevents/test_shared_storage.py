"""Storage that several engines share: one set of blocks for all of them."""

import pytest
from tests.epp.kvevents.recorded_tiers import Run, recorded
from tests.epp.kvevents.test_recorded_tiers import Following
from tests.epp.kvevents.test_tier_blocks import aged, placeholder
from tests.fakes.learning import PROMPT, Learning, stored

from kvist_epp.engines.vllm.kv_events import Removed
from kvist_epp.index.cached_part import Member
from kvist_epp.index.lookup import Lookup
from kvist_epp.index.routing_history import RoutingHistory
from kvist_epp.index.tree.matches import Hit

A, B, C = "ns/a", "ns/b", "ns/c"


class Sharing(Learning):
    """Three engines, of which two share their storage, and the look-up of their endpoints."""

    def __init__(self, names: dict[str, str | None]) -> None:
        super().__init__()
        self.lookup = Lookup(self.index, RoutingHistory())
        self.lookup.storages = self.ingestor.tiers.numbers
        for endpoint, name in names.items():
            self.ingestor.add_publisher(f"{endpoint}/0", endpoint, name)
            number = self.index.publisher(f"{endpoint}/0")
            self.lookup.join(endpoint, Member((number,), block_size=4, storage=name))

    def held(self, text: bytes = PROMPT) -> dict[str, tuple[int, dict[str, int]]]:
        """Return what each endpoint has of a prompt: its tokens, and those of slower media."""
        found = self.lookup.look((None, None), [text + b"?"], learn=False)
        return {key: (part.tokens, dict(part.lower)) for key, part in found.hits.items()}


@pytest.mark.parametrize(
    ("names", "medium"),
    [
        ({A: "v", B: "v", C: "w"}, "STORAGE"),
        ({A: "v", B: "v", C: "w"}, "SHARED"),
        ({A: "", B: "", C: None}, "SHARED"),
    ],
)
def test_a_block_in_shared_storage_is_there_for_all_engines_that_share_it(
    names: dict[str, str | None], medium: str
) -> None:
    """One engine computes and stores a prompt, and both could load it; a third one, with another storage,
    could not. Storage is shared by name, or by what the events say where no name is given."""
    engine = Sharing(names)
    engine.source = f"{A}/0"
    engine.send(stored([1, 2], None, PROMPT), placeholder(2, 1, medium=medium))
    before = engine.held()
    engine.send(Removed(hashes=[2, 1]))

    assert before == {A: (8, {}), B: (8, {"SHARED": 8})}
    assert engine.held() == {A: (8, {"SHARED": 8}), B: (8, {"SHARED": 8})}


def test_an_engine_s_own_disk_is_its_own() -> None:
    """Without a name, storage that events do not call remote is not shared."""
    engine = Sharing({A: "", B: ""})
    engine.source = f"{A}/0"
    engine.send(stored([1, 2], None, PROMPT), placeholder(1, 2, medium="STORAGE"), Removed(hashes=[1, 2]))

    assert engine.held() == {A: (8, {"STORAGE": 8})}


def test_what_an_engine_holds_itself_comes_first() -> None:
    """An engine with a shorter prefix on the GPU loads only the rest."""
    engine = Sharing({A: "v", B: "v"})
    engine.source = f"{A}/0"
    engine.send(stored([1, 2], None, PROMPT), placeholder(1, 2, medium="SHARED"))
    engine.source = f"{B}/0"
    engine.send(stored([1, 2], None, PROMPT), Removed(hashes=[2]))

    assert engine.held() == {A: (8, {}), B: (8, {"SHARED": 4})}


def test_approximate_endpoints_do_not_count_shared_storage() -> None:
    """Their engines' events cannot be trusted, and so cannot the claim that they share."""
    engine = Sharing({A: "v", B: "v"})
    engine.lookup.members[B].precise = False
    engine.source = f"{A}/0"
    engine.send(stored([1, 2], None, PROMPT), placeholder(1, 2, medium="SHARED"))

    assert engine.held() == {A: (8, {})}


def test_shared_storage_outlives_its_engines() -> None:
    """A restarted engine, and one that joins after the one that wrote has left, find the files; the lease
    ends that."""
    engine = Sharing({A: "v", B: "v"})
    engine.source = f"{A}/0"
    engine.send(stored([1, 2], None, PROMPT), placeholder(1, 2, medium="SHARED"))
    engine.ingestor.forget(engine.source)
    restarted = engine.held()
    engine.lookup.leave(A)
    engine.ingestor.remove_publisher(engine.source)
    left = engine.held()
    engine.source = f"{B}/0"
    aged(engine, 5400.0)

    assert restarted == {A: (8, {"SHARED": 8}), B: (8, {"SHARED": 8})}
    assert (left, engine.held()) == ({B: (8, {"SHARED": 8})}, {})


def test_a_load_by_any_engine_renews_the_lease() -> None:
    """Files that another engine has loaded from the storage are there."""
    engine = Sharing({A: "v", B: "v"})
    engine.source = f"{A}/0"
    engine.send(stored([1, 2], None, PROMPT), placeholder(1, 2, medium="SHARED"), Removed(hashes=[1, 2]))
    aged(engine, 1800.0)
    engine.source = f"{B}/0"
    engine.send(placeholder(1, 2), stored([1, 2], None, PROMPT))  # through host memory to the GPU
    engine.send(Removed(hashes=[1, 2]), Removed(hashes=[1, 2], medium="CPU"))
    aged(engine, 1800.0)

    assert engine.held() == {A: (8, {"SHARED": 8}), B: (8, {"SHARED": 8})}


def test_removals_of_shared_storage_are_for_all() -> None:
    """An engine that reports a removal, as other tiers than vLLM's own may."""
    engine = Sharing({A: "v", B: "v"})
    engine.source = f"{A}/0"
    engine.send(stored([1, 2], None, PROMPT), placeholder(1, 2, medium="SHARED"))
    engine.source = f"{B}/0"
    engine.send(Removed(hashes=[2], medium="STORAGE"))

    assert engine.held() == {A: (8, {}), B: (4, {"SHARED": 4})}


def test_a_wiped_storage_is_forgotten_for_all() -> None:
    """One engine's tier is forgotten: the others would not find the files either."""
    engine = Sharing({A: "v", B: "v"})
    engine.source = f"{A}/0"
    engine.send(stored([1, 2], None, PROMPT), placeholder(1, 2, medium="SHARED"), Removed(hashes=[1, 2]))
    engine.ingestor.forget_tier(f"{B}/0", "SHARED")
    while engine.ingestor.needs_sweep:
        engine.ingestor.sweep()

    assert engine.held() == {}


def test_replayed_events_of_files_that_were_missing_are_not_believed_again() -> None:
    """An engine leaves the pool and comes back after the files were removed, so that its events are replayed:
    what they stored before is not expected, what is stored afterwards is. So it is with an engine that was
    away when the files were found missing, and with another one's later events."""
    engine = Sharing({A: "v", B: "v"})
    sources = {A: f"{A}/0", B: f"{B}/0"}
    written = (stored([1, 2], None, PROMPT), placeholder(1, 2, medium="SHARED"), Removed(hashes=[1, 2]))
    held = []
    for away in (False, True):
        engine.source = sources[A]
        engine.send(*written)
        sent = engine.sent_at
        if away:
            engine.ingestor.remove_publisher(sources[A])
        engine.source = sources[B]
        engine.send(stored([7], None, b"else"))
        engine.ingestor.forget_tier(sources[B], "SHARED")
        while engine.ingestor.needs_sweep:
            engine.ingestor.sweep()
        if not away:
            engine.ingestor.remove_publisher(sources[A])
        engine.ingestor.add_publisher(sources[A], A, "v")
        engine.source, now, engine.sent_at = sources[A], engine.sent_at, sent - 1.0
        engine.send(*written)
        held.append(engine.held())
        engine.sent_at = now
        engine.send(*written)
        held.append(engine.held())

    back = {A: (8, {"SHARED": 8}), B: (8, {"SHARED": 8})}
    assert held == [{}, back, {}, back]


def test_what_a_real_engine_wrote_is_predicted_for_another_one() -> None:
    """A second real engine was started on the disk of the first: of its requests, plain and salted, the index
    knows from the first one's events how much comes from the disk."""
    first, second = recorded("self-describing"), recorded("warm-disk")
    following = Following()
    for name in ("ns/pod", "ns/other"):
        following.ingestor.add_publisher(f"{name}/0", name, "")
    _apply(following, first)
    storage = following.ingestor.tiers.numbers[""]
    hits = [
        following.index.match((None, step.salt), following.words.text(step.prompt)).of(storage)
        for step in second.steps
    ]

    assert hits == [Hit(320, hits[0].bytes, {"SHARED": 320})] * 2
    assert [true["disk"] for _, true in second.with_sources()] == [320, 320]


def _apply(following: Following, run: Run) -> None:
    for step in run.steps:
        for _, payload in step.batches:
            following.apply(payload)
