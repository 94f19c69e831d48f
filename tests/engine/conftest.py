"""The order of the files: those that take longest first, so that two workers end at about the same time."""

from typing import Final

import pytest

LONGEST: Final = (
    "test_main_path",
    "test_plan_flags",
    "test_tiers",
    "test_drafts",
    "test_windows",
    "test_disaggregation",
    "test_pooling",
    "test_offload_flags",
    "test_disaggregation_flags",
)
"""More than 90 seconds each of about 40 minutes in all, the longest first. ``--no-loadscope-reorder`` keeps
the order; pytest-xdist would begin with the files that have most tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files; tests of a file keep their order."""

    def place(item: pytest.Item) -> int:
        return LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)

    items.sort(key=place)
