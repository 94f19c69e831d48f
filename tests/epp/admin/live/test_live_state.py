"""The document of one replica, from a picker with all its parts."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.epp.parts import MODEL, Parts, ask, chat, make

from kvist_epp.admin.live.endpoint_condition import DEGRADED, DOWN, FULL, OK
from kvist_epp.admin.live.live_state import LiveSources, LiveState
from kvist_epp.admin.live.replica_merge import merged
from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.endpoints.engine_state import ScrapeState
from kvist_epp.engines.vllm.engine_metrics import EngineSample
from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.flowcontrol.flow_controller import FlowLimits
from kvist_epp.prompt.model import NO_TEMPLATE
from kvist_epp.settings.settings import Settings

SECRET = "the code of the safe"
Json = dict[str, Any]


class Picker:
    """A registry without scrapes and events, and its live state."""

    def __init__(self, endpoints: int = 2, **settings: Any) -> None:
        self.parts: Parts = make(0, limits=FlowLimits())
        chosen = Settings(max_num_seqs=4, endpoints_file="/etc/kvist/pool.yaml", model="x", **settings)
        self.registry = EndpointRegistry(chosen, self.parts.director, self.parts.clock, scrape_interval=0.0)
        self.picks: list[Mapping[str, Any]] = []
        self.warnings: list[str] = []
        sources = LiveSources(
            latest_picks=lambda count: self.picks[:count],
            not_ready=str,
            warnings=lambda: self.warnings,
            clock=self.parts.clock,
            wall_clock=lambda: 1000.0 + self.parts.clock.now,
            version="1.2.3",
        )
        self.state = LiveState(chosen, self.registry, sources)
        self.follow(*range(endpoints))

    def follow(self, *numbers: int) -> None:
        """Set the endpoints."""
        self.registry.follow(EndpointSet(tuple(Endpoint(f"e{n}", "t", f"10.0.0.{n}", 80) for n in numbers)))

    def send(self, text: str = SECRET) -> PickResult:
        """Send one request."""
        answer = self.parts.decide(ask(chat(text)))
        assert isinstance(answer, PickResult)
        return answer

    def sample(self, seconds: float = 10.0) -> None:
        """Take a sample after this time."""
        self.parts.clock.now += seconds
        finish(self.state.sample())

    def document(self) -> Json:
        """Return the document as a replica sends it."""
        found: Json = json.loads(msgspec.json.encode(finish(self.state.document())))
        return found

    def rows(self) -> dict[str, Json]:
        """Return the merged rows by name."""
        return {row["name"]: row for row in merged(self.document(), {})["endpoints"]}


def finish(steps: Any) -> Any:
    """Run a generator to its end and return its result."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value


async def test_rates_and_sums_are_those_of_the_window() -> None:
    """Requests per second count the last ten seconds, sums the time since the oldest sample."""
    picker = Picker()
    picker.sample()
    for number in range(20):
        picker.parts.end(picker.send(f"question {number}").session)
    picker.sample()
    found = picker.document()

    assert found["traffic"]["requests_per_second"] == 2.0
    assert found["traffic"]["picked"] == 20
    assert found["window_seconds"] == 10.0
    assert found["history"]["requests_per_second"] == [2.0]
    assert sum(row["requests_per_second"] for row in found["endpoints"]) == pytest.approx(2.0)
    assert found["ttft"]["predicted"][-1] == 20

    for _ in range(40):
        picker.sample()
    found = picker.document()
    assert (found["traffic"]["picked"], found["traffic"]["since_start"]["picked"]) == (0, 20)
    assert found["window_seconds"] == 290.0
    assert len(found["history"]["requests_per_second"]) == 29


async def test_no_prompt_is_in_the_document() -> None:
    """Numbers, names and reasons only."""
    picker = Picker()
    for _ in range(6):
        picker.parts.end(picker.send().session)
        picker.sample()

    assert SECRET not in json.dumps(picker.document())


