"""Pickers that come and go under load: no request is lost, and none goes without a pick where that can be."""

import signal
from pathlib import Path

import pytest
from tests.data_plane.plane import healthy_pickers
from tests.data_plane.replicas import replicas

FORMS = pytest.mark.parametrize(
    ("transport", "secure"),
    [
        pytest.param(transport, secure, id=f"{transport}-{'tls' if secure else 'plain'}")
        for transport in ("fast", "grpc")
        for secure in (False, True)
    ],
)


@FORMS
@pytest.mark.timeout(300)
async def test_rolling_three_pickers_loses_nothing(tmp_path: Path, transport: str, secure: bool) -> None:
    """Three pickers are stopped and restarted one after the other: every request is picked for and
    answered."""
    async with replicas(tmp_path, transport=transport, secure=secure) as running, running.load() as load:
        for number in range(3):
            await load.more(50)
            assert await running.end(number, signal.SIGTERM) == 0
            await running.start(number)
        await load.more(50)
        assert (load.lost, await running.unpicked()) == ({}, 0)


@FORMS
@pytest.mark.timeout(300)
async def test_a_killed_picker_of_three_loses_nothing(tmp_path: Path, transport: str, secure: bool) -> None:
    """SIGKILL: requests that waited for its answer are let pass by fail-open, the others go to the living."""
    async with replicas(tmp_path, transport=transport, secure=secure) as running, running.load() as load:
        await load.more(50)
        assert await running.end(1, signal.SIGKILL) == -signal.SIGKILL
        await healthy_pickers(running.envoy, 2)
        await load.more(50)  # Envoy's workers hear of it a little later than its statistics
        unpicked = await running.unpicked()
        await load.more(100)
        assert (load.lost, await running.unpicked()) == ({}, unpicked)
