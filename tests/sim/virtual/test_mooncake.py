"""Trace files in Mooncake's format: a tiny one of our own making."""

from itertools import islice
from pathlib import Path
from random import Random

import pytest

from kvist_sim.virtual.jobs import BLOCK
from kvist_sim.virtual.workloads.mooncake import prompt, read, trace

TINY = """\
{"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 3]}
{"timestamp": 3000, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]}

{"timestamp": 1000, "input_length": 600, "output_length": 7, "hash_ids": [1, 9]}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The tiny trace."""
    path = tmp_path / "tiny.jsonl"
    path.write_text(TINY)
    return path


def test_equal_ids_are_equal_text(file: Path) -> None:
    """Prompts have the lengths of the trace, and share as many bytes and blocks as they share ids."""
    one, other, longer = (prompt(line) for line in read(file))

    assert [p.tokens for p in (one, other, longer)] == [1_100, 600, 1_024]
    assert [len(p.text) for p in (one, other)] == [4_400, 2_400]
    assert one.blocks[: 512 // BLOCK] == other.blocks[: 512 // BLOCK]
    assert one.blocks[512 // BLOCK] != other.blocks[512 // BLOCK]
    assert one.text.startswith(longer.text)
    assert one.blocks[: len(longer.blocks)] == longer.blocks


def test_the_pattern_of_arrivals_is_the_trace_s(file: Path) -> None:
    """In order of time, with its pauses scaled to the rate asked for, and again from the beginning."""
    shape = trace(file)

    assert list(islice(shape.gaps(Random(0), 2.0), 3)) == pytest.approx([0.5 / 1.5, 1.0 / 1.5, 0.5 / 1.5])
    sessions = [begin(Random(0)) for [begin] in islice(shape.bursts(Random(0)), 4)]
    assert [next(turns).prompt.tokens for turns in sessions] == [1_100, 600, 1_024, 1_100]


def test_answers_are_as_long_as_they_were(file: Path) -> None:
    """``output_length`` tokens follow the prompt."""
    [[first]] = islice(trace(file).bursts(Random(0)), 1)
    turn = next(first(Random(0)))

    assert turn.whole.tokens - turn.prompt.tokens == 20


@pytest.mark.parametrize(("text", "named"), [("{}", "line 1"), ("\n", "no requests")])
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, named: str) -> None:
    """The message names the file and the line."""
    path = tmp_path / "bad.jsonl"
    path.write_text(text)

    with pytest.raises(ValueError, match=rf"bad\.jsonl.*{named}"):
        read(path)
