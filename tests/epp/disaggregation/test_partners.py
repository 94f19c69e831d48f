"""Which pairs of engines are connected in large pools."""

from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.disaggregation.partners import PARTNERS, wanted_pairs
from kvist_epp.endpoints.endpoint import Endpoint

ROLES = ("prefill", "decode", "both", "encode", "prefill-decode")


def endpoint(name: str, role: str = "both", compatibility: str = "") -> Endpoint:
    """Return an endpoint with these labels."""
    labels = {"kvist.dev/role": role} | (
        {"kvist.dev/kv-compatibility": compatibility} if compatibility else {}
    )
    return Endpoint(name, "ns", "10.0.0.1", 8000, labels)


def able(pool: list[Endpoint]) -> set[tuple[str, str]]:
    """Return all pairs that roles and labels allow."""
    return {
        (one.key, other.key)
        for one in pool
        for other in pool
        if one is not other
        and one.can_prefill
        and other.can_decode
        and one.kv_compatibility == other.kv_compatibility
    }


@st.composite
def pools(draw: st.DrawFn) -> list[Endpoint]:
    """Draw endpoints of any roles and two values of the label."""
    names = draw(st.lists(st.integers(0, 400), unique=True, max_size=60))
    return [endpoint(f"e{n}", draw(st.sampled_from(ROLES)), draw(st.sampled_from("ab"))) for n in names]


@given(pool=pools(), partners=st.integers(1, 9), seed=st.randoms())
def test_each_endpoint_has_a_few_partners(pool: list[Endpoint], partners: int, seed: object) -> None:
    """All pairs are allowed and occur once; an endpoint has so many partners for each leg, or all there are;
    all together are no more than that for each leg; and the order of the endpoints does not matter."""
    found, allowed = wanted_pairs(pool, partners), able(pool)
    assert len(set(found)) == len(found)
    assert set(found) <= allowed
    for at in (0, 1):
        for one in pool:
            own = sum(pair[at] == one.key for pair in found)
            assert own >= min(partners, sum(pair[at] == one.key for pair in allowed))
    legs = sum(one.can_prefill + one.can_decode for one in pool)
    assert len(found) <= partners * legs
    seed.shuffle(pool)  # type: ignore[attr-defined]
    assert wanted_pairs(pool, partners) == found


@given(pool=pools(), partners=st.integers(1, 9), data=st.data())
def test_an_endpoint_that_leaves_changes_its_neighbours_only(
    pool: list[Endpoint], partners: int, data: st.DataObject
) -> None:
    """Without one endpoint all pairs of others stay, and the new ones replace its own."""
    if not pool:
        return
    left = data.draw(st.sampled_from(pool))
    before = wanted_pairs(pool, partners)
    after = wanted_pairs([one for one in pool if one is not left], partners)
    own = [pair for pair in before if left.key in pair]
    assert set(before) - set(own) <= set(after)
    assert len(set(after) - set(before)) <= len(own)


def test_small_pools_are_connected_altogether() -> None:
    """Up to one endpoint more than there are partners, every pair is wanted."""
    pool = [endpoint(f"e{n}") for n in range(PARTNERS + 1)]
    assert set(wanted_pairs(pool)) == able(pool)


def test_the_first_partners_of_all_come_first() -> None:
    """Every endpoint has a partner for either leg before one has two."""
    found = wanted_pairs([endpoint(f"e{n}") for n in range(40)])
    for at in (0, 1):
        assert len({pair[at] for pair in found[:40]}) == 40
