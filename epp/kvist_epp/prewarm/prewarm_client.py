"""Sends one prewarming request to an engine: a completion of one token, whose prompt is the prefix.

The text is what the engines tokenised already, template and special tokens included, so vLLM must not add any
(``add_special_tokens: false``, ``vllm/entrypoints/openai/completion/protocol.py``).
"""

import codecs
from enum import Enum
from typing import Final

import aiohttp
import msgspec

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.endpoints.engine_key import UNAUTHORIZED, EngineKey, is_final_refusal
from kvist_epp.endpoints.engine_session import engine_session
from kvist_epp.flowcontrol.priorities import MAX_PRIORITY, engine_priority
from kvist_epp.names import ENGINE_PRIORITY_HEADER, REQUEST_ID_HEADER, SESSION_HEADER

PATH: Final = "/v1/completions"
TIMEOUT_SECONDS: Final = 30.0
"""Time limit for an answer; an engine that needs longer is overloaded."""


class PrewarmOutcome(Enum):
    """Result of a prewarming request."""

    DONE = "done"
    FAILED = "failed"
    """No answer, or an error that may pass."""
    UNFIT = "unfit"
    """The engine will never accept this text."""
    DENIED = "denied"
    """The engine requires an API key, or another one."""


class PrewarmClient:
    """Connection pool for all engines, used with ``async with``."""

    def __init__(self, *, key_file: str = "", lowest_priority: bool = False) -> None:
        """``key_file`` contains the engines' API key and is read for each request; empty: none.
        ``lowest_priority`` sends the header that vLLM accepts with ``--scheduling-policy priority`` only."""
        self.key = EngineKey(key_file)
        self._lowest_priority = lowest_priority
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "PrewarmClient":
        self._session = engine_session(TIMEOUT_SECONDS)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, endpoint: Endpoint, session: str, text: bytes, model: str | None) -> PrewarmOutcome:
        """Request the first token after ``text``; without a model vLLM takes the one it serves.

        Errors of the engine are returned, never raised. If cancelled, the connection is closed and the engine
        stops.
        """
        prompt = decode_prefix(text)
        if prompt is None:
            return PrewarmOutcome.UNFIT
        assert self._session is not None, "the client must be used with `async with`"
        body: dict[str, object] = {
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "add_special_tokens": False,
        }
        data = msgspec.json.encode(body if model is None else {"model": model, **body})
        url = f"http://{endpoint.hostport}{PATH}"
        outcome = PrewarmOutcome.FAILED
        try:
            for authorization in self.key.headers():
                headers = self._headers(session) | authorization
                outcome = await self._post(self._session, url, data, headers)
                if outcome is not PrewarmOutcome.DENIED:
                    break
        except (aiohttp.ClientError, TimeoutError, OSError):
            return PrewarmOutcome.FAILED
        return outcome

    async def _post(
        self, session: aiohttp.ClientSession, url: str, data: bytes, headers: dict[str, str]
    ) -> PrewarmOutcome:
        async with session.post(url, data=data, headers=headers, allow_redirects=False) as response:
            await response.read()
            return outcome_of(response.status)

    def _headers(self, session: str) -> dict[str, str]:
        headers = {
            "Content-Type": "application/json",
            REQUEST_ID_HEADER: session,
            SESSION_HEADER: session,
        }
        if self._lowest_priority:
            headers[ENGINE_PRIORITY_HEADER] = engine_priority(-MAX_PRIORITY)
        return headers


def decode_prefix(text: bytes) -> str | None:
    """Return the text without a character that is cut at its end; None if it is not UTF-8."""
    try:
        return codecs.utf_8_decode(text, "strict", False)[0] or None
    except UnicodeDecodeError:
        return None


def outcome_of(status: int) -> PrewarmOutcome:
    """Return the outcome that an HTTP status stands for."""
    if status == 200:
        return PrewarmOutcome.DONE
    if status in UNAUTHORIZED:
        return PrewarmOutcome.DENIED
    return PrewarmOutcome.UNFIT if is_final_refusal(status) else PrewarmOutcome.FAILED
