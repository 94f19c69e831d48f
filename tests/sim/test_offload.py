"""KV offloading of the simulated engine: hits, limits, and events in the order of a recorded vLLM."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.epp.kvevents.recorded_tiers import Step, recorded
from tests.sim.engines import engine

from kvist_epp.engines.vllm.kv_events import CPU, GPU, SHARED, Event, Removed, Stored, decode
from kvist_epp.engines.vllm.tier_metrics import TierCounters
from kvist_epp.errors import SettingsError
from kvist_sim.engine.blocks import BlockPool, Hasher
from kvist_sim.engine.offload import Disk, OffloadSettings, OffloadTiers, allowed_media, read_offload
from kvist_sim.engine.scheduler import Limits, Scheduler
from kvist_sim.engine.sequence import Sequence
from kvist_sim.engine.timing import KV_BYTES_PER_TOKEN, Timing

BLOCK = 32
"""As recorded, also below: ``tests.engine.tiers.record_events``."""
GPU_BLOCKS = 24
HOST_BYTES = 40 * BLOCK * KV_BYTES_PER_TOKEN


class Simulated:
    """An engine of the simulator with the places of the recorded one, in virtual time."""

    def __init__(self, folder: Path, *, self_describing: bool = True, bandwidth: float = 1e12) -> None:
        disk = Disk(folder, SHARED, events=True)
        settings = OffloadSettings(
            HOST_BYTES, (disk,), self_describing, False, host_bandwidth=bandwidth, disk_bandwidth=bandwidth
        )
        self.tiers = OffloadTiers(settings, BLOCK)
        limits = Limits(max_num_seqs=8, max_num_batched_tokens=2048, max_model_len=640)
        pool = BlockPool(GPU_BLOCKS, BLOCK)
        self.scheduler = Scheduler(pool, Hasher(BLOCK), limits, self.tiers, prompts_only=False)
        self.now = 0.0

    def ask(
        self, prompt: list[int], salt: str | None = None, **more: Any
    ) -> tuple[Sequence, list[list[Event]]]:
        """Serve a request alone; return it with the messages that it caused."""
        one = Sequence("r", prompt, count(1), 2, self.now, salt=salt, session="s", **more)
        self.scheduler.add(one)
        found: list[list[Event]] = []
        while not self.scheduler.idle:
            plan = self.scheduler.schedule(self.now)
            seconds = Timing().step(plan.prefill_tokens, plan.decoding)
            self.now = self.now + seconds if plan.loaded_at is None else max(self.now, plan.loaded_at)
            self.scheduler.complete(plan, self.now)
            found += self.tiers.batches(self.scheduler.pool.take_events())
        return one, found


class Names:
    """Numbers for hashes, in the order in which a GPU first announces them."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def of(self, hashes: list[int]) -> tuple[int, ...]:
        """Return the numbers of these blocks."""
        return tuple(self._known.setdefault(one, len(self._known)) for one in hashes)

    def message(self, events: list[Event]) -> list[tuple[Any, ...]]:
        """Return what a message says; copies, which engines announce in no order, sorted."""
        found: list[tuple[Any, ...]] = []
        for event in events:
            if isinstance(event, Stored):
                parent = None if event.parent is None else self.of([event.parent])
                size = (len(event.token_ids), event.block_size, event.kind, event.group, event.salt)
                found.append(("stored", event.medium, self.of(event.hashes), parent, *size))
            elif isinstance(event, Removed):
                found.append(("removed", event.medium, self.of(event.hashes), event.group))
        copies = all(one[0] == "stored" and one[1] != GPU for one in found)
        return sorted(found, key=lambda one: one[2]) if copies else found


def told(step: Step) -> list[list[Event]]:
    """Return the recorded messages of a request."""
    return [decode(payload).events for _, payload in step.batches]


@pytest.mark.parametrize("mode", ["self-describing", "placeholders"])
def test_events_come_in_the_order_of_a_real_engine(tmp_path: Path, mode: str) -> None:
    """Request by request, the messages are those that vLLM 0.32 sent: blocks computed, copied to memory and
    on to the disk, pushed out of each, loaded from memory and from the disk, plain and salted."""
    simulated, real, ours = Simulated(tmp_path, self_describing=mode != "placeholders"), Names(), Names()
    for step in recorded(mode).steps:
        one, messages = simulated.ask(step.prompt, step.salt)

        assert one.cached == step.cached, step.session
        expected = [real.message(events) for events in told(step)]
        assert [ours.message(events) for events in messages] == expected, step.session


def test_counters_are_those_of_a_real_engine(tmp_path: Path) -> None:
    """Tokens by source, and bytes of loads and reads, are as recorded, by the bytes of a token there."""
    simulated, steps = Simulated(tmp_path), recorded("self-describing").steps
    loaded = {CPU: 0, SHARED: 0}
    for step in steps:
        one, _ = simulated.ask(step.prompt, step.salt)
        for medium, tokens in one.loaded.items():
            loaded[medium] += tokens
    totals = simulated.tiers.totals()

    assert {"host": loaded[CPU], "disk": loaded[SHARED]}.items() <= steps[-1].sources.items()
    for name in ("load_bytes", "store_bytes", "tiering_read_bytes", "tiering_write_bytes"):
        [line] = [
            x for x in steps[-1].metrics.splitlines() if x.startswith(f"vllm:kv_offload_{name}_total{{")
        ]
        assert totals[f"kv_offload_{name}"] / KV_BYTES_PER_TOKEN == float(line.split()[-1]) / 1024, name
    assert isinstance(simulated.tiers.counters(0), TierCounters)


