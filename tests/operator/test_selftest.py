"""`kvist-operator check` reports what does not work."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from kvist_operator.__main__ import main
from kvist_operator.errors import StartError
from kvist_operator.process import selftest
from kvist_operator.spec import read_pool


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """Run an operator that is ready at the second request."""
    asked: list[str] = []

    async def page(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(text="the cluster has not been read yet\n", status=503 if len(asked) < 2 else 200)

    app = web.Application()
    app.router.add_get("/readyz", page)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_an_operator_that_starts_is_waited_for(address: str) -> None:
    """An operator that becomes ready passes."""
    await selftest.wait_until_ready(f"{address}/readyz")


async def test_an_operator_that_is_not_ready_is_quoted(address: str) -> None:
    """An operator that is not ready fails with its address and its answer."""
    with pytest.raises(StartError, match=r"/readyz: not ready within 0 s: the cluster has not been read yet"):
        await selftest.wait_until_ready(f"{address}/readyz", seconds=0.0)


def test_the_sample_pool_is_valid() -> None:
    """The spec of the sample pool can be read."""
    made = {
        **selftest.SAMPLE_POOL,
        "metadata": {**selftest.SAMPLE_POOL["metadata"], "namespace": "forest", "uid": "1"},
    }
    assert read_pool(made).name == "kvist-check"


def test_without_a_cluster_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a cluster both names of the command print one line and exit with 1."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["check", "--namespace=forest"]) == main(["trial", "--namespace=forest"]) == 1
    assert "set KUBECONFIG, or run in a pod" in capsys.readouterr().err