async def test_every_condition_has_a_word_and_a_reason() -> None:
    """Each fault of an endpoint is named; the worst come first, the others by their names."""
    picker = Picker(endpoints=12)
    states = picker.registry.scraper.states
    for state in states.values():
        state.state, state.problem = ScrapeState.READY, ""
    states["t/e3"].state, states["t/e3"].problem = ScrapeState.UNREACHABLE, "connection refused"
    states["t/e5"].metrics_problem = "its /metrics page is not vLLM's"
    picker.parts.director.tracker.calibrate("t/e7", slots=4, kv_full_at=0)
    found = merged(picker.document(), {})["endpoints"]
    rows = {row["name"]: (row["state"], row["severity"]) for row in found}

    assert rows["t/e3"] == ("unreachable", DOWN)
    assert rows["t/e7"] == ("full", FULL)
    assert rows["t/e5"] == ("no metrics", DEGRADED)
    assert rows["t/e0"] == ("approximate", OK), "a choice, not a fault"
    assert [row["name"] for row in found][:5] == ["t/e3", "t/e7", "t/e5", "t/e0", "t/e1"]
    assert [row["name"] for row in found][-2:] == ["t/e10", "t/e11"]
    reasons = {row["name"]: row["reason"] for row in found}
    assert reasons["t/e3"] == "connection refused"
    assert reasons["t/e7"] == "its KV cache is full with 0 sequences"
    assert reasons["t/e0"] == picker.registry.why_approximate("t/e0")


async def test_without_prefix_matching_an_endpoint_is_simply_ready() -> None:
    """Approximate mode is no condition where no prefix is matched."""
    picker = Picker(prefix_matching=False)
    picker.registry.scraper.states["t/e0"].state = ScrapeState.READY
    picker.registry.scraper.states["t/e0"].problem = ""

    assert picker.rows()["t/e0"]["severity"] == OK


async def test_figures_of_an_engine_that_is_not_measured_are_unknown() -> None:
    """Nothing is made up: no running requests, no KV cache use; the picker's own account stays."""
    picker = Picker(endpoints=1)
    picker.send()
    state = picker.registry.scraper.states["t/e0"]
    state.problem = "not scraped yet"
    unknown = picker.rows()["t/e0"]
    state.state, state.problem = ScrapeState.READY, ""
    state.sample = EngineSample(running=3, waiting=1, cache_usage=0.25, size_tokens=1000)
    known = picker.rows()["t/e0"]

    assert (unknown["running"], unknown["kv_usage"], unknown["requests"]) == (None, None, 1)
    assert (known["running"], known["waiting"], known["kv_usage"], known["kv_tokens"]) == (3, 1, 0.25, 1000)


async def test_each_tier_of_an_endpoint_has_its_tokens() -> None:
    """Host memory is the endpoint's own, shared storage that of all endpoints that share it; the GPU's part
    is the KV cache's."""
    picker = Picker(endpoints=2)
    index, lookup = picker.parts.director.index, picker.parts.director.lookup
    engine, storage = index.publisher("t/e0/0"), index.publisher("storage/v")
    lookup.storages = {"v": storage}
    for key, publishers in (("t/e0", (engine,)), ("t/e1", ())):
        member = picker.registry.states[key].member
        member.publishers, member.storage = publishers, "v"
    assert index.stored(engine, (None, None), None, [1, 2], [b"aa", b"bb"], block_size=16)
    index.held(engine, [1], "CPU")
    assert index.held_as_others(storage, 2, "SHARED")
    rows = picker.rows()

    assert (rows["t/e0"]["tiers"], rows["t/e1"]["tiers"]) == ({"CPU": 16, "SHARED": 16}, {"SHARED": 16})


async def test_an_endpoint_that_left_is_gone_and_one_that_came_begins_anew() -> None:
    """Neither rows nor samples of an endpoint outlive it."""
    picker = Picker()
    for _ in range(3):
        picker.sample()
    picker.follow(1, 5)
    picker.sample()
    rows = picker.rows()

    assert set(rows) == {"t/e1", "t/e5"}
    assert (len(rows["t/e1"]["history"]["load"]), len(rows["t/e5"]["history"]["load"])) == (4, 1)


async def test_an_endpoint_counts_from_the_moment_it_joins() -> None:
    """Before its first sample an endpoint has the figures of the time since the pool's last one."""
    picker = Picker(endpoints=0)
    picker.sample()
    picker.follow(3)
    for _ in range(6):
        picker.parts.end(picker.send().session)
    picker.parts.clock.now += 3.0
    row = picker.rows()["t/e3"]

    assert row["requests_per_second"] == 2.0
    assert row["prompt_tokens"] > 0
    assert row["hit_rate"]["predicted"] is not None


