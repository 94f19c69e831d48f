"""Requests of every shape the picker claims to render, and some it must only survive."""

from typing import Any

Body = dict[str, Any]

LONG = "The prompt is rendered once, matched as bytes. Größe, Привет, 世界, 🌿 e\u0301\n" * 40
USER: Body = {"role": "user", "content": "Where does the twig grow?"}
SYSTEM: Body = {"role": "system", "content": "You answer in one line."}
ASSISTANT: Body = {"role": "assistant", "content": "On the branch.\n\n"}
AGAIN: Body = {"role": "user", "content": "  And the leaf? \n"}
WEATHER: Body = {
    "type": "function",
    "function": {
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "e.g. Göteborg <b>&'\""},
                "days": {"type": "integer"},
            },
            "required": ["city"],
        },
        "name": "get_weather",
        "description": "The weather of a city",
        "extra": 1,
    },
}
BARE: Body = {"type": "function", "function": {"name": "ping"}, "note": "dropped"}
STRICT: Body = {"function": {"name": "f", "strict": True, "parameters": {}}, "defer_loading": True}


def call(arguments: Any = '{"days": 3, "city": "Göteborg"}', identifier: str = "call12345") -> Body:
    """An assistant's tool call, its fields in an order of its own."""
    return {"function": {"name": "get_weather", "arguments": arguments}, "type": "function", "id": identifier}


def called(*calls: Body, **fields: Any) -> Body:
    """An assistant message that calls tools."""
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def result(content: Any = '{"degrees": 17.50}', **fields: Any) -> Body:
    """Return the message with a tool's result."""
    return {"role": "tool", "tool_call_id": "call12345", "content": content, **fields}


def text(value: str, **fields: Any) -> Body:
    """A text part."""
    return {"text": value, "type": "text", **fields}


PARTS: Body = {
    "role": "user",
    "content": [text("one "), text(" two\n", cache_control={"a": 1}), text("three")],
}

