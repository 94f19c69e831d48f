"""How much of prompts was known, over ten minutes."""

from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.prefix_stats.divergence_histogram import DivergenceHistogram

pairs = st.lists(st.tuples(st.integers(1, 2_000_000), st.integers(0, 2_000_000)).map(sorted), max_size=20)


@given(pairs)
def test_every_prompt_is_in_one_row(prompts: list[list[int]]) -> None:
    """Each request counts between two bounds, and the sums are those of all requests."""
    reuse = DivergenceHistogram()
    for matched, tokens in prompts:
        reuse.record(tokens, matched, 100.0)
    page = reuse.document(100.0)
    assert (page["requests"], page["tokens"]) == (len(prompts), sum(tokens for _, tokens in prompts))
    assert page["matched_tokens"] == sum(matched for matched, _ in prompts)
    for row in page["parted"]:
        before = row["before"]
        least = 1 << 20 if before is None else before // 2 if before > 16 else 0
        inside = [matched for matched, _ in prompts if least <= matched < (before or 1 << 40)]
        assert row["requests"] == len(inside)
    assert sum(row["requests"] for row in page["parted"]) == len(prompts)


def test_prompts_fade() -> None:
    """After ten minutes a prompt is not told of any more."""
    reuse = DivergenceHistogram()
    reuse.record(100, 50, 0.0)
    assert reuse.document(599.0)["parted"] == [{"before": 64, "requests": 1}]
    assert reuse.document(600.0) == {"requests": 0, "tokens": 0, "matched_tokens": 0, "parted": []}
