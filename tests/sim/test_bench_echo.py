"""Tests of the echo of ``kvist bench epp``, behind a real Envoy."""

import asyncio
import sys
from pathlib import Path

import pytest

from kvist_sim import envoy
from kvist_sim.bench.epp.client import window
from kvist_sim.bench.epp.command import start_echo
from kvist_sim.bench.epp.prompts import Kind, PromptShape, requests
from kvist_sim.launch import EnginePorts
from kvist_sim.ports import free_ports
from kvist_sim.processes import Children


@pytest.mark.parametrize("kilobytes", [1, 450])
async def test_the_echo_serves_requests_of_every_size(kilobytes: int, tmp_path: Path) -> None:
    """Requests of one and of many messages, in both directions, are all answered by the endpoint."""
    (port,) = free_ports(1)
    engine = EnginePorts(port, 0, 0)
    async with Children(tmp_path, grace_seconds=5) as children:
        children.start("upstream", [sys.executable, "-m", "kvist_sim.bench.harness.upstream", str(port)])
        _, address = await start_echo(children, engine)
        gateway = envoy.Gateway(
            endpoints=[engine.hostport],
            picker=address,
            mode="duplex",
            responses="skip",
            failure_mode_allow=False,
            access_log=False,
            health_check=False,
        )
        async with envoy.Envoy(envoy.config(gateway)) as proxy:
            asked = requests(Kind(kilobytes, PromptShape.COMPLETION))
            sample = await asyncio.wait_for(window(proxy.port, asked, concurrency=8, seconds=0.3), 30)

    assert sample.errors == 0
    assert len(sample.latencies) >= 8
