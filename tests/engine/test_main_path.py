"""The product's main job on real parts: predictions against what two real vLLM engines report."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from monitoring.alerts import GROUPS
from monitoring.dashboards import DASHBOARDS
from monitoring.promql import named
from tests.engine.mix import CHAT, Mix, Turn
from tests.engine.pool import BLOCK, Outcome, Pool
from tests.monitoring.registries import TARGET, series_of

from kvist_epp.names import TENANT_HEADERS

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    """Two engines, the picker, Envoy."""
    async with Pool(Path(tmp_path_factory.mktemp("pool"))) as running:
        yield running


def error(outcomes: Sequence[Outcome]) -> float:
    """Return the relative difference between the sums of predicted and reported cached tokens."""
    predicted, cached = sum(o.predicted for o in outcomes), sum(o.cached for o in outcomes)
    return abs(predicted - cached) / max(cached, 1)


def short(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Requests predicted short by more than one block."""
    return [o for o in outcomes if o.cached - o.predicted > BLOCK]


def report(name: str, outcomes: Sequence[Outcome]) -> None:
    """Print the figures of a run to the test's output."""
    predicted, cached = sum(o.predicted for o in outcomes), sum(o.cached for o in outcomes)
    exact = sum(o.predicted == o.cached for o in outcomes)
    over = sum(o.predicted > o.cached for o in outcomes)
    prompt = sum(o.prompt_tokens for o in outcomes)
    print(  # noqa: T201 - figures for the log of the run
        f"\n{name}: {len(outcomes)} requests, {prompt} prompt tokens, predicted {predicted}, "
        f"reported {cached} ({error(outcomes):.3%}), exact {exact}, over {over}, "
        f"short by more than a block {len(short(outcomes))}"
    )


async def one_by_one(pool: Pool, mix: Mix, count: int) -> list[Outcome]:
    """Send ``count`` requests, one after the other."""
    return [await pool.ask(mix.next()) for _ in range(count)]


async def predicted_hits(pool: Pool, name: str, count: int) -> list[Outcome]:
    """Send mixed requests one at a time: hits are predicted within 3 %, none short by more than a block, and
    the index stays trusted."""
    outcomes = await one_by_one(pool, Mix(1, "m"), count)
    report(name, outcomes)
    approximate = (await pool.page("/debug/fleet"))["approximate"]
    assert sum(one.cached for one in outcomes) > 50 * count
    assert short(outcomes) == []
    assert error(outcomes) <= 0.03
    assert approximate == {}
    return outcomes


async def test_a_real_engine_exports_what_dashboards_and_alerts_name(pool: Pool) -> None:
    """Each of vLLM's metrics and labels that a panel or a rule names is on the page of a real engine."""
    async with pool.client.get(f"{pool.engines[0].url}/metrics") as response:
        exported = series_of(await response.text())
    expressions = [expr for dashboard in DASHBOARDS for _, expr in dashboard.expressions()]
    expressions += [rule.expr for group in GROUPS for rule in group.records]
    expressions += [rule.expr for group in GROUPS for rule in group.alerts]
    wrong = [
        (name, label)
        for expr in expressions
        for name, labels in named(expr).items()
        if name.startswith("vllm:")
        for label in (labels - TARGET) | {""}
        if label not in exported.get(name, frozenset()) | ({""} if name in exported else set())
    ]
    assert wrong == []


async def test_predictions_are_within_one_percent(pool: Pool) -> None:
    """600 mixed requests one at a time: predicted within 1 %, none short by more than a block."""
    outcomes = await one_by_one(pool, Mix(1, "m"), 600)
    report("one at a time", outcomes)

    assert sum(o.cached for o in outcomes) > 20_000
    assert short(outcomes) == []
    assert error(outcomes) <= 0.01


