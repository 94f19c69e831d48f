"""TLS between a real Envoy and the picker: who is verified, who is let in, and certificates that change."""

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.data_plane.plane import healthy_pickers
from tests.data_plane.product import CHAT
from tests.data_plane.replicas import NAME, Replicas, replicas
from tests.data_plane.stub import StubPicker, Transport
from tests.epp.http2.certificates import Pki, self_made

from kvist_sim.envoy import Envoy, Gateway, Json, Mode, config
from kvist_sim.envoy_settings import PickerTls
from kvist_sim.launch import HOST

ROTATIONS = 10
STREAMS = 20
HTTP = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def short_connections(settings: Json) -> None:
    """Envoy opens a new connection to the picker after every ten requests."""
    picker = settings["static_resources"]["clusters"][1]
    options = picker["typed_extension_protocol_options"][HTTP]
    options["common_http_protocol_options"] = {"max_requests_per_connection": 10}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("mode", "flags"),
    [
        pytest.param("buffered", (), id="buffered"),
        pytest.param("duplex", ("--observe-responses",), id="observed"),
    ],
)
async def test_ten_rotations_lose_nothing(
    tmp_path: Path, transport: str, mode: Mode, flags: tuple[str, ...]
) -> None:
    """While requests and long streams run, the certificate changes ten times: new connections see each."""
    async with (
        replicas(
            tmp_path,
            transport=transport,
            secure=True,
            count=1,
            more=flags,
            tweak=short_connections,
            mode=mode,
        ) as running,
        running.load() as load,
    ):
        over = asyncio.Event()
        streams = [asyncio.create_task(_streams(running.envoy.url, over)) for _ in range(STREAMS)]
        for _ in range(ROTATIONS):
            chain, key = running.pki.pair(NAME)
            running.secret.write(chain, key, running.pki.pem)
            while await running.shown(0) != chain:
                await asyncio.sleep(0.05)
            await load.more(20)
        over.set()
        ended = await asyncio.gather(*streams)

        assert (load.lost, await running.unpicked()) == ({}, 0)
        assert [set(one) for one in ended] == [{True}] * STREAMS
        assert await _handshakes(running) > ROTATIONS


async def _streams(url: str, over: asyncio.Event) -> list[bool]:
    """Request one long answer after the other until ``over`` is set; return which of them were complete."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "tell me a long story"}],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": True,
    }
    ended = []
    async with aiohttp.ClientSession() as client:
        while not over.is_set():
            async with client.post(f"{url}{CHAT}", json=body) as response:
                content = await response.read()
            ended.append(response.status == 200 and content.rstrip().endswith(b"data: [DONE]"))
    return ended


async def _handshakes(running: Replicas) -> int:
    """Return the number of Envoy's TLS handshakes with the picker; none may have failed."""
    found: dict[str, Any] = await running.envoy.stats(r"cluster\.picker\.ssl\.")
    assert found["cluster.picker.ssl.fail_verify_error"] == found["cluster.picker.ssl.fail_verify_san"] == 0
    return int(found["cluster.picker.ssl.handshake"])


async def test_health_checks_without_alpn(transport: Transport) -> None:
    """Health checks of Envoy offer no ALPN protocol, as in Envoy Gateway: the fast transport takes them for
    HTTP/2 and answers; gRPC's own library refuses."""
    server = await StubPicker().serve(transport, tls=self_made())
    picker = f"{HOST}:{server.port}"
    settings = config(Gateway(endpoints=["127.0.0.1:1"], picker=picker, picker_tls=PickerTls()))
    common = settings["static_resources"]["clusters"][1]["transport_socket"]["typed_config"]
    del common["common_tls_context"]["alpn_protocols"]
    async with Envoy(settings) as envoy:
        while not any(found := await _checked(envoy)):
            await asyncio.sleep(0.05)
        assert [bool(count) for count in found] == [transport == "fast", transport == "grpc"]
    await server.close()


