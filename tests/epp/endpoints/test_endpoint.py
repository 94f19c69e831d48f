"""The fleet snapshot: names, addresses, where ranks publish, what changed."""

import pytest

from kvist_epp.endpoints.endpoint import (
    Endpoint,
    EndpointChanges,
    EndpointSet,
    KvEventSource,
    canonical_ip,
    same_engine,
)


def endpoint(name: str = "a", address: str = "10.0.0.1", **more: object) -> Endpoint:
    return Endpoint(name, "ns", address, 8000, **more)  # type: ignore[arg-type]


def test_hostport_brackets_ipv6() -> None:
    """An IPv6 endpoint is answered as ``[v6]:port``, as Envoy wants it."""
    assert [endpoint().hostport, endpoint(address="fd00::1").hostport] == ["10.0.0.1:8000", "[fd00::1]:8000"]


def test_each_rank_publishes_on_its_own_ports() -> None:
    """Rank r adds r to both ports, and its publisher is named by pod and rank."""
    both = endpoint(kv_events="tcp://[::1]:5557", kv_replay="tcp://[::1]:5657", ranks=2)

    assert both.sources == (
        KvEventSource("ns/a/0", 0, "tcp://[::1]:5557", "tcp://[::1]:5657"),
        KvEventSource("ns/a/1", 1, "tcp://[::1]:5558", "tcp://[::1]:5658"),
    )


def test_a_pod_uid_names_the_publisher() -> None:
    """A pod that comes back under its old name with another uid is another publisher."""
    assert endpoint(kv_events="tcp://h:1", uid="u1").sources == (KvEventSource("u1/0", 0, "tcp://h:1", None),)


def test_a_port_of_one_rank_publishes_at_its_rank() -> None:
    """A pod with a port per rank has an endpoint for each, and no two of them publish under one name."""
    first, second = (endpoint(kv_events="tcp://h:10", uid="u", first_rank=n) for n in (0, 1))

    assert first.sources == (KvEventSource("u/0", 0, "tcp://h:10", None),)
    assert second.sources == (KvEventSource("u/1", 1, "tcp://h:11", None),)


def test_an_engine_stays_the_same_whatever_it_may_be_picked_for() -> None:
    """Labels and objections change nothing about what is known of an engine; another uid does."""
    one = endpoint(uid="u1")

    assert same_engine(one, endpoint(uid="u1", labels={"a": "b"}, refusal="not ready"))
    assert not same_engine(one, endpoint(uid="u2"))
    assert not same_engine(None, one)
    assert EndpointSet((endpoint(uid="u1", refusal="terminating"),)).since(
        EndpointSet((one,))
    ) == EndpointChanges((), ())


def test_no_events_no_sources() -> None:
    """An engine without events has nothing to subscribe to."""
    assert endpoint(kv_replay="tcp://h:1").sources == ()


@pytest.mark.parametrize(
    ("labels", "expected"),
    [({}, None), ({"kvist.dev/max-num-seqs": "64"}, 64), ({"kvist.dev/max-num-seqs": "many"}, None)],
)
def test_batch_size_comes_from_the_label(labels: dict[str, str], expected: int | None) -> None:
    """``kvist.dev/max-num-seqs`` tells the batch size; nonsense counts as absent."""
    assert endpoint(labels=labels).max_num_seqs == expected


def test_role_comes_from_the_first_known_label() -> None:
    """Our own role label wins over llm-d's; without one a pod does both."""
    ours = {"kvist.dev/role": "decode", "llm-d.ai/role": "prefill"}

    assert [endpoint(labels=ours).role, endpoint().role] == ["decode", "both"]


def test_lookups_and_changes() -> None:
    """A snapshot finds endpoints by address and by name, and tells what left and what joined since
    another."""
    a, b, moved = endpoint("a"), endpoint("b", "10.0.0.2"), endpoint("a", "10.0.0.9")
    old, new = EndpointSet((a, b)), EndpointSet((moved, b))

    assert old.by_hostport("10.0.0.2:8000") is b
    assert old.by_key("ns/a") is a
    assert old.by_key("ns/c") is None
    assert new.since(old) == EndpointChanges((a,), (moved,))
    assert old.since(EndpointSet((a, b))) == EndpointChanges((), ())


@pytest.mark.parametrize("text", ["host", "10.0.0", "[10.0.0.1]", "fe80::1%eth0", "", "[::1"])
def test_only_addresses_are_addresses(text: str) -> None:
    """Names, zones and bracketed IPv4 are refused: a proxy could not connect to them."""
    with pytest.raises(ValueError, match=r"zone|not appear"):
        canonical_ip(text)


def test_ipv6_text_is_canonical() -> None:
    """Spellings of one IPv6 address become one."""
    assert [canonical_ip("[0:0::1]"), canonical_ip("FD00:0:0::A")] == ["::1", "fd00::a"]
