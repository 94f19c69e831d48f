"""The prompt of a request counts as cached where it went, until events say what is cached."""

import json

import pytest
from tests.epp.director.test_cache_truth import KEY, LONG, Engine, chain
from tests.epp.parts import BLOCK, MODEL, Parts, ask, chat, make

from kvist_epp.engines.vllm.kv_events import Stored
from kvist_epp.load.in_flight import Attempt, InFlightRequest, Leg
from kvist_epp.names import SESSION_HEADER

BODY = chat(LONG)
BLOCKS = len(chain(BODY)[0])


class WholeCheck:
    """The model, without the chunks that need no check."""

    pieces = MODEL.pieces
    chunks = None

    def encode(self, text: str) -> list[int]:
        """Tokenize as the model does."""
        return MODEL.encode(text)


def routed(parts: Parts) -> InFlightRequest:
    """Route a request; its prompt is on its way."""
    parts.decide(ask(BODY, headers={SESSION_HEADER: "s"}))
    [attempt] = parts.director.tracker.own()
    return attempt.request


def predicted(parts: Parts) -> int:
    """Return the tokens that the next turn of the conversation would find cached, by blocks."""
    page = parts.explain(json.dumps(chat(LONG, "ok", "more")).encode())
    return int(page["endpoints"][0]["matched_tokens"]) // BLOCK


def window(parent: int | None, hashes: list[int], ids: list[int]) -> Stored:
    """Return an event of blocks in a group with a window of two blocks."""
    return Stored(
        hashes=hashes,
        parent=parent,
        token_ids=ids,
        block_size=BLOCK,
        group=1,
        kind="sliding_window",
        window=2 * BLOCK,
        session="s",
    )


def test_a_prompt_counts_by_its_text_until_its_blocks_are_in_the_index() -> None:
    """The credit ends with the event of the last block, not before."""
    parts = make(1)
    engine = Engine(parts)
    request = routed(parts)
    sent = len(request.cache_credit)
    half = BLOCKS // 2
    engine.stores(BODY, "s", 0, blocks=half)
    computing = len(request.cache_credit)
    engine.stores(BODY, "s", half)

    assert (sent, computing, request.cache_credit) == (1, 1, [])
    assert predicted(parts) == BLOCKS


def test_what_an_engine_with_windows_has_not_kept_does_not_count() -> None:
    """A prompt of which the window's blocks are gone is no hit, though it was sent there a moment ago."""
    parts = make(1)
    engine = Engine(parts)
    routed(parts)
    before = predicted(parts)
    hashes, ids = chain(BODY)
    engine.stores(BODY, "s", 0)
    engine.learn(window(hashes[-3], hashes[-2:-1], ids[-2 * BLOCK : -BLOCK]))

    assert before > BLOCKS // 2
    assert predicted(parts) == 0


def test_a_block_that_waits_for_its_check_does_not_end_the_credit() -> None:
    """A single last block looks like a generated one. The index lacks it, so the text still counts."""
    parts = make(1)
    engine = Engine(parts, WholeCheck())
    request = routed(parts)
    engine.stores(BODY, "another session", 0, blocks=BLOCKS - 1)
    engine.stores(BODY, "s", BLOCKS - 1)

    assert len(request.cache_credit) == 1
    assert predicted(parts) == BLOCKS


@pytest.mark.parametrize("how", ["approximate", "unindexed", "leg", "session"])
def test_where_the_index_does_not_know_better_the_credit_stays(how: str) -> None:
    """Endpoints without trusted events, prompts known by their plain text, the first of two legs, and several
    requests of one session keep theirs."""
    parts = make(1, precise=how != "approximate")
    engine = Engine(parts)
    request = routed(parts)
    request.unindexed = request.truth_known = how == "unindexed"
    if how == "leg":
        request.attempt.leg = Leg.PREFILL
    if how == "session":
        parts.decide(ask(chat("Another one. " * 40), headers={SESSION_HEADER: "s"}))
    engine.stores(BODY, "s", 0)

    assert len(request.cache_credit) == 1


@pytest.mark.parametrize("precise", [True, False])
def test_the_prompt_of_another_replica_s_request_is_reported_as_computed(precise: bool) -> None:
    """The replica forgets what the other one has announced; an endpoint without trusted events keeps it."""
    parts = make(1, precise=precise)
    engine = Engine(parts)
    reported: list[Attempt] = []
    parts.director.progress.on_remote_prompt_computed = reported.append
    request = InFlightRequest("s", BLOCKS * BLOCK, origin="other")
    attempt = Attempt(request, parts.director.tracker.load(KEY), 100.0, 0.0, 0.0, 100.0)
    request.attempts.append(attempt)
    parts.director.tracker.add_remote(attempt, 0.0)
    engine.stores(BODY, "s", 0)

    assert reported == ([attempt] if precise else [])
