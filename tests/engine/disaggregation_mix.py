"""A mix of requests for disaggregated endpoints, and the comparison of their answers with a lone engine's."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.engine.disaggregation_faults import Trial
from tests.engine.mix import CHAT, COMPLETION, WEATHER
from tests.engine.prefill_decode import PrefillDecode

COMMON = {"model": "m", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "place", "schema": WEATHER["function"]["parameters"]},  # type: ignore[index]
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
KINDS = frozenset(
    {
        *("chat", "completion", "whole", "streamed", "streamed with usage", "token ids", "salted"),
        *("tools", "tools: required", "tools: one by name", "JSON by schema", "shared prefix"),
    }
)
"""Kinds that a mix of two dozen requests or more has."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the mix."""

    path: str
    body: dict[str, Any]
    kinds: frozenset[str]
    """All of ``KINDS`` that it is of."""


def requests(pool: PrefillDecode, count: int) -> list[Request]:
    """Return a mix; numbers without a common divisor decide on its kinds, so that all combinations occur."""
    shared = pool.words(200)
    return [_request(pool, number, shared) for number in range(count)]


def _request(pool: PrefillDecode, number: int, shared: str) -> Request:
    body: dict[str, Any] = dict(COMMON)
    chat = number % 2 == 0
    kinds = {"chat" if chat else "completion"}
    text = pool.words(pool.random.randint(30, 400))
    if number % 11 in (0, 3, 6):
        text = shared + text
        kinds.add("shared prefix")
    if number % 7 == 3:
        body["cache_salt"] = f"tenant-{number % 2}"
        kinds.add("salted")
    body |= ({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}})[number % 3]
    kinds.add(("whole", "streamed", "streamed with usage")[number % 3])
    if chat:
        messages = [{"role": "system", "content": text}, {"role": "user", "content": pool.words(5)}]
        body |= {"messages": messages, "logprobs": True, "top_logprobs": 2}
        kind = number // 2 % 5
        if kind < 3:
            kinds.add(("tools", "tools: required", "tools: one by name")[kind])
            body |= {"tools": [WEATHER], "tool_choice": ("none", "required", NAMED)[kind], "max_tokens": 24}
        elif kind == 3:
            kinds.add("JSON by schema")
            body["response_format"] = FORMAT
    else:
        body |= {"prompt": text, "logprobs": 2}
        if number % 5 == 1:
            kinds.add("token ids")
            body["prompt"] = [pool.random.randrange(300) for _ in range(300)]
    return Request(CHAT if chat else COMPLETION, body, frozenset(kinds))


async def compare(trial: Trial, listed: Sequence[Request], at_once: int = 1) -> Counter[str]:
    """Send requests through Envoy, and each to the lone engine; return how many of each kind there were.

    Raises AssertionError for an answer whose text, logprobs, reason for its end or usage differ.
    """
    pool = trial.pool
    found: Counter[str] = Counter()
    waiting = iter(listed)

    async def work() -> None:
        for request in waiting:
            asked = trial.timed(pool.ask(request.path, request.body))
            answer, alone = await asyncio.gather(asked, pool.alone(request.path, request.body))
            assert answer.status == 200, (sorted(request.kinds), answer, alone)
            assert answer.same(alone), (sorted(request.kinds), answer, alone)
            expects = "streamed" not in request.kinds
            assert bool(answer.usage) == expects, (sorted(request.kinds), answer.usage)
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert answer.usage.get(name) == alone.usage.get(name), (name, answer.usage, alone.usage)
            found.update(request.kinds)

    await asyncio.gather(*(work() for _ in range(at_once)))
    return found
