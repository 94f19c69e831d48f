"""Priorities that requests state, and those that engines receive."""

from typing import Any

import pytest
from tests.epp.parts import ask, chat, make

from kvist_epp.errors import BadRequest
from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.flowcontrol.priorities import Priorities
from kvist_epp.names import ENGINE_PRIORITY_HEADER, PRIORITY_HEADER

LONG = "The library opens at nine and closes when the last reader has left. " * 12


@pytest.mark.parametrize("text", ["high", "1.5", "", "9" * 30, "2147483648", "1,2", "½"])
async def test_a_priority_that_is_none_is_refused(pickers: Any, text: str) -> None:
    """400 that names the header, whether or not there is room."""
    with pytest.raises(BadRequest, match="x-kvist-priority") as caught:
        pickers().decide(ask(chat("x"), headers={PRIORITY_HEADER: text}))
    assert caught.value.reason == "bad-priority"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({PRIORITY_HEADER: "7"}, "-7"),
        ({PRIORITY_HEADER: " -3 "}, "3"),
        ({PRIORITY_HEADER: "0"}, "0"),
        ({"x-llm-d-inference-objective": "batch"}, "10"),
        ({"x-gateway-inference-objective": "object"}, "-4"),
        ({"x-gateway-inference-objective": "unheard-of"}, "0"),
        ({PRIORITY_HEADER: "1", "x-llm-d-inference-objective": "batch"}, "-1"),
    ],
)
async def test_the_engine_receives_the_priority(headers: dict[str, str], expected: str | None) -> None:
    """With --scheduling-policy=priority a request that names a priority carries it on, lower first as vLLM
    has it; one that names none keeps what it brought."""
    answers = []
    for engine_priorities in (False, True):
        priorities = Priorities({"batch": -10})
        priorities.objectives = {"object": 4, "batch": 99}.get
        parts = make(1, priorities=priorities, engine_priorities=engine_priorities)
        answer = parts.decide(ask(chat("x"), headers=headers))
        assert isinstance(answer, PickResult)
        answers.append(answer)
    silent, telling = answers

    assert ENGINE_PRIORITY_HEADER not in dict(silent.headers)
    assert dict(telling.headers).get(ENGINE_PRIORITY_HEADER) == expected
