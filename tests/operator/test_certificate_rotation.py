"""The pickers' certificate can be verified by its peers at any moment of a renewal."""

import ssl
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.manifested import one, rendered

from kvist_operator.manifests.object_names import ObjectNames
from kvist_operator.reconcile.certificate_rotation import (
    LIFE,
    OVERLAP,
    CertificateBundle,
    Data,
    due,
    issued,
    names_of,
)

NAMES = names_of(ObjectNames("twig", "forest"))
SERVICE, PEERS = NAMES
NOW = datetime.now(UTC)
"""OpenSSL uses the machine's clock, so histories end now."""
DAY = timedelta(days=1)


def context(side: int, data: Data, authorities: bytes) -> ssl.SSLContext:
    """Return one side of mutual TLS, as strict as OpenSSL can be."""
    made = ssl.SSLContext(side)
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=authorities.decode())
    with TemporaryDirectory() as folder:
        path = Path(folder, "pair.pem")
        path.write_bytes(data["tls.key"] + data["tls.crt"])
        made.load_cert_chain(path)
    return made


def shake(server: ssl.SSLObject, client: ssl.SSLObject, wires: Sequence[ssl.MemoryBIO]) -> None:
    """Run a handshake in memory. Raises ssl.SSLError."""
    to_server, from_server, to_client, from_client = wires
    for _ in range(4):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            finally:
                to_server.write(from_client.read())
                to_client.write(from_server.read())
    client.do_handshake()
    server.do_handshake()


def meet(server: Data, client: Data, name: str = PEERS, authorities: bytes = b"") -> None:
    """Connect a client with these files to a server with those. Raises ssl.SSLError."""
    wires = [ssl.MemoryBIO() for _ in range(4)]
    listens = context(ssl.PROTOCOL_TLS_SERVER, server, server["ca.crt"])
    asks = context(ssl.PROTOCOL_TLS_CLIENT, client, authorities or client["ca.crt"])
    shake(
        listens.wrap_bio(wires[0], wires[1], server_side=True),
        asks.wrap_bio(wires[2], wires[3], server_hostname=name),
        wires,
    )


def acted(times: Sequence[datetime]) -> Iterator[tuple[datetime, CertificateBundle]]:
    """Return what an operator has written by reconciling at these times."""
    data: Mapping[str, bytes] | None = None
    for moment in times:
        if due(data, NAMES, moment):
            bundle = issued(NAMES, moment, data)
            data = bundle.secret
            yield moment, bundle


def lately(written: Sequence[tuple[datetime, CertificateBundle]], since: datetime) -> list[CertificateBundle]:
    """Return the files of a pod that receives updates this late."""
    newer = [bundle for moment, bundle in written if moment > since]
    older = [bundle for moment, bundle in written if moment <= since]
    return [*older[-1:], *newer]


