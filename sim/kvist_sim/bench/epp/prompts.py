"""The requests of ``kvist bench epp``, and the cached prefixes that half of them share.

All from one seed: the client builds the bodies, the publisher the events, in two processes that never talk.
"""

import functools
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from kvist_sim.http1 import request_bytes
from kvist_sim.workloads import text

MODEL_NAME: Final = "kvist-bench"
VARIANTS: Final = 4
"""Number of bodies of each size and shape, so that the CPU's caches do not hold just one of them."""
WARM_VARIANTS: Final = 2
"""Number of variants that share a cached prefix."""
WARM_SHARE: Final = 0.75
"""Share of a warm prompt that is cached."""
_WORD_BYTES: Final = 5.0
"""Less than an average word and its blank, so that a text of size / this many words is long enough to cut."""
_CHAT_TURNS: Final = 40
_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": "Reads a part of a file and returns its lines with their numbers.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "lines": {"type": "array"}},
                "required": ["path"],
            },
        },
    }
    for number in range(10)
]


class PromptShape(Enum):
    """Kind of request body; the value is its name in tables and JSON."""

    COMPLETION = "completion"
    CHAT_2 = "chat of 2"
    CHAT_40 = "chat of 40"
    PARTS_40 = "parts of 40"
    """A chat of 40 messages whose contents are lists of parts, as many clients send them."""
    AGENT_40 = "agent of 40"
    """A chat of 40 messages with ten tools: each answer calls one of them, and the next message is its
    result."""

    @property
    def path(self) -> str:
        """Path to which the body is posted."""
        return "/v1/completions" if self is PromptShape.COMPLETION else "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Kind:
    """Size and shape of a request."""

    kilobytes: int
    """Length of the prompt's text, all messages together, in units of 1,000 bytes; calls and tools are not
    counted."""
    shape: PromptShape

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"{self.kilobytes} KB {self.shape.value}"


def bodies(kind: Kind) -> list[bytes]:
    """Return the variants, plain ASCII. The first ones are warm."""
    return [_body(kind, variant) for variant in range(VARIANTS)]


@functools.cache
def requests(kind: Kind) -> list[bytes]:
    """Return the variants as complete HTTP requests."""
    return [request_bytes("POST", kind.shape.path, "bench", body) for body in bodies(kind)]


def warm(kinds: list[Kind]) -> Iterator[tuple[str, bytes]]:
    """Yield path and body of every request whose prefix an engine caches."""
    for kind in kinds:
        for body in bodies(kind)[:WARM_VARIANTS]:
            yield kind.shape.path, body


def _body(kind: Kind, variant: int) -> bytes:
    rng = random.Random(f"{kind.name}/{variant}")
    wanted = kind.kilobytes * 1_000
    return _json(kind.shape, text(rng, int(wanted / _WORD_BYTES))[:wanted])


def _json(shape: PromptShape, words: str) -> bytes:
    request: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 16}
    if shape is PromptShape.COMPLETION:
        request["prompt"] = words
    else:
        messages = _messages(words, 2 if shape is PromptShape.CHAT_2 else _CHAT_TURNS)
        if shape is PromptShape.PARTS_40:
            messages = [each | {"content": [{"type": "text", "text": each["content"]}]} for each in messages]
        if shape is PromptShape.AGENT_40:
            request["tools"] = _TOOLS
            messages = list(map(_as_agent, itertools.count(), messages))
        request["messages"] = messages
    return json.dumps(request, separators=(",", ":")).encode()


def _as_agent(at: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return an answer with a call, or the result of the call before; system and first question stay."""
    if at < 2:
        return message
    if message["role"] == "user":
        return {"role": "tool", "tool_call_id": f"call_{at - 1}", "content": message["content"]}
    arguments = json.dumps({"path": f"src/module_{at}.py", "lines": [at, at + 40]})
    function = {"name": f"tool_{at % len(_TOOLS)}", "arguments": arguments}
    return message | {"tool_calls": [{"id": f"call_{at}", "type": "function", "function": function}]}


def _messages(words: str, count: int) -> list[dict[str, Any]]:
    """Return a system message with a quarter of the words, and turns with equal parts of the rest."""
    system, rest = words[: len(words) // 4], words[len(words) // 4 :]
    cuts = [len(rest) * turn // (count - 1) for turn in range(count)]
    turns = [rest[begin:end] for begin, end in itertools.pairwise(cuts)]
    roles = ["user" if turn % 2 == 0 else "assistant" for turn in range(len(turns))]
    spoken = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
    return [{"role": "system", "content": system}, *spoken]
