"""``kvist pools``: the table at several widths, and what an API server and pickers answer."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.cli.pool_objects import WELL, pool, unready

from kvist.__main__ import main
from kvist.kubectl_plugin import main as plugin
from kvist.pool_list import PoolRow, documents, row, table

Json = dict[str, Any]
POOLS = "/apis/kvist.dev/v1alpha1/inferencepools"
SERVING = "/apis/kvist.dev/v1alpha1/namespaces/serving/inferencepools"


def named(name: str, namespace: str = "serving", found: Json | None = None) -> Json:
    """Return a pool with this name and namespace."""
    made = found or pool("minimal", replace(WELL, kv_tokens=790_000))
    made["metadata"] |= {"name": name, "namespace": namespace}
    return made


ROWS = [
    row(named("chat-of-the-support-desk"), 0.873, ""),
    row(named("kimi", "research-and-development", pool("two-nodes", WELL)), None, "no prompts"),
    row(named("agents", found=pool("agents", unready())), None, "no picker answered in 5 s"),
    row(named("spare"), None, "no prompts"),
]


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("namespaces", [True, False])
def test_the_table_fits_the_terminal(width: int, namespaces: bool) -> None:
    """No line of the table is longer than the terminal; names, numbers and the count of advice are there."""
    lines = table(ROWS, width, namespaces=namespaces).splitlines()
    body = lines[: len(ROWS) + 1]

    assert max(map(len, body)) <= width
    assert body[0].split()[:2] == (["NAMESPACE", "NAME"] if namespaces else ["NAME", "MODEL"])
    assert "87 %" in body[1]
    assert "agents" in body[3]
    assert " 1: Pre" in body[3]


def test_columns_that_do_not_fit_are_named() -> None:
    """A narrow terminal loses columns in a fixed order, and the last line says which and where they are."""
    lines = table(ROWS, 80, namespaces=True).splitlines()

    assert lines[-1] == "too narrow for REPORTED, ACCELERATOR: -o wide has every column"
    assert table(ROWS, 200, namespaces=True).splitlines()[-1].startswith("[2] ")


def test_each_reason_for_a_missing_hit_rate_is_a_footnote() -> None:
    """Pools with the same reason share a footnote, and their cells have its number."""
    lines = table(ROWS, None).splitlines()

    assert lines[-2:] == ["[1] no prompts", "[2] no picker answered in 5 s"]
    assert ["- [1]" in line for line in lines[1:5]] == [False, True, False, True]
    assert "- [2]" in lines[3]


def test_wide_has_exact_figures_and_all_advice() -> None:
    """The wide table is never cut."""
    shown = table(ROWS, 80, wide=True)

    assert "796,192" in shown
    assert "99 %" in shown
    assert "Set spec.engine.maxNumSeqs to 128." in shown
    assert "Unverified" not in shown


def test_a_row_says_why_a_pool_is_not_ready() -> None:
    """The state is ``Ready``, or the reason of the condition; without a status it is ``NoStatus``."""
    bare = named("new")
    del bare["status"]
    found = documents([ROWS[0], ROWS[2], row(bare, None, "")])

    assert [each["state"] for each in found] == ["Ready", "ImagePull", "NoStatus"]
    assert (found[2]["planned_tokens"], found[2]["replicas_ready"]) == (None, 0)
    assert found[0].keys() == set(PoolRow.__dataclass_fields__)


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        (None, "-"),
        (9_999, "9999"),
        (148_416, "148k"),
        (999_700, "1.00M"),
        (1_254_000, "1.25M"),
        (20e6, "20M"),
    ],
)
def test_tokens_are_short(tokens: int | None, shown: str) -> None:
    """Figures of the cache take five characters at most."""
    found = replace(ROWS[0], planned_tokens=None if tokens is None else int(tokens))

    header, line = table([found], None).splitlines()
    end = header.index("CACHE") + len("CACHE")
    assert line[:end].split()[-1] == shown


class Api:
    """An API server with fixed answers, and pickers behind its proxy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answers: dict[str, tuple[int, Any]] = {}
        self.asked: list[str] = []
        self.port = 0

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path_qs)
        status, body = self.answers.get(request.path, (404, {"kind": "Status", "message": "not found"}))
        return web.json_response(body, status=status)

    async def start(self) -> web.AppRunner:
        """Listen on a free port."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        return runner

    def pools(self, path: str, *found: Json) -> None:
        """Answer a list with these pools."""
        self.answers[path] = (200, {"items": list(found)})

    def picker(self, pool: str, report: Json | None, status: int = 200, namespace: str = "serving") -> None:
        """Let one picker of a pool run, whose page ``/fleet`` is this."""
        name = f"{pool}-epp-1"
        pod = {
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"containers": [{"ports": [{"name": "metrics", "containerPort": 9090}]}]},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
        }
        self.answers[f"/api/v1/namespaces/{namespace}/pods"] = (200, {"items": [pod]})
        path = f"/api/v1/namespaces/{namespace}/pods/{name}:9090/proxy/fleet"
        self.answers[path] = (status, report)

    def kubeconfig(self, namespace: str = "serving") -> str:
        """Return a file whose current context is this namespace of the server."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [
                {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": namespace}},
                {"name": "there", "context": {"cluster": "c", "user": "u", "namespace": "elsewhere"}},
            ],
        }
        file = self.folder / "kubeconfig"
        file.write_text(json.dumps(document))
        return str(file)


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    """An API server, named by KUBECONFIG."""
    made = Api(tmp_path)
    runner = await made.start()
    monkeypatch.setenv("KUBECONFIG", made.kubeconfig())
    yield made
    await runner.cleanup()


