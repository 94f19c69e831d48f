"""The picker's process: its health on both ports, how it says why it is not ready, and how it ends."""

import asyncio
import functools
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest
from tests.data_plane.stub import Transport
from tests.data_plane.upstream import Upstream
from tests.epp.extproc import messages

from kvist_epp.names import LIVENESS, PROCESS_METHOD, READINESS
from kvist_sim.http1 import answers, get
from kvist_sim.launch import HOST, PickerPorts, picker_ports
from kvist_sim.processes import Child, Children

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
NAMES = (LIVENESS, *READINESS)
METRICS = b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"
NO_ENDPOINTS = '{"endpoints": []}'
CRASHING = """
import asyncio, pathlib, sys, kvist_epp.app.app as serving, kvist_epp.__main__ as command
file = pathlib.Path(sys.argv[1].partition("=")[2])
async def fail(*_):
    while file.exists():
        await asyncio.sleep(0.02)
    raise RuntimeError("a bug")
serving._tick = fail
raise SystemExit(command.main())
"""


@dataclass
class Process:
    """One picker and clients for its two gRPC ports."""

    child: Child
    ports: PickerPorts
    main: Any
    """gRPC's health client on the ext_proc port, over TLS; ``health``: on the health port."""
    health: Any
    channel: Any

    async def page(self, path: str) -> tuple[int, str]:
        """Status and text of a page of the metrics port."""
        status, content = await get(HOST, self.ports.metrics, path)
        return status, content.decode()

    async def ends(self) -> int:
        """Wait for its exit code."""
        return await asyncio.to_thread(self.child.process.wait, 60)

    async def told(self) -> None:
        """SIGTERM, and wait until it shows."""
        self.child.process.send_signal(signal.SIGTERM)
        while await _status(self.health, "readiness") != NOT_SERVING:
            await asyncio.sleep(0.02)


@asynccontextmanager
async def picker(
    folder: Path,
    transport: Transport,
    *flags: str,
    endpoints: str = NO_ENDPOINTS,
    path: str = "/readyz",
    program: Sequence[str] = (sys.executable, "-m", "kvist_epp"),
) -> AsyncIterator[Process]:
    """A picker that answers on ``path``, over TLS with a certificate of its own."""
    file = folder / "endpoints.yaml"
    if endpoints:
        file.write_text(endpoints)
    ports = picker_ports()
    command = [
        *(*program, f"--endpoints-file={file}", f"--transport={transport}", f"--host={HOST}"),
        *(f"--grpc-port={ports.grpc}", f"--grpc-health-port={ports.health}"),
        *(f"--metrics-port={ports.metrics}", "--drain-delay=0", *flags),
    ]
    async with Children(folder) as children:
        child = children.start("picker", command)
        await children.ready(child, functools.partial(answers, HOST, ports.metrics, path), 60)
        _, authority = await get(HOST, ports.metrics, "/ca.crt")
        credentials = grpc.ssl_channel_credentials(authority)
        async with (
            grpc.aio.secure_channel(f"{HOST}:{ports.grpc}", credentials) as main,
            grpc.aio.insecure_channel(f"{HOST}:{ports.health}") as health,
        ):
            stubs = [health_pb2_grpc.HealthStub(channel) for channel in (main, health)]
            yield Process(child, ports, stubs[0], stubs[1], main)


async def _status(stub: Any, name: str) -> int:
    answer = await stub.Check(HealthCheckRequest(service=name))
    return int(answer.status)


# -- health


async def test_five_names_on_both_ports(tmp_path: Path, transport: Transport) -> None:
    """gRPC's own health client gets Check, List and Watch, over TLS on one port, plaintext on the other."""
    async with picker(tmp_path, transport) as process:
        for stub in (process.main, process.health):
            assert [await _status(stub, name) for name in NAMES] == [SERVING] * 5
            found = await stub.List(HealthListRequest())
            assert {name: one.status for name, one in found.statuses.items()} == dict.fromkeys(NAMES, SERVING)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await _status(stub, "nobody")
            assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_draining_is_reported_at_once_on_both_ports(tmp_path: Path, transport: Transport) -> None:
    """On SIGTERM health watchers are notified; in the delay the picker still takes connections and gives the
    reason."""
    async with picker(tmp_path, transport, "--drain-delay=3s", "--drain-timeout=10s") as process:
        watches = [stub.Watch(HealthCheckRequest(service="")) for stub in (process.main, process.health)]
        assert [(await watch.read()).status for watch in watches] == [SERVING] * 2
        await process.told()

        assert [(await watch.read()).status for watch in watches] == [NOT_SERVING] * 2
        assert await _status(process.main, LIVENESS) == SERVING
        assert await process.page("/readyz") == (503, "draining\n")
        assert await process.page("/healthz") == (200, "ok\n")
        assert await process.ends() == 0