async def _checked(envoy: Envoy) -> list[int]:
    """Health checks of pickers that went well, and those that did not."""
    found = await envoy.stats(r"cluster\.picker\.health_check\.")
    return [int(found[f"cluster.picker.health_check.{name}"]) for name in ("success", "failure")]


async def test_a_self_made_certificate_can_be_verified(tmp_path: Path, transport: str) -> None:
    """Gateways that verify nothing are served, and those that were given its authority, but no others."""
    only = ("--cert-path=", "--tls-names=picker-service")
    async with replicas(
        tmp_path, transport=transport, secure=True, count=1, more=only, picker_tls=PickerTls()
    ) as running:
        async with running.load(1) as load:
            await load.more(5)
        assert (load.lost, await running.unpicked()) == ({}, 0)

        authority = tmp_path / "authority.pem"
        authority.write_bytes(await running.page(0, "/ca.crt"))
        for name in (HOST, "picker-service"):
            async with running.gateway(PickerTls(ca_file=authority, name=name)) as envoy:
                await healthy_pickers(envoy, 1)
        for wrong in ({"ca_file": authority, "name": "another"}, {"ca_file": tmp_path / "ca.pem"}):
            async with running.gateway(PickerTls(**wrong)) as envoy:
                await _refused(envoy)


async def test_mutual_tls(tmp_path: Path, transport: str) -> None:
    """A gateway without a certificate of the right authority is not let in; the authority can be replaced."""
    first, second = Pki("first"), Pki("second")
    authority = tmp_path / "clients.pem"
    authority.write_bytes(first.pem)
    gateways = [_gateway_certificate(tmp_path, pki) for pki in (first, second)]
    more = (f"--client-ca-path={authority}",)
    async with replicas(
        tmp_path, transport=transport, secure=True, count=1, more=more, picker_tls=gateways[0]
    ) as running:
        for stranger in (PickerTls(), gateways[1]):
            async with running.gateway(stranger) as envoy:
                await _refused(envoy)

        authority.write_bytes(second.pem)
        while await running.metric(0, 'kvist_epp_certificate_changes_total{outcome="taken"}') == 0:
            await asyncio.sleep(0.05)
        async with running.gateway(gateways[1]) as envoy:
            await healthy_pickers(envoy, 1)
        async with running.gateway(gateways[0]) as envoy:
            await _refused(envoy)


def _gateway_certificate(folder: Path, pki: Pki) -> PickerTls:
    """A gateway that shows a certificate of this authority."""
    certificate, key = (folder / f"gateway-{id(pki)}.{kind}" for kind in ("crt", "key"))
    for file, content in zip((certificate, key), pki.pair(), strict=True):
        file.write_bytes(content)
    return PickerTls(certificate_file=certificate, key_file=key)


async def _refused(envoy: Envoy) -> None:
    """Wait until Envoy has tried, and failed, to reach the picker."""
    while not (await envoy.stats(r"cluster\.picker\.health_check\.failure")).popitem()[1]:
        await asyncio.sleep(0.05)
    assert (await envoy.stats(r"cluster\.picker\.membership_healthy")).popitem()[1] == 0


async def test_bad_files_are_reported_on_the_pages(tmp_path: Path, transport: str) -> None:
    """A pair that does not fit is shown by /readyz and counted; the picker stays ready and serves the old."""
    async with replicas(tmp_path, transport=transport, secure=True, count=1) as running:
        before = await running.shown(0)
        running.secret.write(running.pki.pair(NAME)[0], running.pki.pair(NAME)[1], running.pki.pem)
        while await running.metric(0, 'kvist_epp_certificate_changes_total{outcome="refused"}') == 0:
            await asyncio.sleep(0.05)

        assert b"warning: " in await running.page(0, "/readyz")
        assert await running.shown(0) == before
        assert await running.metric(0, "kvist_epp_certificate_expiry_timestamp_seconds") > time.time()
