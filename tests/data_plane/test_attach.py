"""The configurations that docs/guides/attach-envoy.md and examples/03-plain-envoy give away, run as they are
but for addresses and ports."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from tests import docs
from tests.data_plane.plane import Tweak, connection_manager, ext_proc, healthy_pickers
from tests.data_plane.stub import StubPicker
from tests.data_plane.upstream import Upstream
from tests.epp.http2.certificates import self_made

from kvist_epp.http2.call import Server
from kvist_epp.http2.tls import AUTHORITY_LIFETIME
from kvist_epp.names import DESTINATION_HEADER
from kvist_kube.certificates import CertificateAuthority
from kvist_operator.manifests.bootstrap import AUTHORITY_FOLDER, CONFIG_FOLDER
from kvist_sim.envoy import Envoy

PATH = "/v1/completions"
NOBODY = "127.0.0.1:1"
FORMS = pytest.mark.parametrize("file", [docs.ENVOY, docs.ORIGINAL_DST], ids=lambda file: file.stem)


@dataclass
class Attached:
    """A guide's Envoy between a client, a picker of the test's with its own certificate, and two engines."""

    client: aiohttp.ClientSession
    envoy: Envoy
    picker: StubPicker
    server: Server
    engines: tuple[Upstream, Upstream]

    async def ask(self, **headers: str) -> tuple[int, str]:
        """Status and text of a request; an engine's text is its address."""
        async with self.client.post(PATH, data=b"the body", headers=headers) as response:
            return response.status, await response.text()

    async def lose_the_picker(self) -> None:
        """Stop the picker and wait until Envoy's health check has noticed."""
        await self.server.close()
        await healthy_pickers(self.envoy, 0)


@asynccontextmanager
async def attached(file: Path, tweak: Tweak = lambda _: None) -> AsyncIterator[Attached]:
    """The configuration of a file; the picker names the second engine."""
    async with Upstream() as first, Upstream() as second:
        picker = StubPicker()
        picker.picks(second.address)
        server = await picker.serve("fast", tls=self_made())
        settings = moved(file, (first.address, second.address), f"127.0.0.1:{server.port}")
        tweak(settings)
        async with Envoy(settings) as envoy, aiohttp.ClientSession(envoy.url) as client:
            await healthy_pickers(envoy, 1)
            yield Attached(client, envoy, picker, server, (first, second))
        await server.close()


def moved(file: Path, engines: tuple[str, str], picker: str) -> Any:
    """A guide's configuration with other addresses."""
    text = file.read_text()
    for told, real in (
        (("10.0.0.1", 8000), engines[0]),
        (("10.0.0.2", 8000), engines[1]),
        (("127.0.0.1", 9002), picker),
        (("127.0.0.1", 8080), "127.0.0.1:0"),
    ):
        host, _, port = real.rpartition(":")
        was = rf"address: {told[0]}\n( +)port_value: {told[1]}\n"
        text = re.sub(was, rf"address: {host}\n\g<1>port_value: {port}\n", text)
    return yaml.safe_load(text)


def failing(*, is_open: bool) -> Tweak:
    """Let Envoy pass requests (open) or fail them (closed) when there is no picker."""

    def change(settings: Any) -> None:
        ext_proc(settings)["failure_mode_allow"] = is_open

    return change


@FORMS
async def test_requests_go_where_the_picker_says(file: Path) -> None:
    """The picker's choice holds whatever endpoint the client names; the body arrives whole, and the end is
    reported to the picker."""
    async with attached(file) as running:
        first, second = running.engines
        for _ in range(3):
            assert await running.ask(**{DESTINATION_HEADER: first.address}) == (200, second.address)
        ended = await running.picker.reports(3)

        assert [request.body for request in second.received] == [b"the body"] * 3
        assert [ask.body for ask in running.picker.asks] == [b"the body"] * 3
        assert {one.status for one in ended} == {200}


async def test_a_dead_endpoint_costs_no_request() -> None:
    """The next of the picker's list gets it."""
    async with attached(docs.ENVOY) as running:
        second = running.engines[1].address
        running.picker.picks(NOBODY, second)
        assert await running.ask() == (200, second)
        await running.engines[1].stop()
        running.picker.picks(second, running.engines[0].address)
        assert await running.ask() == (200, running.engines[0].address)


async def test_original_dst_understands_one_endpoint_alone() -> None:
    """A list is no address to it: which is why the guide has the picker name one."""
    async with attached(docs.ORIGINAL_DST) as running:
        running.picker.picks(running.engines[1].address, running.engines[0].address)
        status, _ = await running.ask()
        assert status == 503


async def test_a_dead_picker_means_plain_balancing_where_it_fails_open() -> None:
    """All engines get their share, and a client's own word on the endpoint does not count."""
    async with attached(docs.ENVOY) as running:
        await running.lose_the_picker()
        first, second = (engine.address for engine in running.engines)
        answers = [await running.ask(**{DESTINATION_HEADER: first}) for _ in range(4)]

        assert sorted(answers) == sorted([(200, first), (200, second)] * 2)


async def test_a_dead_picker_means_503_where_it_fails_closed() -> None:
    """Nothing passes, whatever the client says."""
    async with attached(docs.ENVOY, failing(is_open=False)) as running:
        await running.lose_the_picker()
        status, _ = await running.ask(**{DESTINATION_HEADER: running.engines[0].address})

        assert status == 503
        assert [engine.received for engine in running.engines] == [[], []]


@pytest.mark.parametrize("is_open", [True, False])
async def test_original_dst_cannot_fail_open(is_open: bool) -> None:
    """Without a pick there is no address to go to, and the client's is not taken."""
    async with attached(docs.ORIGINAL_DST, failing(is_open=is_open)) as running:
        await running.lose_the_picker()
        status, _ = await running.ask(**{DESTINATION_HEADER: running.engines[0].address})

        assert status == 503
        assert [engine.received for engine in running.engines] == [[], []]


async def test_envoy_takes_the_third_example(tmp_path: Path) -> None:
    """The ConfigMap's files, from a folder of the test's: Envoy starts and says it is ready."""
    data = yaml.safe_load(docs.EDGE.read_text())["data"]
    authority = CertificateAuthority("test", datetime.now(UTC), AUTHORITY_LIFETIME)
    (tmp_path / "ca.crt").write_text(authority.pem.decode())
    for name, text in data.items():
        for folder in (CONFIG_FOLDER, AUTHORITY_FOLDER):
            text = text.replace(folder, str(tmp_path))
        (tmp_path / name).write_text(re.sub(r"port_value: (8080|8081|9901)\b", "port_value: 0", text))
    settings = yaml.safe_load((tmp_path / "envoy.yaml").read_text())

    assert json.loads((tmp_path / "authority.json").read_text())["resources"]
    assert connection_manager(settings)["access_log"]
    async with Envoy(settings) as envoy:
        assert envoy.port > 0
