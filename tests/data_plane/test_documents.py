"""Commands of the documents that need servers: Envoy, a picker, engines."""

import asyncio
import functools
import json
import shlex
import ssl
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from tests.data_plane.product import CHAT, MODEL, product
from tests.data_plane.replicas import replicas
from tests.docs_runner.blocks import Block, blocks, commands
from tests.docs_runner.running import run
from tests.shapes import ROOT

from kvist_epp.settings.settings import Settings
from kvist_sim.envoy import find_envoy
from kvist_sim.envoy_settings import PickerTls
from kvist_sim.http1 import answers
from kvist_sim.launch import HOST, picker_ports
from kvist_sim.processes import Children

README = ROOT / "README.md"
PROMPTS = ROOT / "docs" / "guides" / "prompts.md"
TLS = ROOT / "docs" / "guides" / "tls.md"
Json = dict[str, Any]


@pytest.mark.parametrize("block", commands("data-plane"), ids=lambda block: block.name)
def test_a_block_with_envoy_does_what_it_says(block: Block, tmp_path: Path) -> None:
    """Each command ends well and prints what the document shows."""
    run(block, tmp_path, str(Path(find_envoy()).parent))


def commands_of(file: Path, test: str) -> list[list[str]]:
    """Return the commands of the block with this test's tag, each as words."""
    [block] = [one for one in blocks(file) if one.where == ("run by", test)]
    return [shlex.split(line, comments=True) for line in block.text.splitlines()]


async def test_the_readme_s_picker_says_where_and_why(tmp_path: Path) -> None:
    """The README's two commands work with local engines and without the hub: the picker starts and explains a
    request."""
    serve, ask = commands_of(README, "test_the_readme_s_picker_says_where_and_why")
    (tmp_path / "product").mkdir()
    ports = picker_ports()
    async with product(tmp_path / "product") as running, Children(tmp_path) as children:
        words = {"endpoints.yaml": str(running.file), "hf://Qwen/Qwen3-32B": MODEL}
        argv = [sys.executable, "-m", "kvist_epp", *(words.get(word, word) for word in serve[1:])]
        argv += [f"--grpc-port={ports.grpc}", f"--grpc-health-port={ports.health}"]
        child = children.start("readme", [*argv, f"--metrics-port={ports.metrics}"])
        ready = functools.partial(answers, HOST, ports.metrics, "/readyz")
        await children.ready(child, ready, 60)
        found = await asked(ask, ports.metrics, chat("You are helpful.", "Why?"))

    assert serve[0] == "kvist-epp"
    assert {one["endpoint"] for one in found["endpoints"]} == {one.hostport for one in running.engines}


async def test_a_clock_at_the_front_costs_the_whole_prompt(tmp_path: Path) -> None:
    """A clock at the front of a prompt makes the whole prompt uncached; in the last message it costs
    nothing."""
    [ask] = commands_of(PROMPTS, "test_a_clock_at_the_front_costs_the_whole_prompt")
    rules = "Never tell a secret to people who ask. " * 60
    async with product(tmp_path) as running:
        port = running.picker.metrics_port
        assert (await running.send(chat(rules, "It is ten. Why?")))[0] == 200
        while not await matched(ask, port, chat(rules, "It is ten. Why?")):
            await asyncio.sleep(0.05)
        at_the_end = await matched(ask, port, chat(rules, "It is eleven. Why?"))
        at_the_front = await matched(ask, port, chat(f"It is eleven. {rules}", "Why?"))

    assert at_the_end > 0.9
    assert at_the_front < 0.05


async def test_the_page_has_the_authority_that_verifies(tmp_path: Path) -> None:
    """A client that trusts only what the TLS guide's command prints verifies the picker's certificate."""
    [[*curl, url]] = commands_of(TLS, "test_the_page_has_the_authority_that_verifies")
    where = urlsplit(url)
    only = ("--cert-path=", "--tls-names=picker-service")
    async with replicas(
        tmp_path, transport="fast", secure=True, count=1, more=only, picker_tls=PickerTls()
    ) as running:
        context = ssl.create_default_context(cadata=(await running.page(0, where.path)).decode())
        _, writer = await asyncio.open_connection(
            HOST, running.ports[0].grpc, ssl=context, server_hostname="picker-service"
        )
        writer.close()

    assert (curl, where.port) == (["curl", "-s"], Settings().metrics_port)


def chat(system: str, user: str) -> Json:
    """A request with a system prompt."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"model": "m", "messages": messages, "max_tokens": 4}


async def matched(ask: list[str], port: int, body: Json) -> float:
    """The largest share of the prompt that an engine has."""
    rows = (await asked(ask, port, body))["endpoints"]
    shares = [row["matched_tokens"] / (row["matched_tokens"] + row["uncached_tokens"]) for row in rows]
    return float(max(shares))


async def asked(curl: list[str], port: int, body: Json) -> Json:
    """Send the command's request, with its header and the chat as its file, and return the page."""
    url, header, data = curl[2], curl[4], curl[6]
    assert (curl[:2], data) == (["curl", "-s"], "@request.json")
    name, _, value = header.partition(": ")
    target = f"http://{url.replace('localhost:9090', f'{HOST}:{port}')}"
    async with (
        aiohttp.ClientSession() as client,
        client.post(target, data=json.dumps(body), headers={name: value}) as response,
    ):
        assert (response.status, value) == (200, CHAT)
        found: Json = await response.json()
    return found