def test_an_engine_finds_what_another_has_written(tmp_path: Path) -> None:
    """The folder is the disk: a second engine loads from it at first sight; removed files are gone."""
    prompt = list(range(330))
    Simulated(tmp_path).ask(prompt)
    second, _ = Simulated(tmp_path).ask(prompt)
    for file in tmp_path.rglob("*.bin"):
        file.unlink()
    third, _ = Simulated(tmp_path).ask(prompt)

    assert (second.loaded, third.loaded) == ({SHARED: 320}, {})


@pytest.mark.parametrize(
    ("tiers", "media"),
    [
        (None, None),
        ([], []),
        ([{"medium": "CPU"}], ["CPU"]),
        ([{"medium": "STORAGE"}], ["STORAGE", "SHARED"]),
        ([{"medium": "STORAGE", "locality": "LOCAL"}, {"medium": "CPU"}], ["STORAGE", "CPU"]),
        ([{"medium": "STORAGE", "locality": "REMOTE"}], ["SHARED"]),
    ],
)
def test_requests_name_the_tiers_they_may_load_from(tiers: Any, media: list[str] | None) -> None:
    """``kv_load_tiers`` lists matchers; none at all forbids every load, and its absence allows all."""
    assert allowed_media(None if tiers is None else {"kv_load_tiers": tiers}) == (
        None if media is None else frozenset(media)
    )


def test_a_slow_disk_delays_only_who_loads(tmp_path: Path) -> None:
    """The time to the first token has the load, by the bandwidth; with the disk forbidden all is computed."""
    prompt = list(range(330))
    Simulated(tmp_path).ask(prompt)
    times = []
    for allowed in (None, frozenset({CPU})):
        slow = Simulated(tmp_path, bandwidth=320 * KV_BYTES_PER_TOKEN / 2.0)
        one, _ = slow.ask(prompt, load_tiers=allowed)
        times.append((sum(one.loaded.values()), one.first_token))

    assert [tokens for tokens, _ in times] == [320, 0]
    assert [seconds for _, seconds in times] == pytest.approx([4.0, 0.021], abs=0.1)


def test_configurations_are_those_of_vllm(tmp_path: Path) -> None:
    """Sizes by the short flag and by the connector's own, alone or among several; other connectors and tiers
    are none of ours; a size is required."""
    fast = {"host_bandwidth": 1.0, "disk_bandwidth": 1.0}
    tier = {"type": "fs", "root_dir": str(tmp_path), "enable_kv_events": True, "locality": "REMOTE"}
    extra = {"cpu_bytes_to_use": 5, "secondary_tiers": [tier, {"type": "p2p"}], "offload_prompt_only": False}
    own = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    several = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector"}, own]},
    }
    expected = OffloadSettings(5, (Disk(tmp_path, SHARED, events=True),), prompts_only=False)

    assert read_offload(own, None, **fast) == read_offload(several, None, **fast) == expected
    assert read_offload(None, 2.0, **fast) == OffloadSettings(2 << 30)
    assert read_offload({"kv_connector": "NixlConnector"}, None, **fast) is None
    with pytest.raises(SettingsError, match="cpu_bytes_to_use"):
        read_offload({"kv_connector": "OffloadingConnector"}, None, **fast)


async def test_a_running_engine_loads_and_counts(tmp_path: Path) -> None:
    """Over HTTP: a prompt that the GPU has lost comes from memory, the metrics say so, and a request may
    forbid it."""
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BYTES},
    }
    flags = ("--block-size", str(BLOCK), "--num-gpu-blocks-override", "24", "--max-model-len", "640")
    prompts = [[n] * 10 + list(range(3, 323)) for n in range(3, 6)]
    async with engine(*flags, "--kv-transfer-config", json.dumps(config)) as client:
        for prompt in prompts:
            await client.complete(prompt, 2)
        again = await client.complete(prompts[0], 2)
        for prompt in prompts[1:]:
            await client.complete(prompt, 2)
        before = await client.metrics()
        await client.complete(prompts[0], 2, kv_transfer_params={"kv_load_tiers": []})
        page = await client.metrics()

    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 320
    at = 'engine="0",model_name="m"'
    host = f'vllm:prompt_tokens_cached_by_source_total{{{at},source="host"}}'
    assert page[host] == before[host] >= 320
    assert page[f"vllm:kv_offload_load_bytes_total{{{at}}}"] >= 320 * KV_BYTES_PER_TOKEN
    assert page[f"vllm:kv_offload_load_time_total{{{at}}}"] > 0


async def test_engines_without_tiers_have_no_metrics_of_them() -> None:
    """Counters of offloading exist only where there is a connector, as with vLLM."""
    async with engine() as client:
        page = await client.metrics()

    assert not [name for name in page if name.startswith("vllm:kv_offload")]
