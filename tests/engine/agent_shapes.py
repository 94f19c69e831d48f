"""Requests as Codex and Claude Code send them, of which templates that insist on turns refuse many."""

from tests.engine.shapes import AGAIN, ASSISTANT, SYSTEM, USER, Body, text

FUNCTION: Body = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}
FUNCTION_CALL: Body = {
    "type": "function_call",
    "call_id": "call12345",
    "name": "f",
    "arguments": '{"b": 1, "a": 2}',
}
FUNCTION_OUTPUT: Body = {"type": "function_call_output", "call_id": "call12345", "output": "17"}


def said(value: str) -> Body:
    """A part of an answer of the Responses API."""
    return {"type": "output_text", "text": value}


def thought(value: str) -> Body:
    """A part of the reasoning of the Responses API."""
    return {"type": "reasoning_text", "text": value}


ITEMS: dict[str, Body] = {
    "reasoning": {
        "input": [
            USER,
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought("I see."), thought("b")]},
            {"type": "message", "role": "assistant", "content": [said("On the branch.")]},
            AGAIN,
        ]
    },
    "reasoning and calls": {
        "input": [
            USER,
            {"type": "reasoning", "summary": [], "content": [thought("First.")]},
            {"type": "message", "role": "assistant", "content": [said("Looking.")]},
            FUNCTION_CALL,
            {**FUNCTION_CALL, "call_id": "call67890"},
            FUNCTION_OUTPUT,
            {**FUNCTION_OUTPUT, "call_id": "call67890"},
            {"type": "reasoning", "summary": [], "content": [thought("Then.")]},
            {**FUNCTION_CALL, "call_id": "call00000"},
            {**FUNCTION_OUTPUT, "call_id": "call00000"},
        ],
        "tools": [FUNCTION],
    },
    "reasoning twice": {
        "input": [
            USER,
            {"type": "reasoning", "summary": [], "content": [thought("a")]},
            {"type": "reasoning", "summary": [], "content": [thought("b")]},
            {"type": "message", "role": "assistant", "content": "Yes."},
            {"type": "message", "role": "assistant", "content": "Indeed."},
            AGAIN,
        ]
    },
    "reasoning, summary": {
        "input": [USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, AGAIN]
    },
    "reasoning, empty": {"input": [USER, {"type": "reasoning", "summary": []}, AGAIN]},
    "reasoning, encrypted": {
        "input": [USER, {"type": "reasoning", "summary": [], "encrypted_content": "x"}, AGAIN]
    },
    "reasoning, open": {
        "input": [
            USER,
            {"type": "reasoning", "summary": [], "content": [thought("Fir")], "status": "incomplete"},
        ]
    },
    "output parts": {
        "input": [USER, FUNCTION_CALL, {**FUNCTION_OUTPUT, "output": [{"type": "input_text", "text": "17"}]}],
        "tools": [FUNCTION],
    },
    "output without a call": {"input": [USER, FUNCTION_OUTPUT]},
    "custom tool": {
        "input": [
            USER,
            {"type": "custom_tool_call", "call_id": "call12345", "name": "patch", "input": "*** Größe\n"},
            {"type": "custom_tool_call_output", "call_id": "call12345", "output": "done"},
        ],
        "tools": [{"type": "custom", "name": "patch", "description": "Changes files"}, FUNCTION],
    },
    "namespace": {
        "input": [
            USER,
            {**FUNCTION_CALL, "namespace": "crm", "name": "find"},
            FUNCTION_OUTPUT,
        ],
        "tools": [
            {
                "type": "namespace",
                "name": "crm",
                "description": "Clients",
                "tools": [{**FUNCTION, "name": "find"}],
            }
        ],
    },
    "tools of OpenAI": {"input": "Where?", "tools": [{"type": "web_search_preview"}, FUNCTION]},
    "only tools of OpenAI": {"input": "Where?", "tools": [{"type": "web_search_preview"}]},
    "system item": {"input": [SYSTEM, USER], "instructions": "Brief."},
    "system item, no instructions": {"input": [SYSTEM, USER], "tools": [FUNCTION]},
    "item of next year": {"input": [USER, {"type": "telepathy", "id": "1"}]},
}

SYSTEM_BETWEEN: dict[str, Body] = {
    "system between": {"messages": [USER, SYSTEM, ASSISTANT, AGAIN], "system": "Brief."},
    "system between, alone": {"messages": [USER, ASSISTANT, {**SYSTEM, "content": [text("Note.")]}, AGAIN]},
    "system between, billing": {
        "messages": [USER, {**SYSTEM, "content": "x-anthropic-billing-header: 1"}, ASSISTANT, AGAIN]
    },
}

AGENTS: dict[str, dict[str, Body]] = {
    "/v1/responses": ITEMS,
    "/v1/messages": {name: {"max_tokens": 16, **body} for name, body in SYSTEM_BETWEEN.items()},
}
