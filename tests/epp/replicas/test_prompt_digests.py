"""Prompts in flight to endpoints: found by their prefixes, and removed with their requests."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.parts import Parts, ask, chat, make
from tests.epp.replicas.test_replication import joined, tell

from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.load.in_flight import Attempt
from kvist_epp.replicas.messages import LoadUpdate, RemoteRequest
from kvist_epp.replicas.prompt_digests import (
    ANNOUNCED_TOKENS,
    MAX_STEPS,
    STEP_BYTES,
    PrefixesInFlight,
    PromptDigests,
)
from kvist_epp.replicas.replication import Replication

PIECES = (b"a" * STEP_BYTES, b"b" * STEP_BYTES, b"b" * (STEP_BYTES - 1), b"c")
prompts = st.lists(st.sampled_from(PIECES), max_size=5).map(b"".join)
roots = st.sampled_from([(None, None), ("adapter", None), (None, "salt")])
PODS = ("p", "q")


def shared(one: bytes, other: bytes) -> int:
    """Return the bytes that two prompts are known to have in common: whole steps, or all of them."""
    if one == other:
        return len(one)
    steps = 0
    while len(one) >= (steps + 1) * STEP_BYTES and other.startswith(one[: (steps + 1) * STEP_BYTES]):
        steps += 1
    return steps * STEP_BYTES


@given(st.lists(st.tuples(st.sampled_from(PODS), roots, prompts), max_size=6), roots, prompts)
def test_the_longest_common_prefix_is_found_for_each_endpoint(
    routed: list[tuple[str, tuple[str | None, str | None], bytes]],
    root: tuple[str | None, str | None],
    prompt: bytes,
) -> None:
    """A match has whole steps, or the whole prompt, under the same root; when all requests have ended none is
    left."""
    prefixes = PrefixesInFlight()
    notes = [(pod, PromptDigests.compute(above, text)) for pod, above, text in routed]
    for pod, note in notes:
        prefixes.add(pod, note)
    expected = dict.fromkeys(PODS, 0)
    for pod, above, text in routed:
        if above == root:
            expected[pod] = max(expected[pod], shared(text, prompt))

    assert prefixes.match(root, prompt) == {pod: size for pod, size in expected.items() if size}
    for pod, note in notes:
        prefixes.remove(pod, note)
    assert (len(prefixes), prefixes.match(root, prompt)) == (0, {})


def test_the_number_of_digests_is_bounded() -> None:
    """Beyond 256 KiB prompts differ by the digest of the whole alone."""
    long, short = (
        PromptDigests.compute((None, None), b"x" * size)
        for size in (STEP_BYTES * (MAX_STEPS + 9), STEP_BYTES - 1)
    )

    assert (len(long.prefixes), short.prefixes) == (MAX_STEPS, ())
    assert len({long.whole, short.whole, *long.prefixes}) == MAX_STEPS + 2


def test_a_prompt_with_more_than_the_maximum_of_steps_is_found_by_its_whole() -> None:
    """A prompt that is equal to the last byte matches completely, another one as far as the steps reach."""
    prefixes, prompt = PrefixesInFlight(), b"x" * STEP_BYTES * MAX_STEPS + b"yz"
    prefixes.add("p", PromptDigests.compute((None, None), prompt))

    assert prefixes.match((None, None), prompt) == {"p": len(prompt)}
    assert prefixes.match((None, None), prompt + b"!") == {"p": STEP_BYTES * MAX_STEPS}


def test_an_older_replica_without_a_digest_of_the_whole_matches_no_prompt_by_it() -> None:
    """A digest of the whole that was not announced is 0 and equals no prompt's."""
    prefixes = PrefixesInFlight()
    prefixes.add("p", PromptDigests((None, None), ()))

    assert (prefixes.match((None, None), b"handshake"), PromptDigests((None, None), ()).content) == ({}, None)


