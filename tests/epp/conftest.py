"""Fixtures of the picker's tests."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.epp.doors import Door
from tests.epp.parts import Clock


class RealClock(Clock):
    """The time of the event loop."""

    def __call__(self) -> float:
        return time.monotonic()


@pytest.fixture
async def doors() -> AsyncIterator[Any]:
    """Makes doors, and closes them."""
    made: list[Door] = []

    def make_door(count: int = 1, slots: int | None = 1, *, live: bool = False, **limits: Any) -> Door:
        made.append(Door(count, slots, RealClock() if live else Clock(), **limits))
        return made[-1]

    yield make_door
    for door in made:
        door.driver.close()
