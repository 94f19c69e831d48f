"""Figures of one engine from scrapes: batch size, recent counters, models served."""

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.endpoints.engine_state import BatchLimit, CounterDeltas, RecentCounters, partly_served
from kvist_epp.engines.vllm.engine_metrics import EngineSample, ServedModels


def scraped(limit: int, load: list[int]) -> list[int]:
    """Return the estimated batch size after each scrape of an engine of ``limit`` that has these requests."""
    batch, found = BatchLimit(), []
    for there in load:
        batch.observe(min(there, limit), max(0, there - limit))
        found.append(batch.limit)
    return found


def test_an_engine_without_waiting_requests_may_run_more() -> None:
    """An engine of 1,024 that is always sent as many requests as estimated is known within 14 scrapes."""
    batch, sent, scrapes = BatchLimit(), 256, 0
    while sent < 1024:
        batch.observe(sent, 0)
        sent, scrapes = max(sent, batch.limit), scrapes + 1

    assert scrapes <= 14


def test_waiting_requests_reveal_the_batch_size() -> None:
    """Once requests wait, the running ones are the batch; then the estimate is probed again, by one at
    first."""
    assert scraped(64, [64, 70, 64, 65, 64]) == [65, 64, 65, 64, 65]


def test_an_idle_engine_keeps_its_estimate() -> None:
    """An idle engine is not mistaken for a small one."""
    assert scraped(64, [40, 3, 0]) == [41, 41, 41]


def sample(number: float, *, preemptions: float = 0.0) -> EngineSample:
    """Return the sample of an engine after ``number`` requests."""
    return EngineSample(
        prefills=number,
        preemptions=preemptions,
        queries=number * 100,
        hits=number * 40,
        prompt_tokens=number * 100,
    )


def test_the_oldest_of_ten_minutes_is_the_base() -> None:
    """Deltas span the time from the first sample of the oldest slot to the newest sample."""
    recent = RecentCounters()
    assert recent.deltas() == CounterDeltas()
    for second in range(0, 1200, 2):
        recent.observe(sample(second, preemptions=second / 4), float(second))
    assert recent.deltas() == CounterDeltas(598.0, 598.0, 149.5, 59_800.0, 23_920.0)


def test_a_restart_begins_anew() -> None:
    """Counters that fell belong to a new process, and start again from zero."""
    recent = RecentCounters()
    recent.observe(sample(50), 0.0)
    recent.observe(sample(3), 10.0)
    assert recent.deltas() == CounterDeltas()
    recent.observe(sample(5), 20.0)
    assert recent.deltas() == CounterDeltas(10.0, 2.0, 0.0, 200.0, 80.0)


def _engine(
    number: int, *adapters: str, models: tuple[str, ...] = ("base",)
) -> tuple[Endpoint, ServedModels]:
    endpoint = Endpoint(f"e{number}", "t", f"10.0.0.{number}", 8000)
    return endpoint, ServedModels(models=frozenset(models), adapters=frozenset(adapters))


def test_a_model_on_some_engines_lists_them() -> None:
    """An adapter on two of three engines lists the two; one on all engines, like the base model, is left
    out."""
    engines = [
        _engine(1, "all", "some"),
        _engine(2, "all"),
        _engine(3, "all", "some", models=("base", "other")),
    ]

    assert partly_served(engines) == {
        "some": ("10.0.0.1:8000", "10.0.0.3:8000"),
        "other": ("10.0.0.3:8000",),
    }


def test_engines_with_unknown_models_are_not_counted() -> None:
    """An engine whose ``/v1/models`` cannot be read neither adds to nor takes from the result."""
    silent = _engine(9, models=())

    assert partly_served([silent, _engine(1, "a"), _engine(2, "a")]) == {}
    assert partly_served([silent, _engine(1, "a"), _engine(2)]) == {"a": ("10.0.0.1:8000",)}
    assert partly_served([silent]) == partly_served([]) == {}
