"""Endpoints and endpoint sets: names, addresses, event sources, differences."""

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
    """An IPv6 endpoint has the form ``[v6]:port`` that Envoy expects."""
    assert [endpoint().hostport, endpoint(address="fd00::1").hostport] == ["10.0.0.1:8000", "[fd00::1]:8000"]


def test_each_rank_publishes_on_its_own_ports() -> None:
    """Rank r adds r to both ports, and its publisher is named by pod and rank."""
    both = endpoint(kv_events="tcp://[::1]:5557", kv_replay="tcp://[::1]:5657", ranks=2)

    assert both.sources == (
        KvEventSource("ns/a/0", 0, "tcp://[::1]:5557", "tcp://[::1]:5657"),
        KvEventSource("ns/a/1", 1, "tcp://[::1]:5558", "tcp://[::1]:5658"),
    )


def test_a_pod_uid_names_the_publisher() -> None:
    """A new pod of an old name has another uid and is another publisher."""
    assert endpoint(kv_events="tcp://h:1", uid="u1").sources == (KvEventSource("u1/0", 0, "tcp://h:1", None),)


def test_a_port_of_one_rank_publishes_at_its_rank() -> None:
    """A pod with a port for each rank has an endpoint for each, and no two share a publisher name."""
    first, second = (endpoint(kv_events="tcp://h:10", uid="u", first_rank=n) for n in (0, 1))

    assert first.sources == (KvEventSource("u/0", 0, "tcp://h:10", None),)
    assert second.sources == (KvEventSource("u/1", 1, "tcp://h:11", None),)


def test_an_engine_stays_the_same_whatever_it_may_be_picked_for() -> None:
    """Changed labels and refusals keep the same engine; another uid does not."""
    one = endpoint(uid="u1")

    assert same_engine(one, endpoint(uid="u1", labels={"a": "b"}, refusal="not ready"))
    assert not same_engine(one, endpoint(uid="u2"))
    assert not same_engine(None, one)
    assert EndpointSet((endpoint(uid="u1", refusal="terminating"),)).since(
        EndpointSet((one,))
    ) == EndpointChanges((), ())


def test_no_events_no_sources() -> None:
    """An engine without events has no event sources."""
    assert endpoint(kv_replay="tcp://h:1").sources == ()


@pytest.mark.parametrize(
    ("labels", "expected"),
    [({}, None), ({"kvist.dev/max-num-seqs": "64"}, 64), ({"kvist.dev/max-num-seqs": "many"}, None)],
)
def test_batch_size_comes_from_the_label(labels: dict[str, str], expected: int | None) -> None:
    """``kvist.dev/max-num-seqs`` sets the batch size; nonsense counts as absent."""
    assert endpoint(labels=labels).max_num_seqs == expected


def test_role_comes_from_the_first_known_label() -> None:
    """Our own role label takes precedence over llm-d's; without one the role is ``both``."""
    ours = {"kvist.dev/role": "decode", "llm-d.ai/role": "prefill"}

    assert [endpoint(labels=ours).role, endpoint().role] == ["decode", "both"]


def test_lookups_and_changes() -> None:
    """A set finds endpoints by address and by name, and returns what left and joined since another set."""
    a, b, moved = endpoint("a"), endpoint("b", "10.0.0.2"), endpoint("a", "10.0.0.9")
    old, new = EndpointSet((a, b)), EndpointSet((moved, b))

    assert old.by_hostport("10.0.0.2:8000") is b
    assert old.by_key("ns/a") is a
    assert old.by_key("ns/c") is None
    assert new.since(old) == EndpointChanges((a,), (moved,))
    assert old.since(EndpointSet((a, b))) == EndpointChanges((), ())


@pytest.mark.parametrize("text", ["host", "10.0.0", "[10.0.0.1]", "fe80::1%eth0", "", "[::1"])
def test_only_addresses_are_addresses(text: str) -> None:
    """Host names, zones and bracketed IPv4 are rejected: a proxy could not connect to them."""
    with pytest.raises(ValueError, match=r"zone|not appear"):
        canonical_ip(text)


def test_ipv6_text_is_canonical() -> None:
    """Different notations of one IPv6 address become one."""
    assert [canonical_ip("[0:0::1]"), canonical_ip("FD00:0:0::A")] == ["::1", "fd00::a"]
