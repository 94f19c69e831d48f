"""Figures as people read them."""

import pytest

from kvist_epp.admin.live import units


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (units.count(None), "–"),
        (units.count(0), "0"),
        (units.count(950), "950"),
        (units.count(12_345), "12.3k"),
        (units.count(999_960), "1M"),
        (units.count(34_000_000), "34M"),
        (units.seconds(0.0001), "0 s"),
        (units.seconds(0.045), "45 ms"),
        (units.seconds(0.9996), "1 s"),
        (units.seconds(1.25), "1.25 s"),
        (units.seconds(90), "90 s"),
        (units.seconds(300), "5 min"),
        (units.seconds(18_000), "5 h"),
        (units.ago(0.4), "just now"),
        (units.ago(4.2), "4 s ago"),
        (units.ago(600), "10 min ago"),
        (units.share(0.784), "78 %"),
        (units.share(0.004), "0.4 %"),
        (units.share(0.0), "0 %"),
        (units.rate(0.25), "0.25/s"),
        (units.rate(1250), "1,250/s"),
        (units.gpu_time(42), "42 GPU-s"),
        (units.gpu_time(750), "12.5 GPU-min"),
        (units.gpu_time(12_240), "3.4 GPU-h"),
        (units.money(0.054), "0.05"),
        (units.money(1234.5), "1,234"),
    ],
)
def test_figures_are_short_and_have_a_unit(shown: str, text: str) -> None:
    """Three digits, the unit that fits, and a dash where nothing is known."""
    assert shown == text


@pytest.mark.parametrize(
    ("medium", "word"),
    [("CPU", "host"), ("STORAGE", "disk"), ("SHARED", "shared"), ("LMCACHE", "LMCache"), ("TAPE", "TAPE")],
)
def test_each_place_of_blocks_has_a_word(medium: str, word: str) -> None:
    """Every medium of KV events has a word, and one that is not known is shown as it is."""
    assert units.tier(medium) == word
