"""What counters have counted of late."""

from kvist_epp.endpoints.recent_counters import Counted, Recent
from kvist_epp.engines.vllm.engine_metrics import EngineSample


def sample(number: float, *, preemptions: float = 0.0) -> EngineSample:
    """An engine that has ended so many requests."""
    return EngineSample(
        prefills=number,
        preemptions=preemptions,
        queries=number * 100,
        hits=number * 40,
        prompt_tokens=number * 100,
    )


def test_the_oldest_of_ten_minutes_is_the_base() -> None:
    """Counted is what lies between the first sample of the oldest piece and the newest sample."""
    recent = Recent()
    assert recent.counted() == Counted()
    for second in range(0, 1200, 2):
        recent.observe(sample(second, preemptions=second / 4), float(second))
    assert recent.counted() == Counted(598.0, 598.0, 149.5, 59_800.0, 23_920.0)


def test_a_restart_begins_anew() -> None:
    """Counters that fell are those of another process: what the old one did is not counted against it."""
    recent = Recent()
    recent.observe(sample(50), 0.0)
    recent.observe(sample(3), 10.0)
    assert recent.counted() == Counted()
    recent.observe(sample(5), 20.0)
    assert recent.counted() == Counted(10.0, 2.0, 0.0, 200.0, 80.0)
