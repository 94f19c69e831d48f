"""Two real engines that transfer KV cache blocks (NIXL over TCP), a lone one, the picker and Envoy.

The model's weights are random, so that a wrong block changes text and logprobs (``tiny.add_weights``). The
lease of blocks is short, so that tests need not wait for it, and the cache of the engines small.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tests.engine import install, tiny
from tests.engine.mix import COMPLETION
from tests.engine.real_parts import RealParts, logprobs
from tests.engine.vllm import VllmEngine

from kvist_sim.envoy import Mode
from kvist_sim.ports import free_ports
from kvist_sim.processes import Child

BLOCK = 32
BLOCKS = 256
LEASE_SECONDS = 6
LOGPROB_ERROR = 0.01
"""Sums in another order differ by a thousandth; other tokens, or another prompt, by tenths."""
FLAGS = (
    *("--load-format", "safetensors", "--max-model-len", "4096", "--max-num-batched-tokens", "512"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)
CONFIG = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS},
}
EAGERLY = {"TORCHDYNAMO_DISABLE": "1"}
"""vLLM compiles its sampler otherwise, when a request first wants logprobs: half a minute on two busy
cores."""
TIERS = Path(__file__).parent / "tiers"
"""Has the host tier of engines on CPUs."""
UNCHECKED: Mapping[str, Any] = {"health_check": False}
"""Envoy answers 503 by itself while its only picker has not answered a health check for a second: one that
is stopped here, or waits for a CPU on a busy machine."""
OTHERS = 6
"""Prompts that leg 1 of ``PrefillDecode.begin`` waits behind."""
WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "pi",
    "rho",
    "sigma",
    "tau",
    "phi",
]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, as its client has seen it."""

    status: int
    text: str
    """Of streamed tool calls the names alone: vLLM's parser gives another piece of arguments that are not
    complete, or none, when two tokens come at once."""
    logprobs: tuple[float, ...]
    """To three digits."""
    usage: Mapping[str, Any]
    finish: str = ""
    """Why it ended."""
    tokens: tuple[str, ...] = ()
    """Those that chats list with their logprobs."""
    error: str = ""

    @property
    def cached(self) -> int:
        """Cached tokens by its usage."""
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def same(self, other: "Answer") -> bool:
        """Return whether text, tokens and the reason for the end are equal, and the logprobs up to the
        rounding of sums in another order, which batches of another size have."""
        mine = (self.status, self.text, self.finish, self.tokens, len(self.logprobs))
        return mine == (other.status, other.text, other.finish, other.tokens, len(other.logprobs)) and all(
            abs(one - another) < LOGPROB_ERROR
            for one, another in zip(self.logprobs, other.logprobs, strict=True)
        )


def engine(
    model: Path, side_port: int, *flags: str, ports: tuple[int, ...] = (), config: Mapping[str, Any] = CONFIG
) -> VllmEngine:
    """Return an engine that transfers blocks over TCP; its handshakes are served at ``side_port``."""
    environment = {
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join((str(install.nixl()), str(TIERS))),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
        "UCX_TLS": "tcp,self",
        **EAGERLY,
    }
    transfer = ("--kv-transfer-config", json.dumps(config), "--num-gpu-blocks-override", str(BLOCKS))
    return VllmEngine(model, *FLAGS, *transfer, *flags, environment=environment, ports=ports)