def report(hits: float, queries: float) -> Json:
    """Return a page ``/fleet`` with one engine that counted these tokens."""
    engine = {
        "pod": "twig-1",
        "endpoint": "10.0.0.1:8000",
        "ready": True,
        "worth_tokens": 0,
        "exclusive_blocks": 0,
        "kv_tokens": 790_000,
        "kv_usage": 0.4,
        "running": 3,
        "waiting": 0,
        "counted": {"seconds": 600.0, "requests": 90.0, "preemptions": 0.0, "queries": queries, "hits": hits},
    }
    return {"version": 1, "replica": "r", "endpoints": [engine]}


async def run(*words: str, command: Any = main) -> int:
    """Run a command line beside the server and return its exit code."""
    return int(await asyncio.to_thread(command, list(words)))


async def test_the_hit_rate_is_that_of_the_engines_counters(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has the tokens found by tokens looked up, from a picker asked through the API server."""
    api.pools(SERVING, named("chat"))
    api.picker("chat", report(873.0, 1000.0))

    assert await run("pools", "-o", "json") == 0
    [found] = json.loads(capsys.readouterr().out)["pools"]
    assert (found["hit_rate"], found["hit_rate_problem"]) == (0.873, "")
    assert await run("pools") == 0
    assert "87 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, report(0.0, 0.0), "[1] no prompts in the last ten minutes"),
        (
            403,
            {"kind": "Status", "message": "pods is forbidden", "code": 403},
            "you need the right to get pods/proxy in namespace serving",
        ),
        (503, {"kind": "Status", "message": "dial tcp: refused", "code": 503}, "does not reach the picker"),
        (200, {"version": 7, "endpoints": []}, "version 7"),
        (200, {}, "version is not a number"),
    ],
)
async def test_a_picker_that_does_not_answer_is_a_footnote(
    status: int, body: Json, said: str, api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    """The row is there with a dash, and the footnote has the reason and the remedy."""
    api.pools(SERVING, named("chat"))
    api.picker("chat", body, status)

    assert await run("pools") == 0
    shown = capsys.readouterr().out
    assert "- [1]" in shown.splitlines()[1]
    assert said in shown


async def test_a_pool_without_a_picker_is_not_asked(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    """With ``spec.picker.mode: Off`` nothing counts hits, and no pods are listed."""
    found = named("chat")
    found["spec"]["picker"] = {"mode": "Off"}
    api.pools(SERVING, found)

    assert await run("pools") == 0
    assert "[1] the pool has no picker that counts (spec.picker.mode: Off)" in capsys.readouterr().out
    assert api.asked == [SERVING]


async def test_scopes_are_those_of_kubectl(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    """The context's namespace, ``-n``, ``--context`` and ``-A`` choose what is listed."""
    api.pools(POOLS, named("chat"), named("kimi", "research"))
    for path in (SERVING, SERVING.replace("serving", "elsewhere"), SERVING.replace("serving", "other")):
        api.pools(path)

    assert await run("pools", "-A") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:3]] == [
        "NAMESPACE",
        "research",
        "serving",
    ]
    api.asked.clear()
    for words in ((), ("-n", "other"), ("--context", "there")):
        assert await run("pools", *words) == 0
    assert api.asked == [SERVING.replace("serving", each) for each in ("serving", "other", "elsewhere")]
    assert "namespace serving has no InferencePools; kvist pools -A" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("pools",), ("why", "chat"), ("why",)])
