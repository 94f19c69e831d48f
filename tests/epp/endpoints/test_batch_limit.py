"""The batch size of an engine that does not tell it."""

from kvist_epp.endpoints.batch_limit import Batch


def scraped(limit: int, load: list[int]) -> list[int]:
    """What is taken for the batch size of an engine of ``limit`` that has so many requests each time."""
    batch, found = Batch(), []
    for there in load:
        batch.observe(min(there, limit), max(0, there - limit))
        found.append(batch.limit)
    return found


def test_an_engine_that_lets_nobody_wait_may_have_more() -> None:
    """Sent as many as it is thought to take, an engine of 1,024 is found out from 256 within 14 scrapes."""
    batch, sent, scrapes = Batch(), 256, 0
    while sent < 1024:
        batch.observe(sent, 0)
        sent, scrapes = max(sent, batch.limit), scrapes + 1

    assert scrapes <= 14


def test_who_waits_tells_the_size() -> None:
    """Once requests wait, the batch is what runs; then it is tried again, one more at first."""
    assert scraped(64, [64, 70, 64, 65, 64]) == [65, 64, 65, 64, 65]


def test_few_requests_tell_little() -> None:
    """An idle engine is not taken for a small one: what was seen stays."""
    assert scraped(64, [40, 3, 0]) == [41, 41, 41]
