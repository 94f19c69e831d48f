"""Hypothesis strategies that several suites share."""

from hypothesis import strategies as st

MEDIA = ("GPU", "CPU", "cpu", "STORAGE", "somewhere else")

block_texts = st.text(alphabet="ab", min_size=1, max_size=3).map(str.encode)
"""Tiny blocks of few letters and several lengths: the same bytes are often split in more than one way."""

chains = st.lists(block_texts, min_size=1, max_size=6)

prompts = st.text(alphabet="ab", max_size=16).map(str.encode)

media = st.sampled_from(MEDIA)

roots = st.sampled_from([(None, None), ("adapter", None), (None, "salt")])
"""(LoRA adapter, cache salt)"""