class PrefillDecode(RealParts):
    """``async with PrefillDecode(folder) as pool``: two engines that are connected, and a lone one."""

    def __init__(self, folder: Path, *, mode: Mode = "buffered", flags: Sequence[str] = ()) -> None:
        """``flags`` of the picker."""
        super().__init__(folder, mode)
        self._flags = flags
        self.random = random.Random(7)
        self._ended_before = 0.0
        self._background: set[asyncio.Task[None]] = set()

    async def _start(self) -> None:
        self.model = tiny.add_weights(tiny.build("llama3", self._folder / "model"))
        self.sides = free_ports(2)
        lone = VllmEngine(self.model, *FLAGS, environment=EAGERLY)
        self.engines = [*(engine(self.model, port) for port in self.sides), lone]
        await self._start_engines()
        await self._open_client(180)
        self._choose_ports()
        self.picker = await self.start_picker()
        await self._start_envoy(self.engines[:2], **UNCHECKED)

    async def start_picker(self, *more: str) -> Child:
        """Start the picker with more flags, at the ports of the one before."""
        folder = self._folder / f"picker-{len(list(self._folder.iterdir()))}"
        self.listed(("prefill", "decode"))
        flags = ("--disaggregation=on", f"--kv-lease={LEASE_SECONDS}", *self._flags, *more)
        return await self._run_picker(folder, *flags, module="kvist_sim.eager_picker")

    async def replace_picker(self, *more: str, **settings: Any) -> None:
        """Kill the picker, and start another one with more flags; with settings, another Envoy as well.

        Returns when the new one has connected the engines, and Envoy sends it requests.
        """
        await self.kill_picker()
        self.picker = await self.start_picker(*more)
        if settings:
            await self._start_envoy(self.engines[:2], **UNCHECKED, **settings)
        await self.until(WARM, 1)
        while (await self.ask(COMPLETION, {"model": "m", "prompt": "x", "max_tokens": 1})).status == 503:
            await asyncio.sleep(0.1)  # until Envoy connects to it

    async def kill_picker(self) -> None:
        """Kill the picker."""
        self.picker.process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self.picker.process.wait)

    def listed(
        self, roles: Sequence[str | None], compatibility: Sequence[str] = ("x", "x"), **changes: Any
    ) -> None:
        """Write the two engines to the endpoints file, with these roles and labels of compatibility.

        A role that is None leaves its engine out. ``changes``: members of the first engine's entry.
        """
        rows = []
        for number, (role, label) in enumerate(zip(roles, compatibility, strict=True)):
            if role is not None:
                labels = {"kvist.dev/role": role, "kvist.dev/kv-compatibility": label}
                rows.append(self._row(number, **labels) | (changes if number == 0 else {}))
        self._write_endpoints(rows)

    async def restart(
        self, number: int, *flags: str, model: Path | None = None, config: Mapping[str, Any] = CONFIG
    ) -> None:
        """Kill an engine, and start it again at the same ports."""
        old = self.engines[number]
        await old.stop(signal.SIGKILL)
        side = self.sides[number]
        new = engine(model or self.model, side, *flags, ports=old.ports, config=config)
        self.engines[number] = new
        await new.__aenter__()

    # Requests

    def words(self, count: int) -> str:
        """Return random words; a word is about three tokens."""
        return " ".join(self.random.choice(WORDS) for _ in range(count))

    async def ask(self, path: str, body: Mapping[str, Any], **headers: str) -> Answer:
        """Send a request through Envoy."""
        return await self._post(f"{self.envoy.url}{path}", body, headers)

    async def alone(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Send a request to the lone engine."""
        return await self._post(f"{self.engines[2].url}{path}", body, {})

    async def first_leg(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send leg 1 by hand; return the description of its blocks."""
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        first = {**body, "max_tokens": 1, "kv_transfer_params": params}
        async with self.client.post(f"{self.engines[0].url}{COMPLETION}", json=first) as response:
            return dict((await response.json())["kv_transfer_params"])

    async def direct(self, number: int, body: Mapping[str, Any]) -> Answer:
        """Send a completion to one of the two engines."""
        return await self._post(f"{self.engines[number].url}{COMPLETION}", body, {})

    async def overwrite(self, number: int) -> None:
        """Have an engine compute other prompts until none of its blocks is as before."""
        for _ in range(5):
            answer = await self.direct(number, self.filler())
            assert answer.status == 200, answer

    async def begin(self, body: Mapping[str, Any]) -> "asyncio.Task[Answer]":
        """Send a completion, and return it in its leg 1, which waits behind other prompts.

        Raises AssertionError if no leg 1 was under way when it was looked at, ten times.
        """
        for _ in range(10):
            self._ended_before = await self.counted(FINISHED, 0)
            others = [asyncio.create_task(self._fill()) for _ in range(OTHERS)]
            await asyncio.sleep(0.1)
            asked = asyncio.create_task(self.ask(COMPLETION, body))
            while not asked.done():
                if await self.counted(SPLIT) > await self.counted(ENDED_LEGS):
                    self._background.update(others)
                    return asked
            await asyncio.gather(*others)
        raise AssertionError("leg 1 always ended before it was seen")

    async def leg_1_has_ended(self) -> None:
        """Wait until the prefill engine has answered what ``begin`` has sent to it."""
        await self.until(FINISHED, self._ended_before + OTHERS + 1, 0)

    async def _fill(self) -> None:
        with contextlib.suppress(aiohttp.ClientError):  # the engine may be killed on purpose
            await self.direct(0, self.filler())

    def filler(self) -> dict[str, Any]:
        """Return a completion of one token, whose prompt is new and has 2,500 tokens: a third of a cache."""
        prompt = [self.random.randrange(300) for _ in range(2500)]
        return {"model": "m", "prompt": prompt, "max_tokens": 1}

    async def _post(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Answer:
        async with self.client.post(url, json=body, headers=headers) as response:
            data = await response.text()
        if response.status != 200:
            return Answer(response.status, "", (), {}, error=data[:300])
        parts = _events(data) if body.get("stream") else [json.loads(data)]
        text, values, tokens, usage, finish = "", list[float](), list[str](), dict[str, Any](), ""
        for part in parts:
            usage = part.get("usage") or usage
            for choice in part.get("choices") or ():
                piece = choice.get("message") or choice.get("delta") or choice
                text += piece.get("content") or piece.get("text") or ""
                for call in piece.get("tool_calls") or ():
                    text += call["function"].get("name") or ""
                    text += "" if body.get("stream") else call["function"].get("arguments") or ""
                tokens += [one["token"] for one in (choice.get("logprobs") or {}).get("content") or ()]
                values += [round(value, 3) for value in logprobs(choice)]
                finish = choice.get("finish_reason") or finish
        return Answer(200, text, tuple(values), usage, finish, tuple(tokens))

    async def figures(self, engine: int | None = None) -> dict[str, float]:
        """Return the metrics of the picker, or of an engine, by series; vLLM's without their labels'
        order."""
        url = f"http://127.0.0.1:{self.metrics_port}" if engine is None else self.engines[engine].url
        async with self.client.get(f"{url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[:1] != "#"}

    async def series(self, name: str, engine: int | None = None) -> dict[str, float]:
        """Return the series whose names match a regular expression."""
        return {key: value for key, value in (await self.figures(engine)).items() if re.fullmatch(name, key)}

    async def counted(self, name: str, engine: int | None = None) -> float:
        """Return the sum of the series whose names match a regular expression."""
        return sum((await self.series(name, engine)).values())

    async def is_trusted(self) -> bool:
        """Return whether the picker trusts its index of both engines."""
        return await self.counted("kvist_epp_index_trust.*") == 2

    async def until(self, name: str, value: float, engine: int | None = None) -> None:
        """Wait until a metric is at least this; the test's time limit bounds it."""
        while await self.counted(name, engine) < value:
            await asyncio.sleep(0.1)

    async def until_below(self, name: str, value: float, engine: int | None = None) -> None:
        """Wait until a metric is less than this; the test's time limit bounds it."""
        while await self.counted(name, engine) >= value:
            await asyncio.sleep(0.1)

    @contextlib.asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """Stop the picker's process within the block, as a stalled machine would."""
        self.picker.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.picker.process.send_signal(signal.SIGCONT)


FALLBACKS = r'kvist_epp_disaggregation_fallbacks_total\{reason="%s"\}'
SPLIT = r'kvist_epp_disaggregation_decisions_total\{decision="split"\}'
FINISHED = r'vllm:request_success_total\{.*finished_reason="length".*\}'
ENDED_LEGS = "kvist_epp_disaggregation_prefill_seconds_count"
WARM = r'kvist_epp_disaggregation_pairs\{state="warm"\}'
TRANSFERRED = r'vllm:prompt_tokens_by_source_total\{.*source="external_kv_transfer".*\}'


def _events(data: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in data.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
