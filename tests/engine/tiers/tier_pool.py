"""Two real engines with a host tier and one shared folder, picker and Envoy, and a lone engine without tiers.

The folder is on a small volume of its own (a tmpfs), so that it can be full: mounting needs root.
"""

import asyncio
import os
import random
import re
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine import tiny
from tests.engine.mix import COMPLETION, Mix, Turn
from tests.engine.pool import Outcome, Pool
from tests.engine.prefill_decode import EAGERLY
from tests.engine.real_parts import logprobs
from tests.engine.tiers.record_events import HOST_BLOCKS, tiered_engine, transfer_config
from tests.engine.vllm import VllmEngine

from kvist_epp.engines.vllm.engine_metrics import parse_metrics
from kvist_epp.engines.vllm.tier_metrics import DEVICE, HOST, source_of
from kvist_epp.names import LABEL_KV_STORAGE

ADAPTER = "adapter"
LORA = ("--enable-lora", "--max-lora-rank", str(tiny.RANK), "--max-loras", "1")
VOLUME_MIB = 256
PREFILL_RATE = 1_000
"""Tokens/s at which the picker takes prompts to be computed: these are too short for it to learn the rate. So
low that a folder is quicker on a busy machine, too, unless ``speed`` makes it slow."""
FREE = {"host": "0", "files": "0"}
"""As quick as they are."""
QUICK = {"host": "0.002", "files": "0.008"}
"""Seconds a block: a prompt of ten takes 20 ms from host memory and 100 ms from the folder, and 320 to
compute. Without them host memory and GPU would be a tie on a quick machine."""
TRIES = 600
"""Of a wait, a tenth of a second each at least: more than any of them needs on a busy machine."""
_SOURCE = re.compile(r'^vllm:prompt_tokens_cached_by_source_total\{.*source="(\w+)".*\} (\S+)', re.MULTILINE)
_TRUST = re.compile(r'^kvist_epp_index_trust\{endpoint="([^"]+)"\} (\S+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Served:
    """One request through Envoy, with where its cached tokens were expected and where they came from."""

    outcome: Outcome
    predicted: Mapping[str, int]
    """Tokens by source, at the pick."""
    actual: Mapping[str, int]
    """By the engine's counters."""
    lone: tuple[str, tuple[float, ...]]
    """Text and logprobs of the engine without tiers."""

    @property
    def equal(self) -> bool:
        """Whether the answer is that of the lone engine; log probabilities to three digits."""
        text, wanted = self.lone
        found = self.outcome.logprobs
        same = len(found) == len(wanted) > 0
        return (
            same
            and self.outcome.text == text
            and all(abs(a - b) < 2e-3 for a, b in zip(found, wanted, strict=True))
        )


class TierPool(Pool):
    """``Pool`` with tiers; one request at a time can be compared with its engine's counters."""

    _picker_flags = ("--decision-log=1000", f"--prefill-tokens-per-second={PREFILL_RATE}")

    def __init__(self, folder: Path, *, host_blocks: int = HOST_BLOCKS) -> None:
        super().__init__(folder)
        self.self_describing = [True, True]
        """By engine, from its next start on."""
        self.volume = folder / "volume"
        self.mix = TierMix(7)
        self._host_blocks = host_blocks
        for number in range(2):
            self._speeds(number).mkdir()
            self.speed(number, **FREE)

    async def _start(self) -> None:
        self._mount()
        model = tiny.add_weights(tiny.build("llama3", self._folder / "model"))
        tiny.adapter(self._folder / ADAPTER, model)
        self.lone = VllmEngine(
            model,
            *("--no-enable-prefix-caching", "--max-model-len", "640", *self._weights),
            environment=EAGERLY,
        )
        self._stack.push_async_callback(self.lone.stop)
        starting = asyncio.create_task(self.lone.__aenter__())
        try:
            await super()._start()
        finally:
            await starting

    def _mount(self) -> None:
        if os.geteuid() != 0:
            raise RuntimeError("the tests of KV tiers mount a small volume: run them as root")
        self.volume.mkdir()
        options = ("-t", "tmpfs", "-o", f"size={VOLUME_MIB}m", "none")
        subprocess.run(("mount", *options, str(self.volume)), check=True)
        self._stack.callback(subprocess.run, ("umount", "-l", str(self.volume)), check=True)

    @property
    def _weights(self) -> tuple[str, ...]:
        adapter = ("--lora-modules", f"{ADAPTER}={self._folder / ADAPTER}")
        return ("--load-format", "safetensors", *LORA, *adapter)

    def _build_model(self) -> Path:
        return self._folder / "model"

    def _engine(self, number: int, ports: tuple[int, ...] = ()) -> VllmEngine:
        config = transfer_config(
            self.volume / "blocks",
            self_describing=self.self_describing[number],
            tier={"type": "SlowFiles", "module_path": "offload_on_cpu"},
            host_blocks=self._host_blocks,
            kv_load_failure_policy="recompute",
        )
        variables = {"TIER_SPEEDS": str(self._speeds(number)), **EAGERLY}
        return tiered_engine(self.model, config, *self._weights, ports=ports, environment=variables)

    def _endpoint(self, number: int) -> dict[str, Any]:
        found = super()._endpoint(number)
        found["labels"][LABEL_KV_STORAGE] = "shared"
        return found

    def _speeds(self, number: int) -> Path:
        return self._folder / f"speeds-{number}"

    def speed(self, number: int, **tiers: str) -> None:
        """Set how long an engine's loads take: seconds a block, or ``closed``: none ends."""
        for tier, text in tiers.items():
            fresh = self._speeds(number) / "fresh"
            fresh.write_text(text)
            fresh.replace(self._speeds(number) / tier)

    def clean(self) -> int:
        """Remove all blocks from the shared folder, as a job might; return how many there were."""
        blocks = list(self.volume.rglob("*.bin"))
        for block in blocks:
            block.unlink(missing_ok=True)
        return len(blocks)

    def fill(self) -> None:
        """Leave no room on the volume of the shared folder."""
        with suppress(OSError), (self.volume / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

    def free(self) -> None:
        """Give the room back."""
        (self.volume / "ballast").unlink()

    async def only(self, *numbers: int) -> None:
        """List these engines, and wait until the picker trusts its index of them."""
        self.listed(*numbers)
        wanted = {self.engines[number].hostport: 1.0 for number in numbers}
        await wait_for("trust in the engines that are listed", lambda: self._trusts(wanted))

    async def _trusts(self, wanted: Mapping[str, float]) -> bool:
        return await self.trusted() == wanted

    async def trusted(self) -> dict[str, float]:
        """Return 1 or 0 by endpoint: whether the picker trusts its index there."""
        page = await self.page("/metrics")
        return {name: float(value) for name, value in _TRUST.findall(page)}

    async def settled(self, looks: int = 3) -> None:
        """Wait until no events come between so many looks: a block reaches the folder after its request's
        answer."""
        seen, quiet = -1, 0

        async def is_quiet() -> bool:
            nonlocal seen, quiet
            publishers = (await self.page("/debug/index"))["publishers"].values()
            messages = sum(publisher["messages"] for publisher in publishers)
            quiet = quiet + 1 if messages == seen else 0
            seen = messages
            return quiet == looks

        await asyncio.sleep(0.1)
        await wait_for("an end of the events", is_quiet)

    async def compute(self, number: int, bodies: Sequence[Mapping[str, Any]]) -> None:
        """Send requests to one engine, past the picker, which learns of them by events."""
        for body in bodies:
            await self.direct(number, completion(body))
        await self.settled()

    async def explain(self, body: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Return what the picker says of a request, by engine."""
        url, headers = f"http://127.0.0.1:{self.metrics_port}/debug/pick", {"x-kvist-path": COMPLETION}
        async with self.client.post(url, json=completion(body).body, headers=headers) as response:
            rows = (await response.json())["endpoints"]
        numbers = {engine.hostport: number for number, engine in enumerate(self.engines)}
        return {numbers[row["endpoint"]]: row for row in rows}

    async def tiers(self, number: int) -> dict[str, Any]:
        """Return what the picker knows of the speed of an engine's tiers."""
        page = await self.page("/debug/fleet")
        [row] = [row for row in page["endpoints"] if row["endpoint"] == self.engines[number].hostport]
        return dict(row["tiers"])

    async def evict(self, number: int, body: Mapping[str, Any], source: str) -> None:
        """Compute other prompts on an engine until it holds nothing of this one on the GPU (``device``), or
        there and in host memory (``host``)."""
        gone, at_once = ({DEVICE}, 1) if source == DEVICE else ({DEVICE, HOST}, 3)
        for _ in range(30):
            if not gone & set(expected((await self.explain(body))[number])):
                return
            await self.compute(number, [self.mix.fresh() for _ in range(at_once)])
        raise AssertionError(f"{(await self.explain(body))[number]}: still there")

    async def sources(self, number: int) -> Counter[str]:
        """Return an engine's cached prompt tokens by source since its start."""
        async with self.client.get(f"{self.engines[number].url}/metrics") as response:
            page = await response.text()
        return Counter({source: int(float(value)) for source, value in _SOURCE.findall(page)})

    async def bytes_read(self, number: int) -> float:
        """Return the bytes that an engine has read from its storage since its start."""
        async with self.client.get(f"{self.engines[number].url}/metrics") as response:
            return parse_metrics(await response.text()).tiers.read_bytes

    async def serve(self, turn: Turn, **headers: str) -> Served:
        """Send one request through Envoy and, meanwhile, to the lone engine; nothing else may run."""
        before = [await self.sources(number) for number in range(2)]
        outcome, lone = await asyncio.gather(self.ask(turn, **headers), self.alone(turn))
        after = [await self.sources(number) for number in range(2)]
        actual = sum((late - early for early, late in zip(before, after, strict=True)), Counter[str]())
        return Served(outcome, await self.predicted(outcome), actual, lone)

    async def alone(self, turn: Turn) -> tuple[str, tuple[float, ...]]:
        """Return text and log probabilities of the lone engine's answer."""
        async with self.client.post(f"{self.lone.url}{turn.path}", json=turn.body) as response:
            assert response.status == 200, await response.text()
            [choice] = (await response.json())["choices"]
        return choice["text"], logprobs(choice)

    async def predicted(self, outcome: Outcome) -> Counter[str]:
        """Return the tokens that the pick expected from each source, on the endpoint that it picked."""
        decision = await self.page(f"/debug/decisions/{outcome.request_id}")
        [row] = [one for one in decision["endpoints"] if one["endpoint"] == outcome.endpoint]
        return expected(row)


async def wait_for(what: str, ready: Callable[[], Awaitable[bool]]) -> None:
    """Wait until ``ready`` returns True; raise AssertionError if it does not."""
    for _ in range(TRIES):
        if await ready():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"did not come: {what}")


def expected(row: Mapping[str, Any]) -> Counter[str]:
    """Return the cached tokens by source that the picker expects on an endpoint of one of its pages."""
    found: Counter[str] = Counter()
    for tier in row.get("tiers", ()):
        if not tier["skipped"]:
            found[source_of(tier["medium"])] += tier["tokens"]
    found[DEVICE] = row["matched_tokens"] - found.total()
    return +found


class TierMix:
    """Gives requests whose prefixes fit no GPU: documents asked for plainly, with salts, and by adapter."""

    def __init__(self, seed: int, plain: int = 5, salted: int = 3, adapted: int = 2) -> None:
        self.numbers = random.Random(seed)
        texts = Mix(seed, "m")
        document = [texts.text(330)[:330] for _ in range(plain)]
        self.kinds: list[dict[str, Any]] = [{"model": "m", "prompt": text} for text in document]
        for number in range(salted):  # the text of a plain one: only the salt tells them apart
            self.kinds.append({**self.kinds[number % plain], "cache_salt": f"tenant-{number}"})
        self.kinds += [{**self.kinds[number % plain], "model": ADAPTER} for number in range(adapted)]

    def next(self) -> Turn:
        """Return the next request."""
        return self.of(self.numbers.randrange(len(self.kinds)))

    def of(self, kind: int) -> Turn:
        """Return a request of one kind, with a question that no other request has."""
        body = self.kinds[kind]
        question = f" Question {self.numbers.randrange(10**9)}?"
        return completion({**body, "prompt": body["prompt"] + question})

    def fresh(self, **more: Any) -> dict[str, Any]:
        """Return the body of a request for a document of its own."""
        text = Mix(self.numbers.randrange(10**9), "m").text(330)[:330]
        return {"model": "m", "prompt": f"{self.numbers.randrange(10**9)} {text}", **more}


def completion(body: Mapping[str, Any]) -> Turn:
    """Return a request for four tokens and their log probabilities."""
    fixed = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    return Turn(COMPLETION, {**body, **fixed})


def totals(served: Sequence[Served]) -> tuple[Counter[str], Counter[str]]:
    """Return predicted and actual tokens by source."""
    predicted, actual = Counter[str](), Counter[str]()
    for one in served:
        predicted.update(one.predicted)
        actual.update(one.actual)
    return predicted, actual
