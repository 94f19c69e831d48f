"""Asks an engine for one step of hand-over: a completion of one token, whose prompt is the text.

The text is what the engines tokenised already, template and special tokens included, so that vLLM is told to
add none (``add_special_tokens: false``, ``vllm/entrypoints/openai/completion/protocol.py``).
"""

import codecs
from enum import Enum
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.flowcontrol.priorities import MAX_PRIORITY, engine_priority
from kvist_epp.names import ENGINE_PRIORITY_HEADER, REQUEST_ID_HEADER, SESSION_HEADER

PATH: Final = "/v1/completions"
STEP_SECONDS: Final = 30.0
"""Longest wait for an answer; an engine that needs more has better things to do."""


class Answer(Enum):
    """What became of a step."""

    DONE = "done"
    FAILED = "failed"
    """No answer, or an error of the engine: it may do so later."""
    UNFIT = "unfit"
    """The engine will never take this text."""
    DENIED = "denied"
    """It wants a key, or another one."""


class Sender:
    """``async with Sender(…) as sender``: one connection pool for all engines."""

    def __init__(self, *, key_file: str = "", last: bool = False) -> None:
        """``key_file``: holds the engines' API key, read for each step; empty: none. ``last``: say that
        everything else goes first, which vLLM takes with ``--scheduling-policy priority`` alone."""
        self._key_file = Path(key_file) if key_file else None
        self._last = last
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Sender":
        # vLLM closes idle connections after 5 s
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
        timeout = aiohttp.ClientTimeout(total=STEP_SECONDS)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, endpoint: Endpoint, session: str, text: bytes, model: str | None) -> Answer:
        """One step to its end; cancelled, the engine sees the connection closed and stops. Never raises for
        what engines do."""
        prompt = as_text(text)
        if prompt is None:
            return Answer.UNFIT
        assert self._session is not None, "the sender is used with `async with`"
        url = f"http://{endpoint.hostport}{PATH}"
        try:
            headers = self._headers(session)
            body = body_of(prompt, model)
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                await response.read()
                return judged(response.status)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return Answer.FAILED

    def _headers(self, session: str) -> dict[str, str]:
        """Raises OSError: the key's file cannot be read."""
        headers = {
            "Content-Type": "application/json",
            REQUEST_ID_HEADER: session,
            SESSION_HEADER: session,
        }
        if self._last:
            headers[ENGINE_PRIORITY_HEADER] = engine_priority(-MAX_PRIORITY)
        if self._key_file is not None:
            headers["Authorization"] = f"Bearer {self._key_file.read_text().strip()}"
        return headers


def as_text(text: bytes) -> str | None:
    """Without the part of a character at its end, if it was cut there; None: it is no UTF-8, so that no
    prompt can say it."""
    try:
        return codecs.utf_8_decode(text, "strict", False)[0] or None
    except UnicodeDecodeError:
        return None


def body_of(prompt: str, model: str | None) -> bytes:
    """The request. Without a model vLLM takes the one it serves."""
    body: dict[str, object] = {
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "add_special_tokens": False,
    }
    return msgspec.json.encode(body if model is None else {"model": model, **body})


def judged(status: int) -> Answer:
    """By an HTTP status."""
    if status == 200:
        return Answer.DONE
    if status in (401, 403):
        return Answer.DENIED
    return Answer.UNFIT if 400 <= status < 500 and status not in (408, 429) else Answer.FAILED
