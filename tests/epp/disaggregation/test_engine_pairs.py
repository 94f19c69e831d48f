"""Pairs of engines: which are connected, which are due, and which endpoints rest."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.disaggregation.engine_pairs import MOST_AT_ONCE, RETRY_SECONDS, EnginePairs, rank_pairs
from kvist_epp.disaggregation.partners import wanted_pairs
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.scheduling.pick import Candidate


def candidate(name: str, role: str = "both", compatibility: str = "") -> Candidate:
    """Return an endpoint that is ready."""
    labels = {"kvist.dev/role": role} | (
        {"kvist.dev/kv-compatibility": compatibility} if compatibility else {}
    )
    return Candidate(Endpoint(name, "ns", "10.0.0.1", 8000, labels), EndpointLoad(f"ns/{name}"))


def names(found: list[tuple[Candidate, Candidate]]) -> list[tuple[str, str]]:
    """Return the names of pairs."""
    return [(one.endpoint.name, other.endpoint.name) for one, other in found]


def test_only_pairs_whose_roles_and_labels_allow_it_are_connected() -> None:
    """A prefill endpoint is paired with decode endpoints of the same compatibility, and with no other."""
    pool = [candidate("p", "prefill", "a"), candidate("d", "decode", "a"), candidate("e", "decode", "b")]
    assert names(EnginePairs().to_connect(pool, 0.0)) == [("p", "d")]


def test_an_endpoint_is_in_one_new_pair_at_a_time() -> None:
    """Four fluid endpoints give two pairs first, and the others when those are done, up to the limit."""
    pool, pairs = [candidate(name) for name in "abcd"], EnginePairs()
    first = pairs.to_connect(pool, 0.0)
    assert sorted(name for pair in names(first) for name in pair) == ["a", "b", "c", "d"]
    assert pairs.to_connect(pool, 0.0) == []
    for one, other in first:
        pairs.on_connected((one.endpoint.key, other.endpoint.key), 0.0, good=True)
        assert (one.endpoint.key, other.endpoint.key) in pairs.warm
    assert len(pairs.to_connect(pool, 0.0)) == 2
    for count, most in ((20, MOST_AT_ONCE), (80, 10)):
        assert len(EnginePairs().to_connect([candidate(str(n)) for n in range(count)], 0.0)) == most


def test_all_pairs_are_connected_in_the_end() -> None:
    """Polling until nothing is due connects each ordered pair once."""
    pool, pairs = [candidate(name) for name in "abc"], EnginePairs()
    seen: list[tuple[str, str]] = []
    while due := pairs.to_connect(pool, 0.0):
        seen += names(due)
        for one, other in due:
            pairs.on_connected((one.endpoint.key, other.endpoint.key), 0.0, good=True)
    assert sorted(seen) == sorted((x, y) for x in "abc" for y in "abc" if x != y)


def test_a_pair_that_failed_is_tried_again_later() -> None:
    """A pair that could not be connected is not warm, is counted, and is due again after a while."""
    pool, pairs = [candidate("p", "prefill"), candidate("d", "decode")], EnginePairs()
    pairs.to_connect(pool, 0.0)
    pairs.on_connected(("ns/p", "ns/d"), 1.0, good=False)
    assert (len(pairs.warm), pairs.failures) == (0, 1)
    assert pairs.to_connect(pool, RETRY_SECONDS) == []
    assert len(pairs.to_connect(pool, 1.0 + RETRY_SECONDS)) == 1


def test_a_new_engine_id_is_a_new_engine() -> None:
    """An endpoint whose engine gives another id has to be connected again; the same id changes nothing."""
    pairs = EnginePairs()
    pairs.warm.add("ns/p", "ns/d")
    pairs.warm.add("ns/q", "ns/d")
    pairs.on_prefilled("ns/p", "one")
    pairs.on_prefilled("ns/p", "one")
    pairs.on_prefilled("ns/p", "")
    assert ("ns/p", "ns/d") in pairs.warm
    pairs.on_prefilled("ns/p", "two")
    assert ("ns/p", "ns/d") not in pairs.warm
    assert ("ns/q", "ns/d") in pairs.warm


def test_a_restart_that_events_show_parts_the_pairs() -> None:
    """An endpoint whose events show a restart has met no other engine."""
    pairs = EnginePairs()
    pairs.on_restarts({"ns/p": 0, "ns/d": 3})
    pairs.warm.add("ns/p", "ns/d")
    pairs.on_restarts({"ns/p": 0, "ns/d": 3})
    assert ("ns/p", "ns/d") in pairs.warm
    pairs.on_restarts({"ns/p": 0, "ns/d": 4})
    assert ("ns/p", "ns/d") not in pairs.warm


def test_an_endpoint_that_failed_rests_longer_each_time() -> None:
    """After a failure an endpoint is left out for 5 s, then 10 s, and no longer once it has answered."""
    pairs = EnginePairs()
    pairs.on_failed("ns/p", 0.0)
    assert pairs.resting(4.9) == {"ns/p"}
    assert not pairs.resting(5.0)
    pairs.on_failed("ns/p", 10.0)
    assert pairs.resting(19.0) == {"ns/p"}
    pairs.on_prefilled("ns/p", "e")
    assert not pairs.resting(19.0)


@given(
    data=st.data(),
    count=st.integers(1, 14),
)
def test_every_wanted_pair_is_connected_whatever_happens(data: st.DataObject, count: int) -> None:
    """Endpoints come, go, restart and fail; once they stay, exactly the wanted pairs are connected, an
    endpoint in one at a time."""
    pool, pairs, now = [candidate(str(n)) for n in range(count)], EnginePairs(), 0.0
    for _ in range(data.draw(st.integers(0, 5))):
        some = [one for one in pool if data.draw(st.booleans())]
        for one, other in pairs.to_connect(some, now):
            good = data.draw(st.booleans())
            pairs.on_connected((one.endpoint.key, other.endpoint.key), now, good=good)
        pairs.remove_endpoint(f"ns/{data.draw(st.integers(0, count))}")
        now += 1.0
    now += RETRY_SECONDS
    while due := pairs.to_connect(pool, now):
        keys = [one.endpoint.key for pair in due for one in pair]
        assert len(keys) == len(set(keys))
        for one, other in due:
            pairs.on_connected((one.endpoint.key, other.endpoint.key), now, good=True)
    wanted = wanted_pairs([one.endpoint for one in pool])
    assert all(pair in pairs.warm for pair in wanted)


def test_ranks_are_no_restarts() -> None:
    """Ids of several data-parallel ranks keep an endpoint's pairs; another id of a rank that was seen is a
    restart."""
    pairs = EnginePairs()
    pairs.warm.add("ns/p", "ns/d")
    for engine in ("abc_dp0", "abc_dp1", "abc_dp0", "abc_dp11", ""):
        pairs.on_prefilled("ns/p", engine)
    assert ("ns/p", "ns/d") in pairs.warm

    pairs.on_prefilled("ns/p", "xyz_dp1")
    assert ("ns/p", "ns/d") not in pairs.warm
    pairs.warm.add("ns/p", "ns/d")
    pairs.on_prefilled("ns/p", "xyz_dp0")
    assert ("ns/p", "ns/d") in pairs.warm


def test_every_pair_of_ranks_is_to_be_connected() -> None:
    """Each rank that computes prompts meets each that answers; an endpoint with one rank names none."""
    one, two = candidate("p"), candidate("d")
    wide = Candidate(replace(two.endpoint, ranks=2, first_rank=4), two.load)
    assert rank_pairs(one, two) == [(None, None)]
    assert rank_pairs(one, wide) == [(None, 4), (None, 5)]
    assert rank_pairs(wide, wide) == [(4, 4), (4, 5), (5, 4), (5, 5)]
