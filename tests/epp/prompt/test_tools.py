"""Promises of ``tools``: what was parsed is kept for the same bytes, within a bound."""

import json
from typing import Any

import msgspec
import pytest

from kvist_epp.prompt.chat import UnrenderableError
from kvist_epp.prompt.tools import KeptTools, ToolTexts, template_tools


def sent(*names: str, size: int = 0) -> msgspec.Raw:
    """Return tools as a body has them, with a description of this size."""
    functions = [{"name": name, "description": "x" * size} for name in names]
    return msgspec.Raw(json.dumps([{"type": "function", "function": each} for each in functions]).encode())


def test_the_same_bytes_are_parsed_once() -> None:
    """Agents send the same tools each turn, and get the same objects, however many tools they have."""
    kept = KeptTools()
    for names in (["a"], ["a", "b"], [f"tool_{number}" for number in range(300)]):
        first = kept.parse(sent(*names, size=1_000))
        assert first is not None
        assert [tool["function"]["name"] for tool in first] == names
        assert kept.parse(sent(*names, size=1_000)) is first


def test_tools_that_are_absent_are_none() -> None:
    """A body without tools, or with null, has none; an empty list is what the engine rejects."""
    kept = KeptTools()
    assert kept.parse(msgspec.Raw()) is kept.parse(msgspec.Raw(b"null")) is None
    with pytest.raises(UnrenderableError, match="tools"):
        kept.parse(msgspec.Raw(b"[]"))
    for body in (b"{}", b"[1]"):
        with pytest.raises(msgspec.DecodeError):
            kept.parse(msgspec.Raw(body))


def test_one_reading_of_tools_is_not_that_of_another_api() -> None:
    """A set of tools is kept for each way in which its bytes are read."""

    def renamed(tools: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
        return template_tools(
            [{"function": {"name": f"{tool['function']['name']}!"}} for tool in tools], size
        )

    kept = KeptTools()
    shown = [kept.parse(sent("a"), seen) for seen in (template_tools, renamed) * 2]
    assert shown[0] is shown[2]
    assert shown[1] is shown[3]
    assert [tools[0]["function"]["name"] for tools in shown if tools] == ["a", "a!"] * 2


def test_the_least_recent_give_way() -> None:
    """Sets of tools take a bounded number of bytes, small sets no less than a few kilobytes each."""
    kept = KeptTools(max_bytes=200_000)
    first, large = kept.parse(sent("first")), kept.parse(sent("large", size=15_000))
    for number in range(45):
        kept.parse(sent(f"{number}"))
        assert kept.parse(sent("first")) is first
    assert kept.parse(sent("large", size=15_000)) is not large


def test_a_huge_set_does_not_take_the_place_of_all_others() -> None:
    """Tools that would take more than an eighth of the room are parsed for each request."""
    kept = KeptTools(max_bytes=200_000)
    first, huge = kept.parse(sent("first")), kept.parse(sent("huge", size=30_000))
    assert huge is not None
    assert kept.parse(sent("huge", size=30_000)) == huge
    assert kept.parse(sent("huge", size=30_000)) is not huge
    assert kept.parse(sent("first")) is first


def test_texts_of_tools_have_room_for_a_few_times_their_size() -> None:
    """A template cannot fill the memory with what it makes of a few bytes of tools."""
    texts = ToolTexts(10_000)
    assert texts.keep(("large",), "x" * 10_000) == "x" * 10_000
    for number in range(100):
        assert texts.keep((number,), f"{number}") == f"{number}"
    assert texts.get(("large",)) is None
    assert [texts.get((number,)) for number in (0, 99)] == ["0", None]
    assert 40 < len(texts) < 60