async def test_saved_prefill_has_a_price_only_if_one_is_set() -> None:
    """GPU time counts all GPUs of an endpoint; money is absent without a price."""
    free, priced = Picker(), Picker(gpu_hour_price=3.0, gpus_per_endpoint=2)
    for picker in (free, priced):
        picker.sample()
        picker.parts.director.metrics.on_saved(36_000, rate=10.0)
    without, found = (merged(picker.document(), {})["traffic"] for picker in (free, priced))

    assert (without["saved_gpu_seconds"], without["saved_money"]) == (3600.0, None)
    assert (found["saved_gpu_seconds"], found["saved_money"]) == (7200.0, 6.0)
    assert (found["saved_tokens"], found["since_start"]["saved_money"]) == (36_000, 6.0)


async def test_what_is_unknown_has_a_reason_and_a_remedy() -> None:
    """Each setting that hides something is named, and is not once it is set."""
    bare, full = Picker(), Picker(observe_responses=True, gpu_hour_price=1.0)
    for _ in range(31):
        full.sample()
    names = {one["what"] for one in bare.document()["unknown"]}

    assert {"money saved", "time to first token as clients see it", "what happened before"} <= names
    assert any("approximate mode" in name for name in names)
    assert all(one["why"] and one["remedy"] for one in bare.document()["unknown"])
    assert not names & {one["what"] for one in full.document()["unknown"]} - {
        name for name in names if "approximate mode" in name
    }


async def test_responses_that_other_gateways_show_are_known() -> None:
    """Without the setting, too, a gateway that is no Envoy shows the time to the first token."""
    picker = Picker()
    picker.parts.director.metrics.responses["usage"] += 1

    assert "time to first token as clients see it" not in {
        one["what"] for one in picker.document()["unknown"]
    }


@pytest.mark.parametrize(
    ("why", "remedy"),
    [
        (NO_TEMPLATE, "--chat-template=FILE, as the engines have it"),
        ("its engines write chats in code of their own", "none: the picker cannot write them yet"),
    ],
)
async def test_chats_that_are_not_rendered_are_said(why: str, remedy: str) -> None:
    """The page names that chats have no prompts, why, and the remedy if there is one."""
    picker = Picker()
    picker.parts.director.model = replace(MODEL, template=None, why_no_chats=why)
    [found] = [one for one in picker.document()["unknown"] if "prompts of chats" in one["what"]]
    assert (found["why"], found["remedy"]) == (why, remedy)


async def test_foreign_requests_and_missing_reports_are_said() -> None:
    """Requests that did not pass through the picker, and ends that no gateway reports, are named."""
    picker = Picker()
    tracker = picker.parts.director.tracker
    tracker.reconcile("t/e0", running=5, waiting=0, now=picker.parts.clock())
    tracker.end_reports.known = False
    names = {one["what"] for one in picker.document()["unknown"]}

    assert "where 5 requests on the engines come from" in names
    assert "when exactly requests end" in names


async def test_the_end_of_prefill_is_noted_once_by_the_events() -> None:
    """The first event that says that a prompt is computed counts; others, and unknown requests, do not."""
    picker = Picker()
    picker.sample()
    answer = picker.send()
    director = picker.parts.director
    request = director.table.find(answer.session)
    assert request is not None
    for backlog, seconds in ((5, 0.1), (0, 0.2), (0, 0.9)):
        director.tracker.on_progress(request.attempt, backlog, 110.0 + seconds)
    found = merged(picker.document(), {})["ttft"]

    assert (found["prefilled"][-1], found["shown"]) == (1, "prefilled")
    assert 0.1 <= found["prefilled_seconds"]["p50"] <= 0.25
    assert found["shown_by"] == "end of prefill by KV events"


async def test_decisions_are_shortened_to_their_first_endpoints() -> None:
    """The page shows the picked endpoint and three more, of twelve decisions."""
    picker = Picker()
    picker.picks = [{"id": str(number), "endpoints": list(range(40))} for number in range(30)]
    found = picker.document()["picks"]

    assert [one["id"] for one in found] == [str(number) for number in range(12)]
    assert found[0]["endpoints"] == [0, 1, 2, 3]