async def test_dropped_events_are_requested_again(pool: Pool) -> None:
    """100 requests after events were lost on purpose: within 1 %, none short by more than a block."""
    mix = Mix(2, "m")
    await one_by_one(pool, mix, 10)
    pool.relay.drop(5)
    while pool.relay.dropped < 5:
        await pool.ask(mix.next())
    await one_by_one(pool, mix, 4)
    outcomes = await one_by_one(pool, mix, 100)
    report("after lost events", outcomes)

    assert short(outcomes) == []
    assert error(outcomes) <= 0.01
    gaps = [row["gaps"] for row in (await pool.page("/debug/index"))["publishers"].values()]
    assert sum(gaps) >= 1


async def test_a_restarted_engine_is_known_as_such(pool: Pool) -> None:
    """100 requests that begin 30 s after an engine was killed and restarted: within 1 %, none short."""
    mix = Mix(3, "m")
    await one_by_one(pool, mix, 40)
    await pool.restart(0)
    await asyncio.sleep(30)
    outcomes = await one_by_one(pool, mix, 100)
    report("30 s after a restart", outcomes)

    assert {o.endpoint for o in outcomes} == {engine.hostport for engine in pool.engines}
    assert short(outcomes) == []
    assert error(outcomes) <= 0.01


async def test_eight_clients_at_once_are_within_three_percent(pool: Pool) -> None:
    """Eight clients at once, credit on the way counted: cached tokens predicted within 3 %."""

    async def client(number: int) -> list[Outcome]:
        return await one_by_one(pool, Mix(100 + number, "m", conversations=2), 40)

    outcomes = [one for some in await asyncio.gather(*map(client, range(8))) for one in some]
    report("eight at once", outcomes)

    assert error(outcomes) <= 0.03


async def test_repeats_go_to_the_pod_that_holds_them(pool: Pool) -> None:
    """Disjoint warm prefixes on two engines: at least 99 % of repeats, two at a time, go to the right one."""
    mix = Mix(4, "m")
    prefixes = [mix.text(700) for _ in range(8)]

    def turn(number: int, question: str) -> Turn:
        messages = [{"role": "system", "content": prefixes[number]}, {"role": "user", "content": question}]
        return Turn(CHAT, {"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0})

    for number in range(len(prefixes)):
        await pool.direct(number % 2, turn(number, "warm up"))
    await asyncio.sleep(1)
    gate = asyncio.Semaphore(2)

    async def repeat(count: int) -> bool:
        async with gate:
            number = mix.rng.randrange(len(prefixes))
            outcome = await pool.ask(turn(number, f"question {count}"))
            return outcome.endpoint == pool.engines[number % 2].hostport

    right = await asyncio.gather(*map(repeat, range(200)))
    print(f"\nrepeats: {sum(right)} of {len(right)} went to the pod that holds them")  # noqa: T201 - as above

    assert sum(right) >= 0.99 * len(right)


async def test_what_is_handed_over_is_cached_to_the_block(pool: Pool) -> None:
    """A pod that joins is asked for shared prompts as text; chats that begin with them then find as many
    tokens cached there as where chats computed them: no token of any script was split otherwise."""
    mix = Mix(5, "m")
    prefixes = [mix.text(1_400) for _ in range(3)]

    def turn(prefix: str, question: str) -> Turn:
        messages = [{"role": "system", "content": prefix}, {"role": "user", "content": question}]
        return Turn(CHAT, {"model": "m", "messages": messages, "max_tokens": 2, "temperature": 0})

    pool.listed(0)
    await pool.until("kvist_epp_index_trust", 1)
    for prefix in prefixes:
        for tenant in ("one", "two", "three"):
            await pool.ask(turn(prefix, f"I am {tenant}"), **{TENANT_HEADERS[0]: tenant})
            await asyncio.sleep(0.2)
    pool.listed(0, 1)
    while "prewarming ends" not in pool.picker.log.read_text():
        await asyncio.sleep(0.1)

    cached = [[await pool.direct(number, turn(one, "?")) for one in prefixes] for number in (0, 1)]
    print(f"\nhanded over: cached {cached[1]} tokens of prompts whose computer has {cached[0]}")  # noqa: T201 - as above
    assert min(cached[0]) > 10 * BLOCK
    assert cached[1] == cached[0]
