"""Random requests of agents: chats and items of the Responses API, in any order, also odd ones."""

import random
from collections.abc import Callable
from typing import Any

from tests.engine.agent_shapes import FUNCTION, said, thought
from tests.engine.shapes import WEATHER, text

WORDS = ("", "A leaf.", "Größe <|end|> 🌿", " \n")
IDENTIFIERS = ("call12345", "call67890")


def chat(generator: random.Random) -> dict[str, Any]:
    """The body of a chat."""
    body: dict[str, Any] = {"messages": [_message(generator) for _ in range(generator.randrange(1, 9))]}
    if generator.random() < 0.5:
        body["tools"] = [WEATHER]
    if generator.random() < 0.3:
        body["reasoning_effort"] = generator.choice(("low", "medium", "high"))
    return body


def _message(generator: random.Random) -> dict[str, Any]:
    role = generator.choice(("user", "assistant", "assistant", "tool", "system", "developer"))
    content: Any = generator.choice(WORDS)
    if generator.random() < 0.3:
        content = [text(generator.choice(WORDS)) for _ in range(generator.randrange(4))]
    message: dict[str, Any] = {"role": role, "content": content}
    if role == "tool":
        return {**message, "tool_call_id": generator.choice((*IDENTIFIERS, "unknown00"))}
    if role == "assistant" and generator.random() < 0.4:
        message["reasoning"] = generator.choice(WORDS)
    if role == "assistant" and generator.random() < 0.4:
        message["tool_calls"] = [_call(generator) for _ in range(generator.randrange(3))]
        message["content"] = generator.choice((None, content))
    return message


def _call(generator: random.Random) -> dict[str, Any]:
    arguments = generator.choice(('{"city":"Oslo"}', '{"city": "Göteborg", "days": 1.0}', "", "{broken"))
    function = {"name": generator.choice(("get_weather", "ping")), "arguments": arguments}
    return {"id": generator.choice(IDENTIFIERS), "type": "function", "function": function}


def response(generator: random.Random) -> dict[str, Any]:
    """The body of a request of the Responses API."""
    items = [_item(generator) for _ in range(generator.randrange(1, 9))]
    body: dict[str, Any] = {"input": [{"role": "user", "content": "Where?"}, *items]}
    if generator.random() < 0.5:
        body["tools"] = [FUNCTION]
    if generator.random() < 0.5:
        body["instructions"] = generator.choice(WORDS)
    return body


def _item(generator: random.Random) -> dict[str, Any]:
    kind = generator.choice(("reasoning", "answer", "user", "system", "call", "call", "output", "output"))
    word, identifier = generator.choice(WORDS), generator.choice(IDENTIFIERS)
    if kind == "reasoning":
        parts = [thought(generator.choice(WORDS)) for _ in range(generator.randrange(3))]
        return {"type": "reasoning", "summary": [], "content": parts}
    if kind == "answer":
        parts = [said(generator.choice(WORDS)) for _ in range(generator.randrange(1, 3))]
        return {"type": "message", "role": "assistant", "content": generator.choice((word, parts))}
    if kind == "call":
        return {"type": "function_call", "call_id": identifier, "name": "f", "arguments": '{"a":1}'}
    if kind == "output":
        return {"type": "function_call_output", "call_id": identifier, "output": word}
    return {"role": kind, "content": generator.choice((word, [{"type": "input_text", "text": word}]))}


def messages(generator: random.Random) -> dict[str, Any]:
    """The body of a request of the Messages API."""
    body: dict[str, Any] = {
        "max_tokens": 16,
        "messages": [_turn(generator) for _ in range(generator.randrange(1, 9))],
    }
    if generator.random() < 0.5:
        declared = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
        body["tools"] = generator.choice(([declared], [declared], []))
    if generator.random() < 0.2:
        body["messages"].append({"role": "system", "content": [_tool_change(generator)]})
    if generator.random() < 0.2:
        body["thinking"] = generator.choice(({"type": "disabled"}, {"type": "adaptive"}))
    if generator.random() < 0.2:
        body["output_config"] = {"effort": generator.choice(("low", "max"))}
    if generator.random() < 0.2:
        body["tool_choice"] = {"type": generator.choice(("auto", "none"))}
    if generator.random() < 0.6:
        word = generator.choice(WORDS)
        body["system"] = generator.choice((word, [text(word), text("Brief.")]))
    return body


def _turn(generator: random.Random) -> dict[str, Any]:
    role = generator.choice(("user", "assistant", "user", "assistant", "system"))
    if role == "system":
        word = generator.choice((*WORDS, "x-anthropic-billing-header: 1"))
        return {"role": role, "content": generator.choice((word, [text(word), text("Note.")], []))}
    if generator.random() < 0.3:
        return {"role": role, "content": generator.choice(WORDS)}
    make = _block_of_user if role == "user" else _block_of_assistant
    return {"role": role, "content": [make(generator) for _ in range(generator.randrange(4))]}


def _block_of_user(generator: random.Random) -> dict[str, Any]:
    word = generator.choice(WORDS)
    if generator.random() < 0.5:
        return text(word)
    found = {"type": "tool_reference", "tool_name": "f"}
    content = generator.choice((word, [], [text(word), text("b")], None, [text(word), found], [found, found]))
    identifier = generator.choice(IDENTIFIERS)
    return {"type": "tool_result", "tool_use_id": identifier, "content": content}


def _block_of_assistant(generator: random.Random) -> dict[str, Any]:
    word = generator.choice(WORDS)
    kind = generator.choice(("text", "thinking", "tool_use", "tool_use", "tool_result"))
    if kind == "tool_result":  # lists are shown in Python's words, which are not rendered here
        return {"type": kind, "tool_use_id": "call12345", "content": generator.choice((word, [], None))}
    if kind == "thinking":
        return {"type": kind, "thinking": word, "signature": "s"}
    if kind == "tool_use":
        given = generator.choice(({"city": word}, {}, {"n": [1.0, 1e-7, 10**20, None, True]}))
        return {"type": kind, "id": generator.choice(IDENTIFIERS), "name": "f", "input": given}
    return text(word)


def _tool_change(generator: random.Random) -> dict[str, Any]:
    definition = {"name": "g", "input_schema": {}}
    referred, defined = {"type": "tool_reference", "name": "f"}, {"type": "tool_definition"}
    change = generator.choice((referred, {**defined, "definition": definition}))
    return {"type": generator.choice(("tool_addition", "tool_removal")), "tool": change}


def bodies(make: Callable[[random.Random], dict[str, Any]], seed: int) -> dict[str, dict[str, Any]]:
    """150 requests by their numbers."""
    generator = random.Random(seed)
    return {str(number): make(generator) for number in range(150)}


APIS = {"/v1/chat/completions": chat, "/v1/responses": response, "/v1/messages": messages}
