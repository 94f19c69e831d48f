"""A real Envoy accepts the generated configuration, and shuts down without cutting an answer."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.operator.manifested import one, rendered

from kvist_epp.http2.tls import AUTHORITY_LIFETIME
from kvist_kube.certificates import CertificateAuthority
from kvist_operator.manifests.bootstrap import AUTHORITY_FOLDER, CONFIG_FOLDER
from kvist_operator.manifests.object_names import ADMIN_PORT, HTTP_PORT, STATUS_PORT
from kvist_sim import envoy as simulated
from kvist_sim.envoy import find_envoy
from kvist_sim.ports import free_ports
from kvist_sim.processes import Child, Children


def files(case: str = "agents", **spec: Any) -> dict[str, str]:
    """Return the data of the ConfigMap."""
    found: dict[str, str] = one(rendered(case, **spec), "ConfigMap", "twig-envoy")["data"]
    return found


def config(**spec: Any) -> dict[str, Any]:
    """Return Envoy's bootstrap configuration."""
    found: dict[str, Any] = json.loads(files(**spec)["envoy.json"])
    return found


def written(folder: Path, data: dict[str, str], ports: dict[int, int]) -> Path:
    """Write the files of a pod with this folder and these ports instead, and engines on the loopback."""
    (folder / "ca.crt").write_text(authority())
    for name, text in data.items():
        for path in (CONFIG_FOLDER, AUTHORITY_FOLDER):
            text = text.replace(path, str(folder))
        for number, local in ports.items():
            text = re.sub(rf'("port_value": |127\.0\.0\.1/){number}\b', rf"\g<1>{local}", text)
        (folder / name).write_text(text)
    return folder / "envoy.json"


def authority() -> str:
    """Return a certificate that Envoy can load."""
    return CertificateAuthority("test", datetime.now(UTC), AUTHORITY_LIFETIME).pem.decode()


