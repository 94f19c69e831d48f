"""The picker's memory of its own routing."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.strategies import roots

from kvist_epp.index.routing_history import END_BYTES, RoutedPrompt, RoutingHistory
from kvist_epp.index.tree.segment import Root

PLAIN: Root = (None, None)


def test_a_note_counts_to_the_byte_where_the_prompts_part() -> None:
    """A prompt that shares a beginning with a noted one matches exactly so far."""
    history = RoutingHistory()
    history.note("a", PLAIN, b"system prompt, question one")

    assert history.match(PLAIN, b"system prompt, question two") == {"a": len(b"system prompt, question ")}


def test_each_name_has_its_own_longest_prefix() -> None:
    """Two names that were sent different prompts match differently, and a third not at all."""
    history = RoutingHistory()
    history.note("a", PLAIN, b"hello world")
    history.note("b", PLAIN, b"hello there")

    assert history.match(PLAIN, b"hello there!") == {"a": 6, "b": 11}


def test_roots_are_apart() -> None:
    """A prompt routed with one adapter or salt says nothing of another."""
    history = RoutingHistory()
    history.note("a", ("lora", None), b"hello")

    assert history.match(PLAIN, b"hello") == {}
    assert history.match((None, "salt"), b"hello") == {}
    assert history.match(("lora", None), b"hello") == {"a": 5}


def test_a_dropped_note_counts_no_more_and_leaves_nothing() -> None:
    """A note that is dropped because the engine's events arrived gives no more credit, however often it is
    dropped."""
    history = RoutingHistory()
    first = history.note("a", PLAIN, b"hello")
    second = history.note("a", PLAIN, b"hello")
    history.drop(first)
    history.drop(first)

    assert history.match(PLAIN, b"hello") == {"a": 5}

    history.drop(second)

    assert history.match(PLAIN, b"hello") == {}
    assert (history.size("a"), history._roots) == (0, {})


def test_a_moved_note_counts_for_its_new_name() -> None:
    """The whole prompt is the new name's, and the old one has nothing of it left."""
    history = RoutingHistory()
    kept = history.note("a", PLAIN, b"one two")
    moved = history.moved(history.note("a", PLAIN, b"one two three"), PLAIN, "b")

    assert history.match(PLAIN, b"one two three four") == {"a": 7, "b": 13}
    history.drop(kept)
    assert history.match(PLAIN, b"one two three") == {"b": 13}
    history.drop(moved)
    assert history.match(PLAIN, b"one") == {}


def test_a_dropped_note_is_not_moved() -> None:
    """Dropped before, or evicted: there is nothing to move."""
    history = RoutingHistory()
    note = history.note("a", PLAIN, b"text")
    history.drop(note)

    assert history.moved(note, PLAIN, "b") is note
    assert history.match(PLAIN, b"text") == {}


def test_the_least_recent_text_gives_way() -> None:
    """A name with a limit keeps its most recent prompts; noting one again makes it recent."""
    history = RoutingHistory()
    history.limit("a", 2 * (100 + END_BYTES))
    for letter in (b"x", b"y", b"x", b"z"):
        history.note("a", PLAIN, letter * 100)

    assert [history.match(PLAIN, letter * 100) for letter in (b"x", b"y", b"z")] == [
        {"a": 100},
        {},
        {"a": 100},
    ]


def test_a_growing_chat_costs_its_text_once() -> None:
    """A conversation's turns share their text; each costs the block it ends in besides."""
    history = RoutingHistory()
    for turn in range(1, 50):
        history.note("a", PLAIN, b"turn " * turn)

    assert history.size("a") == len(b"turn " * 49) + 49 * END_BYTES


def test_requests_without_text_of_their_own_are_bounded_too() -> None:
    """The limit bounds memory, not only text: many short questions to one long prompt are evicted."""
    history = RoutingHistory()
    history.limit("a", 1000 + 10 * END_BYTES)
    for question in range(500):
        history.note("a", PLAIN, b"x" * 900 + b"%03d" % question)

    assert history.size("a") <= 1000 + 10 * END_BYTES
    assert repr(history) == "<RoutingHistory 1 names, 11 ends>"


