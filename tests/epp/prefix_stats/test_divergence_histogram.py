"""Tests of the histogram of cached prompt tokens."""

from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.prefix_stats.divergence_histogram import DivergenceHistogram

pairs = st.lists(st.tuples(st.integers(1, 2_000_000), st.integers(0, 2_000_000)).map(sorted), max_size=20)


@given(pairs)
def test_every_prompt_is_in_one_row(prompts: list[list[int]]) -> None:
    """Each request counts between two bounds, and the totals are those of all requests."""
    histogram = DivergenceHistogram()
    for matched, tokens in prompts:
        histogram.record(tokens, matched, 100.0)
    page = histogram.document(100.0)
    assert (page["requests"], page["tokens"]) == (len(prompts), sum(tokens for _, tokens in prompts))
    assert page["matched_tokens"] == sum(matched for matched, _ in prompts)
    for row in page["parted"]:
        before = row["before"]
        least = 1 << 20 if before is None else before // 2 if before > 16 else 0
        inside = [matched for matched, _ in prompts if least <= matched < (before or 1 << 40)]
        assert row["requests"] == len(inside)
    assert sum(row["requests"] for row in page["parted"]) == len(prompts)


def test_prompts_fade() -> None:
    """A prompt is no longer reported after ten minutes."""
    histogram = DivergenceHistogram()
    histogram.record(100, 50, 0.0)
    assert histogram.document(599.0)["parted"] == [{"before": 64, "requests": 1}]
    assert histogram.document(600.0) == {"requests": 0, "tokens": 0, "matched_tokens": 0, "parted": []}