@pytest.mark.parametrize(
    ("case", "spec"),
    [
        ("agents", {}),
        ("agents", {"gateway": {"mode": "Envoy", "failureMode": "FailOpen"}}),
        ("no-picker", {}),
        ("traced", {}),
    ],
    ids=["fail-close", "fail-open", "no-picker", "traced"],
)
async def test_a_real_envoy_takes_the_configuration(tmp_path: Path, case: str, spec: Any) -> None:
    """``envoy --mode validate`` reports no error and no deprecated field."""
    path = written(tmp_path, files(case, **spec), {})
    process = await asyncio.create_subprocess_exec(
        *(find_envoy(), "--mode", "validate", "-c", str(path), "--log-level", "warning"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 60)

    assert process.returncode == 0, said.decode()
    assert b"deprecated" not in said.lower(), said.decode()


def test_it_asks_the_picker_as_the_tested_configuration_does() -> None:
    """The filter, the clusters and the access log equal those that the data-plane suite runs."""
    ours, tested = (
        config(),
        simulated.config(simulated.Gateway(endpoints=["10.0.0.1:8000"], picker="10.0.0.2:9002")),
    )
    own, other = manager(ours), manager(tested)

    assert filtered(own) == filtered(other) | {
        "failure_mode_allow": False,
        "status_on_error": {"code": "ServiceUnavailable"},
    }
    assert own["access_log"] == other["access_log"]
    assert own["route_config"] == other["route_config"]
    for name in ("circuit_breakers", "typed_extension_protocol_options", "connect_timeout"):
        assert [c[name] for c in clusters(ours)] == [c[name] for c in clusters(tested)]
    picker, checked = clusters(ours)[1], clusters(tested)[1]
    assert picker["health_checks"] == checked["health_checks"]
    assert picker["common_lb_config"] == checked["common_lb_config"]
    sources = "typed_extension_config", "typed_config", "override_host_sources"
    assert _deep(policy(ours), *sources) == _deep(policy(tested), *sources)


def test_a_pool_with_tracing_traces_the_fraction_it_asks_for() -> None:
    """Envoy has a tracer only if the pool asks for one, and exports over gRPC to the collector's address."""
    made = json.loads(files("traced")["envoy.json"])
    found = manager(made)["tracing"]
    assert (found["random_sampling"], found["spawn_upstream_span"]) == ({"value": 5}, True)
    assert found["provider"]["typed_config"]["service_name"] == "twig-envoy"
    [collector] = [c for c in made["static_resources"]["clusters"] if c["name"] == "collector"]
    [endpoint] = collector["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert endpoint["endpoint"]["address"]["socket_address"] == {
        "address": "collector.observability",
        "port_value": 4317,
    }
    assert "http2_protocol_options" in json.dumps(collector)
    assert "tracing" not in manager(config())


def manager(document: dict[str, Any]) -> dict[str, Any]:
    """Return the HTTP connection manager of the first listener."""
    listener = document["static_resources"]["listeners"][0]
    found: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def filtered(found: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the ext_proc filter, with times as numbers."""
    settings: dict[str, Any] = found["http_filters"][0]["typed_config"]
    return settings


def clusters(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the clusters of engines and pickers."""
    found = {c["name"]: c for c in document["static_resources"]["clusters"]}
    return [found["pool"], found["picker"]]


def policy(document: dict[str, Any]) -> dict[str, Any]:
    """Return the policy by which Envoy chooses an engine."""
    found: dict[str, Any] = clusters(document)[0]["load_balancing_policy"]["policies"][0]
    return found


def _deep(found: Any, *keys: str) -> Any:
    for key in keys:
        found = found[key]
    return found


def test_clients_cannot_name_an_engine() -> None:
    """The picker's header is removed from requests before any filter, which matters while no picker
    answers."""
    [cleaning] = manager(config())["early_header_mutation_extensions"]

    assert {"remove": "x-gateway-destination-endpoint"} in cleaning["typed_config"]["mutations"]


class Engine:
    """An upstream whose answers wait until the test releases them."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.go = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello")
        self.asked.set()
        await self.go.wait()
        writer.write(b"world")
        await writer.drain()
        writer.close()


@asynccontextmanager
async def running(folder: Path, engine: Engine) -> AsyncIterator[tuple[Child, dict[int, int]]]:
    """Run an Envoy of the no-picker pool in front of this engine; yield the ports that replace its own."""
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    numbers = (HTTP_PORT, STATUS_PORT, ADMIN_PORT)
    ports = dict(zip(numbers, free_ports(3), strict=True)) | {8000: server.sockets[0].getsockname()[1]}
    data = {
        name: text.replace("twig-engines.forest.svc", "localhost")
        for name, text in files("no-picker").items()
    }
    path = written(folder, data, ports)
    argv = [
        find_envoy(),
        "-c",
        str(path),
        "--concurrency",
        "1",
        "--log-level",
        "warning",
        "--disable-hot-restart",
    ]
    try:
        async with Children(folder) as children:
            child = children.start("envoy", argv)

            async def ready() -> bool:
                return b" 200 " in await got(ports[STATUS_PORT], "/ready")

            await children.ready(child, ready, 20)
            yield child, ports
    finally:
        server.close()
        await server.wait_closed()


async def got(port: int, path: str) -> bytes:
    """Return the raw answer to a GET; empty while no process listens."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return b""
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_the_drain_waits_for_the_last_answer(tmp_path: Path) -> None:
    """preStop ends only when no request is in flight; meanwhile the pod reports that it is draining, and its
    metrics can be read."""
    engine = Engine()
    async with running(tmp_path, engine) as (child, ports):
        request = asyncio.create_task(got(ports[HTTP_PORT], "/v1/models"))
        await asyncio.wait_for(engine.asked.wait(), 20)
        drain = await asyncio.create_subprocess_exec("bash", str(tmp_path / "drain.sh"))
        try:
            while b" 503 " not in await got(ports[STATUS_PORT], "/ready"):
                await asyncio.sleep(0.05)
            metrics = await got(ports[STATUS_PORT], "/stats/prometheus")
            assert b"envoy_http_downstream_rq_active" in metrics
            assert b" 404 " in await got(ports[STATUS_PORT], "/quitquitquit")
            assert drain.returncode is None
            engine.go.set()
            assert (await asyncio.wait_for(request, 20)).endswith(b"helloworld")
            assert await asyncio.wait_for(drain.wait(), 30) == 0
        finally:
            if drain.returncode is None:
                drain.kill()
                await drain.wait()
        assert child.running()
