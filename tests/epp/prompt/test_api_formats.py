"""Promises of ``dialects``: what of the Responses and Messages APIs is claimed, and what is not."""

import json
from typing import Any

import pytest

from kvist_epp.prompt.request import Chat, Kind, parse

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hi"}
SCREENSHOT = {"type": "tool_result", "content": [{"type": "image"}]}


def ask(path: str, **fields: Any) -> Any:
    """A parsed request."""
    return parse(path, json.dumps({"model": "m", **fields}).encode())


def test_responses_become_a_chat() -> None:
    """Instructions first; the engine adds the tokenizer's own tokens here."""
    request = ask(RESPONSES, input="hi", instructions="Brief.", max_output_tokens=5, stream=True)
    assert (request.kind, request.chat, request.max_tokens, request.stream, request.add_special_tokens) == (
        Kind.RESPONSES,
        Chat([{"role": "system", "content": "Brief."}, USER], reorder_calls=False),
        5,
        True,
        True,
    )


def test_messages_become_a_chat() -> None:
    """A system text, turns, and results of tools before what the user says."""
    content = [{"type": "text", "text": "so?"}, {"type": "tool_result", "tool_use_id": "c", "content": "17"}]
    request = ask(MESSAGES, system="Brief.", messages=[{"role": "user", "content": content}], max_tokens=5)
    assert (request.kind, request.chat, request.max_tokens, request.exact) == (
        Kind.MESSAGES,
        Chat(
            [
                {"role": "system", "content": "Brief."},
                {"role": "tool", "tool_call_id": "c", "content": "17"},
                {"role": "user", "content": "so?"},
            ]
        ),
        5,
        True,
    )


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (RESPONSES, {"input": "x", "previous_response_id": "r"}),
        (RESPONSES, {"input": "x", "prompt": {"id": "p"}}),
        (RESPONSES, {"input": "x", "truncation": "auto"}),
        (RESPONSES, {"input": "x", "chat_template_kwargs": {"chat_template": "t"}}),
        (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": []}]}),
        (RESPONSES, {"input": [{"type": "message"}]}),
        (RESPONSES, {"input": [{"role": "assistant", "content": []}]}),
        (RESPONSES, {"input": [{"type": "function_call", "call_id": "c"}]}),
        (MESSAGES, {"messages": [USER, {"role": "system", "content": "s"}]}),
        (MESSAGES, {"messages": [{"role": "user"}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}),
        (
            MESSAGES,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}
                ]
            },
        ),
        (MESSAGES, {"messages": [USER], "tools": [{"name": "f"}]}),
    ],
)
def test_what_is_not_proven_is_not_claimed(path: str, fields: dict[str, Any]) -> None:
    """State on the server, truncation and unknown items are routed by load."""
    request = ask(path, **fields)
    assert (request.model, request.chat, request.exact) == ("m", None, False)


def test_thinking_switched_off_is_rendered_but_not_exact() -> None:
    """Which effort stands for it depends on a probe inside the engine."""
    request = ask(MESSAGES, messages=[USER], thinking={"type": "disabled"})
    assert (request.exact, request.chat.variables) == (
        False,
        {"reasoning_effort": "none", "enable_thinking": False},
    )
