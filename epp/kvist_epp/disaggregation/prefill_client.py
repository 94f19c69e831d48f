"""Sends leg 1 of disaggregated requests to engines."""

from typing import Final

import aiohttp

from kvist_epp.disaggregation.leg_bodies import Prefilled, read_answer
from kvist_epp.disaggregation.prefill_outcome import PrefillFailure, failure_of
from kvist_epp.endpoints.engine_key import EngineKey
from kvist_epp.endpoints.engine_session import engine_session
from kvist_epp.engines.vllm.transfer_metrics import failed_transfers

CONNECT_SECONDS: Final = 3.0
"""Time limit of a connection: a pod that has gone answers nothing."""
METRICS_SECONDS: Final = 5.0


class PrefillClient:
    """Connection pool for all prefill endpoints, used with ``async with``."""

    def __init__(self, key_file: str = "") -> None:
        """``key_file`` contains the engines' API key and is read for each request; empty: none."""
        self.key = EngineKey(key_file)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "PrefillClient":
        self._session = engine_session(None)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(
        self, hostport: str, path: str, body: bytes, headers: dict[str, str], seconds: float
    ) -> Prefilled | PrefillFailure:
        """Ask an endpoint to compute a prompt; ``seconds``: time limit.

        If cancelled, the connection is closed, and the engine stops; blocks that it has computed are released
        when their lease ends.
        """
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        url, headers = f"http://{hostport}{path}", {"Content-Type": "application/json", **headers}
        outcome: Prefilled | PrefillFailure = PrefillFailure.UNREACHABLE
        try:
            for authorization in self.key.headers():
                outcome = await self._once(url, body, headers | authorization, timeout)
                if outcome is not PrefillFailure.DENIED:
                    break
        except aiohttp.ConnectionTimeoutError:
            return PrefillFailure.UNREACHABLE
        except TimeoutError:
            return PrefillFailure.TIMEOUT
        except (aiohttp.ClientError, OSError):
            return PrefillFailure.UNREACHABLE
        return outcome

    async def _once(
        self, url: str, body: bytes, headers: dict[str, str], timeout: aiohttp.ClientTimeout
    ) -> Prefilled | PrefillFailure:
        try:
            return await self._post(url, body, headers, timeout)
        except aiohttp.ServerDisconnectedError:  # perhaps an idle connection that the engine was closing
            return await self._post(url, body, headers, timeout)

    async def _post(
        self, url: str, body: bytes, headers: dict[str, str], timeout: aiohttp.ClientTimeout
    ) -> Prefilled | PrefillFailure:
        assert self._session is not None, "the client must be used with `async with`"
        post = self._session.post(url, data=body, headers=headers, allow_redirects=False, timeout=timeout)
        async with post as response:
            data = await response.read()
            return failure_of(response.status) or read_answer(data) or PrefillFailure.NOTHING

    async def failed_transfers(self, hostport: str) -> float | None:
        """Return how many transfers to an engine have failed so far; None: it does not say."""
        assert self._session is not None, "the client must be used with `async with`"
        timeout = aiohttp.ClientTimeout(total=METRICS_SECONDS)
        try:
            async with self._session.get(f"http://{hostport}/metrics", timeout=timeout) as response:
                return failed_transfers(await response.text())
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None