# announcing and promoting have a third of the life: an operator that is away for two months is in time
GAPS = st.lists(
    st.one_of(
        st.timedeltas(timedelta(minutes=1), OVERLAP), st.timedeltas(timedelta(minutes=1), LIFE / 6 - 2 * DAY)
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(GAPS)
def test_pods_with_files_of_any_day_verify_each_other(gaps: list[timedelta]) -> None:
    """Old and new pickers accept each other, and Envoy knows both, whenever the operator reconciled."""
    times = [NOW - sum(gaps[i:], timedelta()) for i in range(len(gaps))]
    known = lately(list(acted([*times, NOW])), NOW - OVERLAP)

    for server in known:
        for client in known:
            meet(server.secret, client.secret)
            meet(server.secret, client.secret, SERVICE, client.authorities)


def history() -> list[CertificateBundle]:
    """Return the three contents: made, announced, and promoted now."""
    spent = NOW - OVERLAP
    found = [bundle for _, bundle in acted([spent - LIFE * 2 / 3, spent, NOW])]
    assert len(found) == 3
    return found


def test_a_renewal_is_announced_before_it_is_shown() -> None:
    """The next certificate is announced for a day, then it replaces the old one."""
    first, second, third = history()

    assert second.secret["tls.crt"] == first.secret["tls.crt"]
    assert second.authorities.count(b"BEGIN") == 2
    assert (third.secret["tls.crt"], third.secret["tls.key"]) == (
        second.secret["next.crt"],
        second.secret["next.key"],
    )
    assert sorted(third.secret) == ["ca.crt", "tls.crt", "tls.key"]
    assert first.authorities in third.authorities


def test_skipping_the_announcement_would_break_what_runs() -> None:
    """A picker with the first files does not know the third certificate's authority: hence the two steps."""
    first, _, third = history()

    with pytest.raises(ssl.SSLError):
        meet(third.secret, first.secret)


def test_nothing_is_due_in_between() -> None:
    """Between rotations, issuing again returns the unchanged content."""
    [first] = [bundle for _, bundle in acted([NOW])]

    assert due(first.secret, NAMES, NOW + LIFE / 2) == ""
    assert issued(NAMES, NOW + LIFE / 2, first.secret).secret == first.secret
    announced = issued(NAMES, NOW + LIFE * 0.7, first.secret).secret
    assert due(announced, NAMES, NOW + LIFE * 0.7 + OVERLAP / 2) == ""


def other() -> Data:
    """Return the files of another pool."""
    return issued(("oak-epp.forest.svc",), NOW).secret


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tls.crt": b""}, "tls.crt or tls.key cannot be read"),
        ({"tls.crt": b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"}, "cannot be read"),
        ({"tls.key": b"nothing"}, "tls.crt or tls.key cannot be read"),
        ({"tls.key": other()["tls.key"]}, "tls.key is not the key of tls.crt"),
        ({"ca.crt": b"nothing"}, "ca.crt has no authority that signed tls.crt"),
        ({"ca.crt": other()["ca.crt"]}, "ca.crt has no authority that signed tls.crt"),
        (other(), "tls.crt is not valid for twig-epp-peers.forest.svc, twig-epp.forest.svc"),
    ],
)
def test_what_cannot_be_used_is_replaced_at_once(changes: Data, why: str) -> None:
    """Any damage is detected, named and repaired in one step."""
    damaged = {**issued(NAMES, NOW).secret, **changes}

    assert why in due(damaged, NAMES, NOW)
    mended = issued(NAMES, NOW, damaged).secret
    assert due(mended, NAMES, NOW) == ""
    meet(mended, mended)


@pytest.mark.parametrize("missing", ["tls.crt", "tls.key"])
def test_a_missing_key_of_the_secret_is_named(missing: str) -> None:
    """Each missing key is named."""
    data = {name: value for name, value in issued(NAMES, NOW).secret.items() if name != missing}

    assert due(data, NAMES, NOW) == f"{missing} is missing"
    assert due({}, NAMES, NOW) == due(None, NAMES, NOW) == "there is no certificate yet"


def test_an_expired_certificate_makes_way_at_once() -> None:
    """A broken certificate is replaced by the announced one if there is one; a clock set back is harmless."""
    _, announced, _ = history()
    late = NOW + LIFE / 2
    assert "tls.crt expired" in due(announced.secret, NAMES, late)
    assert issued(NAMES, late, announced.secret).secret["tls.crt"] == announced.secret["next.crt"]

    first = issued(NAMES, NOW).secret
    assert "tls.crt expired" in due(first, NAMES, NOW + LIFE)
    assert issued(NAMES, NOW + LIFE, first).authorities.count(b"BEGIN") == 1
    assert "not valid before" in due(first, NAMES, NOW - DAY)
    assert due(first, NAMES, NOW - timedelta(minutes=30)) == ""


def test_a_damaged_successor_is_made_again() -> None:
    """A broken announced certificate is replaced without a change of the current one."""
    _, announced, _ = history()
    damaged = {**announced.secret, "next.key": b"nothing"}

    assert "next.crt or next.key cannot be read" in due(damaged, NAMES, NOW)
    again = issued(NAMES, NOW, damaged).secret
    assert again["tls.crt"] == announced.secret["tls.crt"]
    assert again["next.crt"] != announced.secret["next.crt"]
    assert due(again, NAMES, NOW) == ""


def test_a_secret_that_is_damaged_for_ever_does_not_grow() -> None:
    """A Secret that is damaged again and again keeps the newest few authorities."""
    data = issued(NAMES, NOW).secret
    for _ in range(12):
        data = issued(NAMES, NOW, {**data, "tls.key": b""}).secret

    assert data["ca.crt"].count(b"BEGIN") == 4
    meet(data, data)


def test_no_authority_can_be_made_use_of_again() -> None:
    """The Secret has no authority's key, and the keys that it has can sign no certificate."""
    _, announced, _ = history()
    leaves = [x509.load_pem_x509_certificate(announced.secret[name]) for name in ("tls.crt", "next.crt")]

    assert sum(value.count(b"PRIVATE KEY") for value in announced.secret.values()) == 2 * len(leaves)
    for leaf in leaves:
        assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert {name._name for name in usage} == {"serverAuth", "clientAuth"}
    assert "PRIVATE" not in repr(announced)


def test_the_names_are_those_that_pods_look_for() -> None:
    """The certificate has the names by which replicas and Envoy address pickers."""
    picker = one(rendered("agents"), "Deployment", "twig-epp")["spec"]["template"]["spec"]["containers"][0]
    [peers] = [word for word in picker["args"] if word.startswith("--peers=")]
    envoy = one(rendered("agents"), "ConfigMap", "twig-envoy")["data"]["authority.json"]

    assert peers.removeprefix("--peers=").rpartition(":")[0] == PEERS
    assert f'"exact": "{SERVICE}"' in envoy
