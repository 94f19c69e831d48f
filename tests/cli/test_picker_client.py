"""The client of a running picker: by address, and through an API server's proxy of its pods."""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvist import options
from kvist.errors import CommandUsageError, PickerClientError
from kvist.picker_client import PickerClient, open_picker, run_with_picker

POOL = "app.kubernetes.io/instance=qwen,app.kubernetes.io/component=picker"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def parsed(*words: str) -> argparse.Namespace:
    """Return the options that name a picker."""
    parser = argparse.ArgumentParser()
    options.picker_options(parser)
    return parser.parse_args(words)


def pod(name: str, *, ready: bool = True, phase: str = "Running", port: int = 9090, **meta: Any) -> Any:
    """Return a picker's pod as the operator renders it."""
    ports = [{"name": "grpc", "containerPort": 9002}, {"name": "metrics", "containerPort": port}]
    return {
        "metadata": {"name": name, "namespace": "serving", **meta},
        "spec": {"containers": [{"name": "picker", "ports": ports}]},
        "status": {"phase": phase, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def status(code: int, message: str) -> web.Response:
    """Return a refusal of the API server itself."""
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)


class Api:
    """An API server with pods, and their proxy: a picker answers with what it was asked."""

    def __init__(self, *pods: Any) -> None:
        self.pods = pods
        self.selectors: list[str] = []
        self.asked: list[tuple[str, str, dict[str, str], str | None, bytes]] = []
        """Method, path below ``pods``, query, header ``x-kvist-path``, body."""
        self.refusals: dict[str, web.Response] = {}
        """By ``pod:port``, or ``list``."""
        self.base = ""

    async def list_pods(self, request: web.Request) -> web.StreamResponse:
        """Return the pods of a namespace."""
        self.selectors.append(request.query["labelSelector"])
        return self.refusals.get("list") or web.json_response({"items": list(self.pods)})

    async def proxy(self, request: web.Request) -> web.StreamResponse:
        """Answer for a pod."""
        name = request.match_info["pod"]
        header = request.headers.get("x-kvist-path")
        query = dict(request.query)
        self.asked.append((request.method, request.rel_url.raw_path, query, header, await request.read()))
        return self.refusals.get(name) or web.json_response({"from": name})

    def kubeconfig(self, folder: Path, **context: str) -> str:
        """Write a kubeconfig with two contexts, of which the second leads here."""
        document = {
            "current-context": "elsewhere",
            "clusters": [
                {"name": "here", "cluster": {"server": self.base}},
                {"name": "elsewhere", "cluster": {"server": "http://127.0.0.1:1"}},
            ],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [
                {"name": name, "context": {"cluster": name, "user": "u", **context}}
                for name in ("elsewhere", "here")
            ],
        }
        path = folder / "kubeconfig"
        path.write_text(json.dumps(document))
        return str(path)


@asynccontextmanager
async def served(*routes: web.RouteDef) -> AsyncIterator[str]:
    """Serve these routes; yield the base URL."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def api(*pods: Any) -> AsyncIterator[Api]:
    """Serve an API server with these pods."""
    made = Api(*pods)
    routes = (
        web.get("/api/v1/namespaces/serving/pods", made.list_pods),
        web.route("*", "/api/v1/namespaces/serving/pods/{pod}/proxy/{path:.*}", made.proxy),
    )
    async with served(*routes) as made.base:
        yield made


async def test_pages_are_read_through_the_proxy_of_a_ready_picker(tmp_path: Path) -> None:
    """The pool's pickers are found by their labels in the context's namespace; a query, a body and headers
    pass; pods that are not ready come last, those that leave or do not run are not asked."""
    pods = (
        pod("a", ready=False),
        pod("b", deletionTimestamp="2026-01-01T00:00:00Z"),
        pod("c", phase="Pending"),
        pod("d", port=9191),
    )
    async with api(*pods) as server:
        found = parsed("--pool", "qwen", "--context", "here")
        found.kubeconfig = server.kubeconfig(tmp_path, namespace="serving")
        async with open_picker(found) as picker:
            page = await picker.get("/debug/decisions/a%2Fb?replicas=false&limit=5")
            answer = await picker.post("/debug/pick", b'{"prompt": 1}', {"x-kvist-path": "/v1/completions"})

    assert server.selectors == [POOL]
    assert (page, answer) == ({"from": "d:9191"}, {"from": "d:9191"})
    prefix = "/api/v1/namespaces/serving/pods/d:9191/proxy/debug"
    assert server.asked == [
        ("GET", f"{prefix}/decisions/a%2Fb", {"replicas": "false", "limit": "5"}, None, b""),
        ("POST", f"{prefix}/pick", {}, "/v1/completions", b'{"prompt": 1}'),
    ]


async def test_the_next_picker_is_asked_where_the_first_is_not_reached(tmp_path: Path) -> None:
    """A pod that the API server does not reach is left out, also for the next page; if none is reached, the
    error has the API server's reason."""
    async with api(pod("a"), pod("b")) as server:
        found = parsed("--pool", "qwen", "--context", "here", "--namespace", "serving")
        found.kubeconfig = server.kubeconfig(tmp_path)
        server.refusals["a:9090"] = status(503, "error trying to reach service: dial tcp 10.0.0.1:9090")
        async with open_picker(found) as picker:
            first, second = await picker.get("/fleet"), await picker.get("/fleet")
            server.refusals["b:9090"] = status(502, "connection refused")
            with pytest.raises(PickerClientError) as failed:
                await picker.get("/fleet")

    assert (first, second) == ({"from": "b:9090"}, {"from": "b:9090"})
    assert [path.split("/")[6] for _, path, *_ in server.asked] == ["a:9090", "b:9090", "b:9090", "b:9090"]
    assert str(failed.value) == (
        "--pool serving/qwen: the API server does not reach the picker b: connection refused"
    )


@pytest.mark.parametrize(
    ("refusals", "message"),
    [
        (
            {"list": status(403, "pods is forbidden")},
            (
                "--pool serving/qwen: 403: pods is forbidden; you need the right to list pods in namespace "
                "serving"
            ),
        ),
        (
            {"a:9090": status(403, "pods/proxy is forbidden")},
            (
                "--pool serving/qwen: pods/proxy is forbidden; you need the right to get pods/proxy in "
                "namespace serving, or use kubectl port-forward and --address"
            ),
        ),
        (
            {"a:9090": web.json_response({"error": {"message": "no decision on x"}}, status=404)},
            "--pool serving/qwen: no decision on x",
        ),
        (
            {"a:9090": web.Response(text="hello", status=200)},
            (
                "--pool serving/qwen: no page /fleet there (status 200): this is not a picker's metrics "
                "port, or the picker is older than this command"
            ),
        ),
    ],
)
async def test_a_refusal_names_the_right_or_the_reason(
    tmp_path: Path, refusals: Mapping[str, web.Response], message: str
) -> None:
    """In one line: whose refusal it is, and what to do."""
    async with api(pod("a")) as server:
        found = parsed("--pool", "qwen", "--context", "here", "--namespace", "serving")
        found.kubeconfig = server.kubeconfig(tmp_path)
        server.refusals |= refusals
        with pytest.raises(PickerClientError) as failed:
            async with open_picker(found) as picker:
                await picker.get("/fleet")

    assert str(failed.value) == message


async def test_a_pool_without_pickers_is_an_error(tmp_path: Path) -> None:
    """The message says where they were looked for, and how to find them."""
    async with api() as server:
        found = parsed("--pool", "qwen", "--context", "here", "--namespace", "serving")
        found.kubeconfig = server.kubeconfig(tmp_path)
        with pytest.raises(PickerClientError, match="--pool serving/qwen: no picker of this pool runs in"):
            async with open_picker(found):
                pass


async def test_a_kubeconfig_that_cannot_be_used_is_a_usage_error(tmp_path: Path) -> None:
    """Missing, broken, or without the context: the error names the flag and the file."""
    file = tmp_path / "kubeconfig"
    found = parsed("--pool", "qwen", "--kubeconfig", str(file))
    for text in (None, "{", "[]"):
        if text is not None:
            file.write_text(text)
        with pytest.raises(CommandUsageError, match=f"--kubeconfig: kubeconfig {file}"):
            async with open_picker(found):
                pass


async def test_an_address_is_asked_directly() -> None:
    """Pages, bodies and headers go to the address; an answer that is no picker's is explained."""

    async def page(request: web.Request) -> web.Response:
        return web.json_response({"path": request.path_qs, "header": request.headers.get("x-session-id")})

    async with served(web.get("/fleet", page), web.post("/debug/pick", page)) as base:
        async with open_picker(parsed("--address", base)) as picker:
            got = await picker.get("/fleet?a=b")
            posted = await picker.post("/debug/pick", b"{}", {"x-session-id": "s"})
            with pytest.raises(PickerClientError, match=r"no page /nowhere there \(status 404\)") as missing:
                await picker.get("/nowhere")
        async with open_picker(parsed("--address", "http://127.0.0.1:1")) as picker:
            with pytest.raises(PickerClientError, match=r"no picker answers \(Connection refused\)"):
                await picker.get("/fleet")

    assert got == {"path": "/fleet?a=b", "header": None}
    assert posted == {"path": "/debug/pick", "header": "s"}
    assert missing.value.status == 404


def test_options_that_do_not_go_together_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """An address with a namespace, or with a pool, ends with exit code 2 and names the flag."""

    async def main(picker: PickerClient, options: argparse.Namespace) -> int:
        raise AssertionError(picker, options)

    assert run_with_picker(parsed("--namespace", "serving", "--address", "localhost:9090"), main) == 2
    with pytest.raises(SystemExit) as ended:
        parsed("--pool", "qwen", "--address", "localhost:9090")

    assert "--namespace goes with --pool NAME; --address needs no cluster" in capsys.readouterr().err
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:9090", "http://localhost:9090"),
        ("https://kvist.example/picker/", "https://kvist.example/picker"),
        ("[::1]:9090", "http://[::1]:9090"),
        ("ftp://a", None),
        ("http://", None),
        ("a:port", None),
        ("", None),
        ("http://a?b", None),
    ],
)
def test_addresses_are_read_as_base_urls(text: str, url: str | None) -> None:
    """A host and port is enough; what is no address is refused by the parser."""
    if url is None:
        with pytest.raises(SystemExit):
            parsed("--address", text)
    else:
        assert parsed("--address", text).address == url


def test_a_picker_that_does_not_answer_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """``run_with_picker`` reports the error of a command and returns 1."""

    async def main(picker: PickerClient, _: argparse.Namespace) -> int:
        await asyncio.sleep(0)
        await picker.get("/fleet")
        return 0

    assert run_with_picker(parsed("--address", "127.0.0.1:1"), main) == 1
    assert capsys.readouterr().err.count("\n") == 1
