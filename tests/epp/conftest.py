"""Fixtures of the picker's tests."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.epp.doors import Door
from tests.epp.parts import make


@pytest.fixture
async def doors() -> AsyncIterator[Any]:
    """Makes doors, and closes them."""
    made: list[Door] = []

    def make_door(count: int = 1, slots: int | None = 1, *, live: bool = False, **bounds: Any) -> Door:
        parts = make(count)
        if live:
            parts.picker.clock = time.monotonic
        made.append(Door(parts, slots, **bounds))
        return made[-1]

    yield make_door
    for door in made:
        door.queue.close()