async def test_an_empty_fleet_is_listed(tmp_path: Path, transport: Transport) -> None:
    """A picker without any endpoint is ready, one that could not list them is not, and says why."""
    async with picker(tmp_path, transport, endpoints="", path="/healthz") as process:
        status, text = await process.page("/readyz")
        assert (status, "endpoints.yaml: No such file or directory" in text) == (503, True)
        assert await _status(process.main, "readiness") == NOT_SERVING
        (tmp_path / "endpoints.yaml").write_text(NO_ENDPOINTS)
        while await _status(process.health, "readiness") != SERVING:
            await asyncio.sleep(0.05)
        assert await process.page("/readyz") == (200, "ok\n")


# -- ends


async def _hanging(process: Process) -> Any:
    """An ext_proc stream that waits for the rest of its body."""
    call = process.channel.stream_stream(PROCESS_METHOD)()
    await call.write(b"\x12\x00")
    await asyncio.wait((asyncio.ensure_future(_status(process.main, LIVENESS)),))
    return call


async def test_a_request_that_waits_outlives_the_signal(tmp_path: Path, transport: Transport) -> None:
    """A request that waits for the first endpoint when SIGTERM comes is picked for when there is one."""
    flags = ("--scrape-interval=0.2", "--drain-delay=1s", "--drain-timeout=60s")
    engine = Upstream(responses={"/metrics": ("text/plain", [METRICS])})
    async with picker(tmp_path, transport, *flags) as process, engine:
        call = process.channel.stream_stream(PROCESS_METHOD)()
        for message in (messages.request_headers(), messages.request_body(b'{"model": "m", "prompt": "p"}')):
            await call.write(message)
        await process.told()
        host, _, port = engine.address.rpartition(":")
        fleet = {"endpoints": [{"name": "late", "address": host, "port": int(port), "kvEvents": "none"}]}
        (tmp_path / "endpoints.yaml").write_text(json.dumps(fleet))

        assert engine.address.encode() in await call.read()
        assert await process.ends() == 0


async def test_running_streams_hold_the_end_up_to_the_timeout(tmp_path: Path, transport: Transport) -> None:
    """A stream that does not end is cut off by --drain-timeout, and the exit code is 0 all the same."""
    async with picker(tmp_path, transport, "--drain-timeout=2s") as process:
        call = await _hanging(process)
        await process.told()

        assert await process.ends() == 0
        assert await call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_a_second_signal_ends_at_once(tmp_path: Path, transport: Transport) -> None:
    """A drain of ten minutes is cut short by another SIGTERM; the exit code and the log tell."""
    async with picker(tmp_path, transport, "--drain-timeout=10m") as process:
        call = await _hanging(process)
        await process.told()
        process.child.process.send_signal(signal.SIGTERM)

        assert await process.ends() == 1
        assert "a second signal cut the drain short (SIGTERM)" in process.child.tail()
        call.cancel()


async def test_a_part_that_fails_ends_the_picker(tmp_path: Path, transport: Transport) -> None:
    """A background task that dies ends the process, and not with 0."""
    crashing = (sys.executable, "-c", CRASHING)
    async with picker(tmp_path, transport, path="/healthz", program=crashing) as process:
        (tmp_path / "endpoints.yaml").unlink()
        assert await process.ends() == 1
        assert "kvist-epp: the task 'tick' ended unexpectedly" in process.child.tail()


@pytest.mark.parametrize("flag", ["grpc-port", "grpc-health-port", "metrics-port"])
async def test_a_port_that_is_taken(tmp_path: Path, transport: Transport, flag: str) -> None:
    """One error line names the flag, the port and the reason."""
    file = tmp_path / "endpoints.yaml"
    file.write_text(NO_ENDPOINTS)
    taken = await asyncio.start_server(lambda _, writer: writer.close(), HOST, 0)
    port = taken.sockets[0].getsockname()[1]
    flags = {"grpc-port": 0, "grpc-health-port": 0, "metrics-port": 0} | {flag: port}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvist_epp", f"--endpoints-file={file}", "--log-level=error"),
        *(f"--host={HOST}", f"--transport={transport}"),
        *(f"--{name}={number}" for name, number in flags.items()),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), 60)
    taken.close()
    await taken.wait_closed()

    (line,) = said.decode().splitlines()
    assert process.returncode == 1
    assert line.startswith(f"kvist-epp: --{flag}: cannot listen on ")
    assert str(port) in line
    assert "address already in use" in line.lower()