def test_a_limit_does_not_mix_up_requests_of_one_prompt() -> None:
    """Two requests with the same prompt are in flight: dropping one leaves the other's credit."""
    history = RoutingHistory()
    history.limit("a", 10**6)
    first = history.note("a", PLAIN, b"hello")
    history.note("a", PLAIN, b"hello")
    history.drop(first)

    assert history.match(PLAIN, b"hello") == {"a": 5}


def test_a_prompt_beyond_the_limit_is_not_kept() -> None:
    """A prompt larger than the endpoint's cache gives no credit."""
    history = RoutingHistory()
    history.limit("a", 50)
    history.note("a", PLAIN, b"x" * 100)

    assert history.match(PLAIN, b"x" * 100) == {}


def test_a_forgotten_name_has_nothing_and_its_notes_can_still_be_dropped() -> None:
    """An endpoint that has left takes its notes with it; dropping them later does no harm."""
    history = RoutingHistory()
    note = history.note("a", PLAIN, b"hello")
    history.note("b", PLAIN, b"hello")
    history.forget("a")
    history.drop(note)

    assert history.match(PLAIN, b"hello") == {"b": 5}


@given(
    st.text(alphabet="ab", max_size=12).map(str.encode), st.text(alphabet="ab", max_size=12).map(str.encode)
)
def test_any_two_prompts_match_in_their_common_beginning(noted: bytes, asked: bytes) -> None:
    """The match is the longest common prefix."""
    history = RoutingHistory()
    history.note("a", PLAIN, noted)
    common = next(
        (n for n in range(min(len(noted), len(asked))) if noted[n] != asked[n]), min(len(noted), len(asked))
    )

    assert history.match(PLAIN, asked) == ({"a": common} if common else {})


class Notes(RuleBasedStateMachine):
    """Random notes and drops against a list of prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.history = RoutingHistory()
        self.notes: list[tuple[RoutedPrompt, str, Root, bytes]] = []

    @rule(name=st.sampled_from("abc"), root=roots, prompt=st.text(alphabet="ab", max_size=8).map(str.encode))
    def note(self, name: str, root: Root, prompt: bytes) -> None:
        """A request is routed."""
        self.notes.append((self.history.note(name, root, prompt), name, root, prompt))

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Drop a note, as when its events arrive."""
        if self.notes:
            self.history.drop(self.notes.pop(data.draw(st.integers(0, len(self.notes) - 1)))[0])

    @rule(name=st.sampled_from("abc"))
    def forget(self, name: str) -> None:
        """A pod goes."""
        self.history.forget(name)
        self.notes = [note for note in self.notes if note[1] != name]

    @rule(root=roots, prompt=st.text(alphabet="ab", max_size=10).map(str.encode))
    def match(self, root: Root, prompt: bytes) -> None:
        """The longest common prefix over all notes of a name."""
        expected: dict[str, int] = {}
        for _, name, of, noted in self.notes:
            common = max(n for n in range(len(prompt) + 1) if noted.startswith(prompt[:n]))
            if of == root and common:
                expected[name] = max(expected.get(name, 0), common)
        assert self.history.match(root, prompt) == expected

    @invariant()
    def sizes(self) -> None:
        """Distinct text is counted once, and ends by their number."""
        for name in "abc":
            mine = {(root, prompt) for _, of, root, prompt in self.notes if of == name}
            text = {(root, prompt[: n + 1]) for root, prompt in mine for n in range(len(prompt))}
            assert self.history.size(name) == len(text) + END_BYTES * len(mine)

    @invariant()
    def compact(self) -> None:
        """No node but the root is there for nothing: something ends there, or prompts part."""
        todo = list(self.history._roots.values())
        for top in todo:
            assert top.holders
        while todo:
            node = todo.pop()
            todo += node.children.values()
            assert node.parent is None or node.ends or len(node.children) > 1


TestNotes = Notes.TestCase
TestNotes.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
