"""Promises of the memory arithmetic against start-up logs of vLLM that people published."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.operator.published import HIGHEST, LOGS, LOWEST, PublishedLog, page_table

from kvist_operator.memory.layout import GIB

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "planning.md").read_text()
WEIGHTS = 2.0
"""Percent by which planned weights may differ: norms, biases and packing are not counted."""
each_log = pytest.mark.parametrize("log", LOGS, ids=[log.name for log in LOGS])


@each_log
def test_the_cache_is_what_the_log_says(log: PublishedLog) -> None:
    """A plan promises at most 2 % more KV cache than the engine had, and at most 6 % less."""
    low, high = log.bounds

    assert low <= log.difference(log.memory) <= high


@each_log
def test_the_tokens_are_what_the_log_says(log: PublishedLog) -> None:
    """With the KV memory of the log, the arithmetic gives its tokens to within half a per cent."""
    if "tokens" in log.entry and "kv" in log.entry and "exception" not in log.entry:
        logged = replace(log.memory, kv=log.entry["kv"] * GIB)

        assert logged.kv_tokens == pytest.approx(log.entry["tokens"], rel=0.005)


@each_log
def test_the_weights_are_what_the_log_says(log: PublishedLog) -> None:
    """Weights agree with "Model loading took", the padding of 4-bit experts included."""
    if "weights" in log.entry:
        assert log.memory.weights / GIB == pytest.approx(log.entry["weights"], rel=WEIGHTS / 100)


@each_log
def test_an_exception_has_a_reason(log: PublishedLog) -> None:
    """Bounds of its own need a reason in the table, and are not stricter than the usual ones."""
    low, high = log.bounds

    assert ("bounds" in log.entry) == bool(log.entry.get("exception"))
    assert low <= LOWEST
    assert high >= HIGHEST


def test_gpt_oss_is_never_promised_more_than_it_had() -> None:
    """Marlin pads the experts of gpt-oss-120b by a tenth, so little is left on one H100, or nothing."""
    logs = [log for log in LOGS if "gpt-oss" in log.name]

    assert len(logs) >= 2
    assert all(log.memory.kv / GIB <= log.entry["kv"] + 0.02 for log in logs)


def test_the_guide_shows_the_figures_of_the_table() -> None:
    """The table of docs/guides/planning.md is the one that the logs and the arithmetic give."""
    assert page_table() in GUIDE
