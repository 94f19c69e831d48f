"""Ports in plaintext and over TLS, and the clients that go through them."""

from pathlib import Path

import pytest
from tests.epp.http2.certificates import self_made
from tests.http2.binaries import binary
from tests.http2.clients import Connect, go_client, python_client

from kvist_epp.http2.tls import Certificates

CLIENTS: dict[str, Connect] = {"grpcio": python_client, "grpc-go": go_client}


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    """The tools are there, or the whole tier fails with the way to get them."""
    binary("h2spec")


@pytest.fixture(params=[False, True], ids=["plaintext", "tls"])
def tls(request: pytest.FixtureRequest) -> Certificates | None:
    """The certificates of the port; None: it is plaintext."""
    return self_made() if request.param else None


@pytest.fixture
def authority(tls: Certificates | None, tmp_path: Path) -> Path | None:
    """The PEM file that clients trust."""
    if tls is None:
        return None
    path = tmp_path / "ca.pem"
    path.write_bytes(tls.material.ca)
    return path


@pytest.fixture(params=CLIENTS)
def connect(request: pytest.FixtureRequest) -> Connect:
    """Each client in turn."""
    return CLIENTS[request.param]
