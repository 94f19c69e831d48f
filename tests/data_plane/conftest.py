"""Every test of this folder runs on both servers and in both modes in which Envoy can call them."""

from collections.abc import AsyncIterator

import pytest
from tests.data_plane.plane import Plane
from tests.data_plane.plane import plane as running_plane
from tests.data_plane.stub import Transport

from kvist_sim.envoy import Mode


@pytest.fixture(params=["fast", "grpc"])
def transport(request: pytest.FixtureRequest) -> Transport:
    """Return the server that the test runs on."""
    found: Transport = request.param
    return found


@pytest.fixture(params=["buffered", "duplex"])
def mode(request: pytest.FixtureRequest) -> Mode:
    """Which way Envoy sends bodies."""
    found: Mode = request.param
    return found


@pytest.fixture
async def plane(transport: Transport, mode: Mode) -> AsyncIterator[Plane]:
    """The usual data plane: the picker answers the second of two upstreams."""
    async with running_plane(transport, mode) as running:
        yield running