CHATS: dict[str, Body] = {
    "one user": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "turns": {"messages": [USER, ASSISTANT, AGAIN]},
    "system and turns": {"messages": [SYSTEM, USER, ASSISTANT, AGAIN]},
    "two systems": {"messages": [SYSTEM, USER, ASSISTANT, SYSTEM, AGAIN]},
    "long": {"messages": [{"role": "user", "content": LONG}]},
    "parts": {"messages": [PARTS]},
    "system parts": {"messages": [{"role": "system", "content": [text("a"), text("b")]}, USER]},
    "part aliases": {
        "messages": [{"role": "user", "content": [text("a"), "plain", {"type": "input_text", "text": "c"}]}]
    },
    "thinking part": {
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, text("a")]},
            AGAIN,
        ]
    },
    "refusal part": {
        "messages": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, AGAIN]
    },
    "empty content": {"messages": [{"role": "user", "content": ""}]},
    "no parts": {"messages": [{"role": "user", "content": []}]},
    "null assistant": {"messages": [USER, {"role": "assistant", "content": None}, AGAIN]},
    "names": {"messages": [{**USER, "name": "bob"}, {**ASSISTANT, "name": "kvist"}, AGAIN]},
    "unknown fields": {"messages": [{**USER, "mood": "fine"}], "anything": {"at": "all"}},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, USER]},
    "developer later": {
        "messages": [USER, {"role": "developer", "content": "Be brief."}, {**ASSISTANT}, AGAIN]
    },
    "developer and system": {
        "messages": [SYSTEM, {"role": "developer", "content": [text("x"), text("y")]}, USER]
    },
    "billing header": {
        "messages": [{"role": "system", "content": "x-anthropic-billing-header: 1\nrest"}, USER]
    },
    "other role": {"messages": [USER, {"role": "critic", "content": "hm"}]},
    "tools": {"messages": [USER], "tools": [WEATHER]},
    "tools and system": {"messages": [SYSTEM, USER], "tools": [WEATHER, BARE]},
    "tools, odd fields": {"messages": [USER], "tools": [STRICT, BARE]},
    "tools, choice none": {"messages": [USER], "tools": [WEATHER], "tool_choice": "none"},
    "tools, choice required": {"messages": [USER], "tools": [WEATHER], "tool_choice": "required"},
    "tool round": {"messages": [USER, called(call()), result(), ASSISTANT, AGAIN], "tools": [WEATHER]},
    "tool round, text": {
        "messages": [USER, called(call(), content="Looking."), result(), AGAIN],
        "tools": [WEATHER],
    },
    "two calls": {
        "messages": [USER, called(call(), call('{"city":"Oslo"}', "call67890")), result(), result("2")],
        "tools": [WEATHER],
    },
    "call without arguments": {"messages": [USER, called(call("")), result()], "tools": [WEATHER]},
    "call with broken arguments": {"messages": [USER, called(call("{not json")), result()]},
    "call with a list": {"messages": [USER, called(call("[1, 2]")), result()]},
    "call with numbers": {
        "messages": [
            USER,
            called(call('{"a": 1.0, "b": 1e5, "c": 12345678901234567890123, "d": null}')),
            result(),
        ]
    },
    "call with unicode": {
        "messages": [USER, called(call('{"q": "\\u00e9 \\ud83c\\udf3f </tag> \\"x\\""}')), result()]
    },
    "call with extras": {"messages": [USER, called({**call(), "index": 0}), result(name="get_weather")]},
    "no calls": {"messages": [USER, {**ASSISTANT, "tool_calls": []}, AGAIN]},
    "null calls": {"messages": [USER, {**ASSISTANT, "tool_calls": None}, AGAIN]},
    "tool parts": {"messages": [USER, called(call()), result([text("r1"), text("r2")])]},
    "reasoning": {"messages": [USER, {**ASSISTANT, "reasoning": "\nI see.\n"}]},
    "reasoning content": {"messages": [USER, {**ASSISTANT, "reasoning_content": "I see."}, AGAIN]},
    "reasoning and calls": {
        "messages": [USER, called(call(), reasoning="First."), result()],
        "tools": [WEATHER],
    },
    "reasoning null": {"messages": [USER, {**ASSISTANT, "reasoning": None, "reasoning_content": "x"}]},
    "think in content": {"messages": [USER, {"role": "assistant", "content": "<think>a</think>b"}, AGAIN]},
    "no generation prompt": {"messages": [USER], "add_generation_prompt": False},
    "continue": {
        "messages": [USER, ASSISTANT],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "continue, blanks": {
        "messages": [USER, {"role": "assistant", "content": "On the "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "continue, parts": {
        "messages": [USER, {"role": "assistant", "content": [text("On"), text("the branch, ")]}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "continue, both": {"messages": [USER, ASSISTANT], "continue_final_message": True},
    "special tokens": {"messages": [USER], "add_special_tokens": True},
    "kwargs": {
        "messages": [USER],
        "chat_template_kwargs": {"enable_thinking": False, "date_string": "1 Jan", "thinking": True},
    },
    "kwargs, unset": {
        "messages": [USER],
        "chat_template_kwargs": {"enable_thinking": None, "date_string": "auto"},
    },
    "kwargs, specials": {"messages": [USER], "chat_template_kwargs": {"bos_token": "", "unknown": [1]}},
    "kwargs, tools": {
        "messages": [USER],
        "tools": [WEATHER],
        "chat_template_kwargs": {"tools_in_user_message": False},
    },
    "kwargs, generation": {"messages": [USER], "chat_template_kwargs": {"add_generation_prompt": False}},
    "effort": {"messages": [USER], "reasoning_effort": "high"},
    "effort none": {"messages": [USER], "reasoning_effort": "none"},
    "effort and kwargs": {
        "messages": [USER],
        "reasoning_effort": "none",
        "chat_template_kwargs": {"enable_thinking": True},
    },
    "documents": {"messages": [USER], "documents": [{"title": "t", "text": "x"}]},
    "specials as text": {
        "messages": [
            {
                "role": "user",
                "content": "<|im_end|>\n<|im_start|>system\n[INST] <bos> <｜User｜> </s><|eot_id|>",
            }
        ]
    },
    "markup": {"messages": [{"role": "user", "content": "{{ 7 * 7 }} {% raw %} <b>&amp;</b> \\n \u2028"}]},
    "whitespace": {"messages": [{"role": "user", "content": " \t\n leading and trailing \n\n "}]},
    "control": {"messages": [{"role": "user", "content": "nul \u0000 bell \u0007 del \u007f nel \u0085"}]},
    "normal forms": {
        "messages": [{"role": "user", "content": "e\u0301 Å \u212b ﬁ ½ ＡＢＣ ▁ 한국 \u1112\u1161\u11ab"}]
    },
    "right to left": {"messages": [{"role": "user", "content": "مرحبا בשלום हिन्दी ไทย"}]},
    "limits": {
        "messages": [USER],
        "max_tokens": 7,
        "n": 2,
        "stream": True,
        "cache_salt": "s",
        "temperature": 0.5,
    },
    "ends on assistant": {"messages": [USER, ASSISTANT]},
    "starts with assistant": {"messages": [ASSISTANT, USER]},
    "forty turns": {"messages": [USER, ASSISTANT] * 20 + [AGAIN]},
}

COMPLETIONS: dict[str, Body] = {
    "text": {"prompt": "Once upon a time"},
    "leading blank": {"prompt": " two  blanks "},
    "long": {"prompt": LONG},
    "specials": {"prompt": "<|im_start|>user\n<s>[INST] hi [/INST]<bos><｜User｜><|eot_id|>"},
    "starts with bos": {"prompt": "<s><bos><|begin_of_text|><｜begin▁of▁sentence｜>x"},
    "no specials": {"prompt": "Once", "add_special_tokens": False},
    "texts": {"prompt": ["one", " two", "three 🌿"]},
    "tokens": {"prompt": [70, 71, 72, 300]},
    "token lists": {"prompt": [[70, 71], [300, 301, 302]]},
    "normal forms": {"prompt": "e\u0301 Å \u212b ﬁ ▁ \n\n x"},
    "echo": {"prompt": "Once", "echo": True, "n": 2, "max_tokens": 0},
}

RESPONSES: dict[str, Body] = {
    "text": {"input": "Where does the twig grow?"},
    "instructions": {"input": "Where?", "instructions": "You answer in one line."},
    "messages": {"input": [USER, ASSISTANT, AGAIN]},
    "typed messages": {
        "input": [
            {"type": "message", **USER},
            {"role": "user", "content": [{"type": "input_text", "text": "and?"}]},
        ],
        "instructions": "Brief.",
    },
    "assistant output": {
        "input": [
            USER,
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "On the branch.", "annotations": []}],
            },
            AGAIN,
        ]
    },
    "developer": {"input": [{"role": "developer", "content": "Brief."}, USER]},
    "tools": {
        "input": "Weather?",
        "tools": [
            {
                "type": "function",
                "name": "f",
                "description": "d",
                "parameters": {"type": "object"},
                "strict": True,
            }
        ],
    },
    "tool round": {
        "input": [
            USER,
            {"type": "function_call", "call_id": "call12345", "name": "f", "arguments": '{"b": 1, "a": 2}'},
            {"type": "function_call_output", "call_id": "call12345", "output": "17"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    },
    "effort": {"input": "Where?", "reasoning": {"effort": "low"}},
    "kwargs": {"input": "Where?", "chat_template_kwargs": {"enable_thinking": False}},
    "partial": {
        "input": [
            USER,
            {
                "type": "message",
                "id": "msg_1",
                "status": "incomplete",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "On the", "annotations": []}],
            },
        ]
    },
}

MESSAGES: dict[str, Body] = {
    "text": {"messages": [USER]},
    "system": {"messages": [USER], "system": "You answer in one line."},
    "system blocks": {
        "messages": [USER],
        "system": [
            text("x-anthropic-billing-header: 1"),
            text("Brief.", cache_control={"type": "ephemeral"}),
            text("Kind."),
        ],
    },
    "turns": {"messages": [USER, ASSISTANT, AGAIN]},
    "blocks": {"messages": [{"role": "user", "content": [text("a"), text(""), text("b")]}]},
    "one block": {"messages": [{"role": "user", "content": [text("a")]}]},
    "thinking": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, text("yes")],
            },
            AGAIN,
        ]
    },
    "tools": {
        "messages": [USER],
        "tools": [
            {"name": "f", "description": "d", "input_schema": {"properties": {"a": {"type": "string"}}}}
        ],
    },
    "tool round": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    text("Looking."),
                    {"type": "tool_use", "id": "call12345", "name": "f", "input": {"b": 1, "a": 2}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call12345", "content": [text("1"), text("2")]},
                    text("so?"),
                ],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    },
    "tool result only": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "call12345", "name": "f", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "call12345", "content": "17"}],
            },
        ],
    },
    "tools found": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "call12345", "name": "search", "input": {"q": "f"}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "call12345",
                        "content": [
                            text("Found:"),
                            {"type": "tool_reference", "tool_name": "f"},
                            {"type": "tool_reference", "name": "g"},
                        ],
                    },
                ],
            },
        ],
        "tools": [
            {"name": "search", "input_schema": {"type": "object"}},
            {"name": "f", "input_schema": {"type": "object"}, "defer_loading": True},
        ],
    },
    "result of the assistant": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "it's"}],
            },
            AGAIN,
        ]
    },
    "no tools": {"messages": [USER], "tools": []},
    "tools changed": {
        "messages": [
            USER,
            {
                "role": "system",
                "content": [
                    {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}},
                    {
                        "type": "tool_addition",
                        "tool": {
                            "type": "tool_definition",
                            "definition": {"name": "g", "input_schema": {"properties": {}}},
                        },
                    },
                    {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "h"}},
                ],
            },
        ],
        "tools": [
            {"name": "f", "input_schema": {"type": "object"}, "defer_loading": True},
            {"name": "h", "input_schema": {"type": "object"}},
        ],
    },
    "all tools removed": {
        "messages": [
            USER,
            {
                "role": "system",
                "content": [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "h"}}],
            },
        ],
        "tools": [{"name": "h", "input_schema": {"type": "object"}}],
    },
    "effort": {"messages": [USER], "output_config": {"effort": "low"}},
    "thinking off": {"messages": [USER], "thinking": {"type": "disabled"}},
    "thinking off, effort": {
        "messages": [USER],
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "high"},
        "chat_template_kwargs": {"enable_thinking": True},
    },
}

APIS: dict[str, dict[str, Body]] = {
    "/v1/chat/completions": CHATS,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": {name: {"max_tokens": 16, **body} for name, body in MESSAGES.items()},
}
