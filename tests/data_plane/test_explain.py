"""``kvist explain`` against the running product: real Envoy, pickers as processes, simulated engines."""

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from tests.data_plane.pickers import pool
from tests.data_plane.plane import connection_manager, ext_proc
from tests.data_plane.product import CHAT, Product, product
from tests.data_plane.test_replication_processes import linked

from kvist.errors import PickerClientError
from kvist.picker_client import PickerClient, open_picker
from kvist_epp.names import SUBSET_KEY, SUBSET_NAMESPACE
from kvist_sim.envoy import Json
from kvist_sim.launch import HOST

pytestmark = pytest.mark.timeout(300)

REQUESTS: Final = 200
ENGINES: Final = 4
FAST: Final = ("--sim-time-scale", "20", "--num-gpu-blocks-override", "4000")
STILL: Final = ("--scrape-interval=3600", "--prewarm-tokens=0")
"""Nothing but requests changes a load."""
SERVED_BY: Final = "x-served-by"
COMPLETIONS: Final = "/v1/completions"
SUBJECTS: Final = ("gardens", "harbours", "railways", "libraries", "bakeries", "mountains")


def with_subset_and_server(settings: Json) -> None:
    """Have Envoy take the subset hint from a header, and name the endpoint that served in another."""
    options = ext_proc(settings)["metadata_options"]
    forwarded = options.get("forwarding_namespaces", {"untyped": []})["untyped"]
    options["forwarding_namespaces"] = {"untyped": [*forwarded, SUBSET_NAMESPACE]}
    target = {"metadata_namespace": SUBSET_NAMESPACE, "key": SUBSET_KEY, "type": "STRING"}
    to_metadata = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config",
        "request_rules": [{"header": "x-test-subset", "on_header_present": target, "remove": True}],
    }
    manager = connection_manager(settings)
    manager["http_filters"].insert(
        0, {"name": "envoy.filters.http.header_to_metadata", "typed_config": to_metadata}
    )
    added = {"header": {"key": SERVED_BY, "value": "%UPSTREAM_REMOTE_ADDRESS%"}}
    manager["route_config"]["response_headers_to_add"] = [added]


class Requests:
    """Different kinds of requests over prefixes of which some are shared."""

    def __init__(self, engines: list[str]) -> None:
        self.dice = random.Random("explain")
        self.engines = engines

    def draw(self, number: int) -> tuple[str, dict[str, Any], dict[str, str], str]:
        """Return path, body, headers, and the subset of the gateway (empty: none)."""
        dice = self.dice
        subject = dice.choice(SUBJECTS)
        system = f"You know everything about {subject} and answer in full sentences. " * dice.choice(
            (6, 30, 90)
        )
        question = f"Question {number}: what would a visitor of the {subject} ask about number {number}? " * 3
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        headers = {"x-session-id": f"client-{dice.randrange(20)}-{number}"} if dice.random() < 0.3 else {}
        if dice.random() < 0.2:
            headers["x-gateway-inference-objective"] = "batch"
        subset = ",".join(dice.sample(self.engines, dice.randrange(1, 4))) if dice.random() < 0.25 else ""
        if dice.random() < 0.3:
            return COMPLETIONS, {"model": "m", "prompt": system + question, "max_tokens": 2}, headers, subset
        body = {"model": "m", "messages": messages, "max_tokens": 2, "stream": dice.random() < 0.3}
        return CHAT, body, headers, subset


def options(port: int) -> argparse.Namespace:
    """Return the options that name a picker by its metrics port."""
    address = f"http://{HOST}:{port}"
    return argparse.Namespace(
        address=address, pool=None, namespace=None, context=None, kubeconfig=None, as_plugin=False
    )


