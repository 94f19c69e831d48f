"""The order of the files: those that take longest first, so that two workers end at about the same time."""

from typing import Final

import pytest

LONGEST: Final = (
    "test_main_path",
    "test_tiers",
    "test_drafts",
    "test_windows",
    "test_plan_flags",
    "test_disaggregation",
    "test_pooling",
)
"""Those of more than two minutes, of half an hour in all. ``--no-loadscope-reorder`` keeps the order;
pytest-xdist would begin with the files that have most tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files; tests of a file keep their order."""

    def place(item: pytest.Item) -> int:
        return LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)

    items.sort(key=place)
