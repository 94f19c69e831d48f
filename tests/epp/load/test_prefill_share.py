"""The share of an endpoint's time that goes to prompts."""

import pytest

from kvist_epp.load.prefill_share import MEMORY_SECONDS, PrefillShare


def test_a_steady_stream_has_its_share() -> None:
    """Prompts of half a second that come once a second take half of the time."""
    share = PrefillShare()
    for second in range(100):
        share.add(0.5, float(second))

    assert share.at(100.0) == pytest.approx(0.5, rel=0.1)


def test_the_past_fades() -> None:
    """A prompt that was sent long ago counts no more, and time never runs backwards."""
    share = PrefillShare()
    share.add(1.0, 5.0)

    assert share.at(4.0) == share.at(5.0) == pytest.approx(1.0 / MEMORY_SECONDS)
    assert share.at(5.0 + 10 * MEMORY_SECONDS) < 1e-4