def command(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``kvist explain`` as a process."""
    argv = [sys.executable, "-m", "kvist", "explain", *words]
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)


async def explained(
    picker: PickerClient, path: str, body: Mapping[str, Any], headers: Mapping[str, str], subset: str
) -> Any:
    """Ask where a request would go, as ``kvist explain -f`` does."""
    hint = {SUBSET_KEY: subset} if subset else {}
    return await picker.post(
        "/debug/pick", json.dumps(body).encode(), {"x-kvist-path": path, **headers, **hint}
    )


async def send(
    running: Product, path: str, body: Any, headers: Mapping[str, str], subset: str
) -> tuple[str, int | None]:
    """Send a request through Envoy; return the endpoint that served it, and its cached tokens if it said."""
    hint = {"x-test-subset": subset} if subset else {}
    url = f"{running.envoy.url}{path}"
    async with running.client.post(url, json=body, headers={**headers, **hint}) as response:
        text = await response.text()
        assert response.status == 200, text
        cached = None if body.get("stream") else json.loads(text)["usage"]["prompt_tokens_details"]
        return response.headers[SERVED_BY], cached and cached["cached_tokens"]


def figures(page: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the numbers that a page shows of each endpoint that could be picked."""
    names = ("matched_tokens", "matched_bytes", "uncached_tokens", "backlog_tokens", "predicted_ttft_seconds")
    return {
        row["endpoint"]: {"cost": row["cost_seconds"], **row["terms"], **{name: row[name] for name in names}}
        for row in page["endpoints"]
        if row["eligible"]
    }


def close(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Return whether two pages show the same numbers of the same endpoints.

    Earlier uses of a prefix fade in the moment between them, so that a copy's work costs a little more.
    """
    return found.keys() == expected.keys() and all(
        row == pytest.approx(expected[name], rel=0.02, abs=1.5e-6) for name, row in found.items()
    )


async def test_explain_agrees_with_the_next_pick_in_200_of_200_cases(tmp_path: Path) -> None:
    """At rest a request goes where ``kvist explain -f`` has said, for the same terms of the cost; and
    ``kvist explain ID`` shows the endpoint that served it and the true cache hit."""
    async with (
        product(
            tmp_path, engines=ENGINES, flags=FAST, picker_flags=STILL, tweak=with_subset_and_server
        ) as running,
        open_picker(options(running.picker.metrics_port)) as picker,
    ):
        requests = Requests([one.hostport for one in running.engines])
        agreed = terms = served_right = true_hits = known = 0
        cached_somewhere = several = 0
        for number in range(REQUESTS):
            path, body, headers, subset = requests.draw(number)
            said = await explained(picker, path, body, headers, subset)
            name = f"request-{number}"
            served, cached = await send(running, path, body, {**headers, "x-request-id": name}, subset)
            await running.until("kvist_epp_requests_ended_total", number + 1)
            kept = await picker.get(f"/debug/decisions/{name}")
            agreed += served == said["picked"][0] and kept["picked"] == said["picked"]
            terms += close(figures(kept), figures(said))
            served_right += kept["actual"]["endpoint"] == served
            if cached is not None and (true := kept["actual"]["cached_tokens"]) is not None:
                known += 1
                true_hits += true == cached
            cached_somewhere += any(row["matched_tokens"] for row in said["endpoints"])
            several += len({row["matched_tokens"] for row in said["endpoints"]}) > 2
        listed = await picker.get(f"/debug/decisions?limit={REQUESTS}")

    assert (agreed, terms, served_right) == (REQUESTS, REQUESTS, REQUESTS)
    assert true_hits == known > REQUESTS / 2
    assert cached_somewhere > REQUESTS / 2
    assert several > 10
    assert [one["id"] for one in listed["decisions"]] == [f"request-{n}" for n in reversed(range(REQUESTS))]
    assert {one["actual"]["ended"] for one in listed["decisions"]} == {"access-log"}
    assert all("Question" not in json.dumps(one) for one in listed["decisions"])


async def test_the_command_says_where_and_why(tmp_path: Path) -> None:
    """``kvist explain`` as a process: a request from stdin, one that was decided, one that is not known, a
    body that is none, a picker that is not there."""
    async with product(tmp_path, flags=FAST, picker_flags=STILL, tweak=with_subset_and_server) as running:
        body = {"model": "m", "prompt": "tell me about the sea " * 40, "max_tokens": 2}
        where = f"{HOST}:{running.picker.metrics_port}"
        text = json.dumps(body)
        asked = await asyncio.to_thread(
            command, "-f", "-", "--path", COMPLETIONS, "--address", where, stdin=text
        )
        served, _ = await send(running, COMPLETIONS, body, {"x-request-id": "known"}, "")
        await running.until("kvist_epp_requests_ended_total", 1)
        went = await asyncio.to_thread(command, "known", "--address", where)
        page = await asyncio.to_thread(command, "known", "--address", where, "-o", "json")
        unknown = await asyncio.to_thread(command, "another", "--address", where)
        broken = await asyncio.to_thread(command, "-f", "-", "--address", where, stdin="no JSON")
    gone = await asyncio.to_thread(command, "known", "--address", where)

    assert (asked.returncode, asked.stderr) == (0, "")
    assert asked.stdout.startswith("would go to ")
    assert f"({served})" in asked.stdout.splitlines()[0]
    assert went.returncode == 0
    assert f"served by {served}; ended, status 200 (access-log)" in went.stdout
    assert json.loads(page.stdout)["id"] == "known"
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert (
        "no decision on another is among the last 20,000 of this replica (--decision-log)" in unknown.stderr
    )
    assert (broken.returncode, broken.stdout) == (2, "")
    assert "not JSON" in broken.stderr
    assert (gone.returncode, len(gone.stderr.splitlines())) == (1, 1)
    assert "no picker answers (Connection refused)" in gone.stderr


async def test_a_decision_is_found_at_any_replica(tmp_path: Path) -> None:
    """A replica shows what the other one decided, until that one is gone."""
    async with pool(tmp_path, pickers=2) as replicas:
        await replicas.start(0, 1)
        await linked(replicas, 0, 1)
        answer = await replicas.ask(0, "hello " * 300, **{"x-session-id": "mine"})
        await replicas.ask(1, "goodbye " * 300, **{"x-session-id": "theirs"})
        names = [(await replicas.replication(number))["replica"] for number in (0, 1)]
        async with open_picker(options(replicas.ports[1].metrics)) as picker:
            found = await picker.get("/debug/decisions/mine")
            both = await picker.get("/debug/decisions")
            own = await picker.get("/debug/decisions?replicas=false")
            with pytest.raises(PickerClientError, match="no decision on mine") as alone:
                await picker.get("/debug/decisions/mine?replicas=false")
            with pytest.raises(PickerClientError, match="of this replica and of 1 other replica"):
                await picker.get("/debug/decisions/another")
            await replicas.end(0, signal.SIGKILL)
            while (await picker.get("/debug/decisions?limit=1"))["unreachable"] != [names[0]]:
                await asyncio.sleep(0.05)
            with pytest.raises(PickerClientError, match=f"no answer from {names[0]}"):
                await picker.get("/debug/decisions/mine")

    assert (found["replica"], found["picked"][0]) == (names[0], answer.endpoint)
    assert [one["session"] for one in both["decisions"]] == ["theirs", "mine"]
    assert (both["unreachable"], list(both["others"])) == ([], [names[0]])
    assert [one["session"] for one in own["decisions"]] == ["theirs"]
    assert alone.value.status == 404