def test_equal_texts_to_different_models_are_different_prompts() -> None:
    """The KV cache blocks of an adapter are its own, so that computing one prompt does not compute the
    other."""
    plain, tuned = (PromptDigests.compute((adapter, None), b"handshake") for adapter in (None, "tuned"))

    assert plain.whole == tuned.whole
    assert plain.content != tuned.content


LONG = " ".join(f"word{number}" for number in range(4000))


def picked(parts: Parts, text: str) -> PickResult:
    """Return the decision for a prompt."""
    decision = parts.decide(ask(chat(text)))
    assert isinstance(decision, PickResult)
    return decision


def announced(replication: Replication, attempt: Attempt) -> PromptDigests | None:
    """Return what followers will learn of an attempt's prompt."""
    replication.load_server.tick()
    return replication.load_server.digests.get(attempt)


def test_a_prefix_that_another_replica_just_sent_to_an_endpoint_attracts_the_same_prefix() -> None:
    """The endpoint has a larger backlog than the others, but a second copy would cost the whole prefill
    again."""
    other, here, alone = make(), make(), make()
    told, replication, stranger = joined(other), joined(here), joined(alone)
    other.director.request_count = 1
    first = picked(other, LONG)
    [attempt] = other.director.tracker.own()
    prefix = announced(told, attempt)
    assert prefix is not None
    tokens = int(attempt.uncached)
    entry = RemoteRequest(
        1, "other.1", attempt.endpoint, tokens, tokens, attempt.request.tokens, 0.0, 0.0, progressed=False
    )
    tell(replication, 1, msgspec.structs.replace(entry, digests=prefix))
    tell(stranger, 1, entry)

    assert attempt.uncached >= ANNOUNCED_TOKENS
    assert picked(here, LONG + " and more").endpoints[0] == first.endpoints[0]
    assert picked(alone, LONG + " and more").endpoints[0] != first.endpoints[0]
    replication.remote_load.apply("other", LoadUpdate(2, ended_numbers=[1]), here.clock.now)
    assert len(replication.remote_load.prefixes) == 0


def test_a_prompt_that_two_replicas_send_to_an_endpoint_at_once_is_in_its_backlog_once() -> None:
    """Both replicas count the tokens of the prompt once, and none when events report that one request was
    computed."""
    one, other = make(), make()
    replicas = {"one": (one, joined(one)), "other": (other, joined(other))}
    rows: dict[str, RemoteRequest] = {}
    for name, (parts, replication) in replicas.items():
        parts.director.request_count = 1
        picked(parts, LONG)
        [attempt] = parts.director.tracker.own()
        tokens, total = int(attempt.uncached), attempt.request.tokens
        prefix = announced(replication, attempt)
        rows[name] = RemoteRequest(
            1, f"{name}.1", attempt.endpoint, tokens, tokens, total, 0.0, 0.0, False, prefix
        )
    tell(replicas["one"][1], 1, rows["other"])
    tell(replicas["other"][1], 1, rows["one"])
    owed = [parts.director.tracker.backlog(rows["one"].endpoint) for parts, _ in replicas.values()]
    [theirs] = replicas["one"][1].remote_load.replicas["other"].attempts.values()
    one.director.tracker.on_progress(theirs, 0, one.clock.now)

    assert rows["one"].endpoint == rows["other"].endpoint
    assert owed == [rows["one"].uncached] * 2
    assert one.director.tracker.backlog(rows["one"].endpoint) == 0


def test_short_or_known_prompts_are_not_announced() -> None:
    """A prompt that an engine has started is not announced either, because its blocks are in the index
    soon."""
    parts = make()
    replication = joined(parts)
    picked(parts, "handshake")
    [short] = parts.director.tracker.own()
    picked(parts, LONG)
    long = parts.director.tracker.own()[-1]
    assert (announced(replication, short), announced(replication, long) is None) == (None, False)

    picked(parts, LONG + " again")
    started = parts.director.tracker.own()[-1]
    parts.director.table.take_prompt(started.request)
    assert announced(replication, started) is None
