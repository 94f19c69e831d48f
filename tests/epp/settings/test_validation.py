"""Flags of the exchange between replicas: names, certificates, intervals."""

from typing import Any

import pytest

from kvist_epp.errors import SettingsError
from kvist_epp.settings.settings import Settings
from kvist_epp.settings.validation import check_replica_flags, parse_host_names, parse_replica_names

IN_CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
CERTIFICATES = "a folder"


def test_peers_are_names_with_ports() -> None:
    """A headless Service, addresses, and IPv6 in brackets are accepted."""
    assert parse_replica_names("") == ()
    assert parse_replica_names("peers.ns.svc:9004, 10.0.0.1:9005,[::1]:9006") == (
        ("peers.ns.svc", 9004),
        ("10.0.0.1", 9005),
        ("::1", 9006),
    )


@pytest.mark.parametrize(
    "text", ["name", "name:", ":9004", "::1:9004", "a:0", "a:70000", "a:9,", "a:x", "[]:1"]
)
def test_an_invalid_list_of_replicas_is_refused(text: str) -> None:
    """The error names the flag and shows what it should look like."""
    with pytest.raises(SettingsError, match="--replicas"):
        Settings(replicas=text)


@pytest.mark.parametrize(
    ("peers", "path", "insecure", "host", "environment", "why"),
    [
        ("", "", False, "", IN_CLUSTER, ""),
        ("127.0.0.1:1,[::1]:2,localhost:3", "", False, "", {}, ""),
        ("127.0.0.1:1", "", False, "", IN_CLUSTER, "--replica-cert-path"),
        ("127.0.0.1:1", "", False, "10.0.0.1", {}, "--replica-cert-path"),
        ("peers.ns.svc:1", "", False, "", {}, "--replica-cert-path"),
        ("peers.ns.svc:1", "", True, "", IN_CLUSTER, ""),
        ("peers.ns.svc:1", CERTIFICATES, False, "", IN_CLUSTER, ""),
        ("peers.ns.svc:1", CERTIFICATES, True, "", IN_CLUSTER, "only one"),
        ("", CERTIFICATES, False, "", {}, "no effect without --replicas"),
    ],
)
def test_plaintext_between_replicas_must_be_requested(
    peers: str, path: str, insecure: bool, host: str, environment: dict[str, str], why: str
) -> None:
    """The index contains prompts, and only the loopback interface is private."""
    if not why:
        check_replica_flags(peers, path, environment, insecure=insecure, host=host)
        return
    with pytest.raises(SettingsError, match=why):
        check_replica_flags(peers, path, environment, insecure=insecure, host=host)


def test_an_interval_longer_than_replicas_may_be_silent_is_refused() -> None:
    """A replica that sends too seldom would appear and disappear at every other replica."""
    with pytest.raises(SettingsError, match="--gossip-interval"):
        Settings(gossip_interval=1.5)


def test_host_names_of_the_live_page_are_plain() -> None:
    """Names are read without regard to case and a final dot."""
    assert parse_host_names("Kvist.example.com., picker ,") == ("kvist.example.com", "picker")
    assert parse_host_names("") == ()


@pytest.mark.parametrize("text", ["http://a.example", "a.example:80", "a b", "ä.example", "*"])
def test_an_invalid_host_name_is_refused(text: str) -> None:
    """Addresses with a scheme or port, wildcards and other alphabets are refused with an example."""
    with pytest.raises(SettingsError, match="--live-page-hosts"):
        Settings(live_page_hosts=text)


@pytest.mark.parametrize(
    ("flag", "more"),
    [
        ("--gpu-hour-price", {"gpu_hour_price": 2.5}),
    ],
)
def test_settings_of_a_page_that_is_off_are_refused(flag: str, more: dict[str, Any]) -> None:
    """A flag without effect is named when the picker starts."""
    with pytest.raises(SettingsError, match=f"{flag}: has no effect with --live-page=false"):
        Settings(endpoints_file="x", live_page=False, **more).check()


def test_a_price_is_not_negative_and_an_endpoint_has_a_gpu() -> None:
    """Numbers that make no sense are refused."""
    with pytest.raises(SettingsError, match="--gpu-hour-price"):
        Settings(gpu_hour_price=-1.0)
    with pytest.raises(SettingsError, match="--gpus-per-endpoint"):
        Settings(gpus_per_endpoint=0)


@pytest.mark.parametrize("more", [{"live_page_hosts": "a.example"}, {"gpus_per_endpoint": 8}])
def test_a_page_that_is_off_refuses_nothing_that_has_another_use(more: dict[str, Any]) -> None:
    """The names are those of /debug, too, and the operator sets the number of GPUs in any case."""
    Settings(endpoints_file="x", live_page=False, **more).check()