@pytest.mark.parametrize(
    ("status", "said"),
    [
        (404, "the cluster has no inferencepools.kvist.dev: install kvist's CRDs and operator"),
        (403, "check it with kubectl auth can-i "),
        (401, "does not accept your credentials"),
        (
            500,
            "inferencepools.kvist.dev now (500: the server could not find the requested resource): try again",
        ),
    ],
)
async def test_what_is_missing_is_one_line_with_the_remedy(
    words: tuple[str, ...], status: int, said: str, api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the CRD, the right, the credentials or a healthy API server the exit code is 1."""
    body = {"kind": "Status", "message": "the server could not find the requested resource", "code": status}
    api.answers = {SERVING: (status, body), f"{SERVING}/chat": (status, body)}

    assert await run(*words) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("kvist: ")
    assert shown.err.count("\n") == 1
    assert said in shown.err
    assert status != 403 or "inferencepools.kvist.dev -n serving" in shown.err


async def test_no_kubeconfig_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kubeconfig that is absent, or a context that it lacks, is an error about the option."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    assert await run("pools") in (1, 2)
    assert "nothing" in capsys.readouterr().err


async def test_why_reads_the_pool_of_the_cluster(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    """A pool is found by name, or without a name where the namespace has only one."""
    found = named("chat")
    api.pools(SERVING, found)
    api.answers[f"{SERVING}/chat"] = (200, found)
    missing = {"kind": "Status", "message": 'inferencepools.kvist.dev "chatt" not found', "code": 404}
    api.answers[f"{SERVING}/chatt"] = (404, missing)

    assert await run("why", "chat") == 0
    assert capsys.readouterr().out.startswith("pool serving/chat: ready")
    assert await run("why", command=plugin) == 0
    assert capsys.readouterr().out.startswith("pool serving/chat: ready")
    assert await run("why", "chatt") == 1
    assert "namespace serving has no InferencePool chatt: did you mean chat?" in capsys.readouterr().err
    api.pools(SERVING, found, named("kimi"))
    assert await run("why") == 1
    assert "namespace serving has several pools, name one of them: chat, kimi" in capsys.readouterr().err


async def test_a_plugin_asks_the_only_pool_and_kvist_localhost(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without options ``kubectl kvist explain`` asks a picker of the only pool of the namespace, through the
    API server; ``kvist explain`` does with ``-n`` alone, and takes no ``-n`` beside an address."""
    api.pools(SERVING, named("chat"))
    api.picker("chat", None)
    page = "/api/v1/namespaces/serving/pods/chat-epp-1:9090/proxy/debug/decisions/abc"

    assert await run("explain", "abc", command=plugin) == 1
    assert page in api.asked
    api.asked.clear()
    assert await run("explain", "abc", "-n", "serving") == 1
    assert page in api.asked
    assert await run("explain", "abc", "-n", "serving", "--address", "localhost:1") == 2
    assert "--namespace goes with --pool NAME; --address needs no cluster" in capsys.readouterr().err
    api.pools(SERVING)
    assert await run("explain", "abc", command=plugin) == 1
    assert "namespace serving has no InferencePool: name a namespace with -n" in capsys.readouterr().err
