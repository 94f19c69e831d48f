"""Carries out the legs of disaggregated requests on the event loop, and connects new pairs of engines."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from math import inf
from typing import Final

from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.disaggregation.engine_pairs import rank_pairs
from kvist_epp.disaggregation.leg_bodies import Prefilled, decode_body, prefill_body
from kvist_epp.disaggregation.legs import PrefillLeg, SecondLeg
from kvist_epp.disaggregation.prefill_client import PrefillClient
from kvist_epp.disaggregation.prefill_outcome import PrefillFailure
from kvist_epp.extproc.pick_request import DecisionCallback, Effect, PendingResult
from kvist_epp.names import DATA_PARALLEL_RANK_HEADER, REQUEST_ID_HEADER, SESSION_HEADER
from kvist_epp.prewarm.prewarmer import model_of
from kvist_epp.scheduling.pick import Candidate
from kvist_epp.settings.settings import Settings

BEAT_SECONDS: Final = 0.25
"""Interval in which the event loop notes that it runs, while legs are under way."""
STALL_SECONDS: Final = 1.0
"""Time between two beats from which the loop has stalled."""
STALL_READ_SECONDS: Final = 5.0
"""Time after a stall in which answers may still be read that came during it."""
POLL_SECONDS: Final = 1.0
"""Interval in which new pairs of engines are looked for."""
CONNECT_SECONDS: Final = 20.0
"""Time limit of each request that connects a pair: a peer that cannot be reached takes 5 s."""
PATH: Final = "/v1/completions"
WORDS: Final = 64
"""Words of the prompt that connects a pair: more than the largest block has tokens."""

logger = logging.getLogger(__name__)


class LegDriver:
    """Runs leg 1 of requests; on the event loop's thread only."""

    def __init__(self, second: SecondLeg, client: PrefillClient, clock: Callable[[], float]) -> None:
        self._second, self._client, self._clock = second, client, clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._beats = (0.0, 0.0)
        """When the event loop was known to run: at the beat before the last, and at the last."""
        self._stall = (-inf, -inf)
        """Begin and end of the last time in which it did not."""
        self._beat: asyncio.TimerHandle | None = None

    def carry_out(self, effect: Effect) -> PendingResult:
        """Begin leg 1; its end answers the request."""
        assert isinstance(effect, PrefillLeg), "there is no other effect"
        if self._beat is None:
            self._beats = (self._clock(), self._clock())
        pending = _PendingLeg(self, effect)
        pending.task = asyncio.create_task(self._run(pending), name="prefill leg")
        self._tasks.add(pending.task)
        if self._beat is None:
            self._note_beat()
        pending.task.add_done_callback(self._tasks.discard)
        return pending

    async def close(self) -> None:
        """Cancel the legs that are under way; their requests are not answered."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._beat is not None:
            self._beat.cancel()

    def cancel(self, pending: "_PendingLeg") -> None:
        """Stop leg 1, because the client has left."""
        if pending.task is not None and not pending.task.done():
            pending.task.cancel()
            self._second.on_cancelled(pending.leg, self._clock())

    async def _run(self, pending: "_PendingLeg") -> None:
        leg = pending.leg
        outcome = await self._client.send(
            leg.hostport, leg.path, leg.prefill_body, dict(leg.headers), leg.seconds
        )
        callback, pending.callback = pending.callback, None
        if callback is None:
            return
        try:
            now = self._clock()
            callback(self._second.on_prefilled(leg, outcome, self._ended_after(now), now))
        except Exception as error:  # noqa: BLE001  a bug must cost one request, which is told
            callback(error)

    def _note_beat(self) -> None:
        now = self._clock()
        if now - self._beats[1] > STALL_SECONDS:
            self._stall = (self._beats[1], now)
        self._beats = (self._beats[1], now)
        self._beat = (
            asyncio.get_running_loop().call_later(BEAT_SECONDS, self._note_beat) if self._tasks else None
        )

    def _ended_after(self, now: float) -> float:
        """Return a time at which an answer that is read now had not come yet, as late as is known.

        The loop ran at the beat before the last and had not found it. After a stall, such as of a process
        that was stopped, answers of that time are read for a while."""
        before, after = self._stall
        return before if now - after < STALL_READ_SECONDS else self._beats[0]


class _PendingLeg(PendingResult):
    """The answer to a request whose leg 1 is under way."""

    __slots__ = ("_driver", "callback", "leg", "task")

    def __init__(self, driver: LegDriver, leg: PrefillLeg) -> None:
        self._driver = driver
        self.leg = leg
        self.callback: DecisionCallback | None = None
        self.task: asyncio.Task[None] | None = None

    def then(self, callback: DecisionCallback) -> None:
        self.callback = callback

    def cancel(self) -> None:
        self.callback = None
        self._driver.cancel(self)


class PairConnector:
    """Has each new pair of engines transfer a few blocks, before requests need it."""

    def __init__(self, registry: EndpointRegistry, second: SecondLeg, client: PrefillClient) -> None:
        self._registry = registry
        self._splitter = second.splitter
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()
        registry.add_leaving_listener(self._on_leaving)

    async def run(self) -> None:
        """Connect pairs until cancelled."""
        try:
            while True:
                self.poll()
                await asyncio.sleep(POLL_SECONDS)
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def poll(self) -> None:
        """Begin to connect the pairs that are due."""
        registry, pairs, stats = self._registry, self._splitter.pairs, self._splitter.stats
        pairs.on_restarts({key: state.restarts for key, state in registry.states.items()})
        for prefill, decode in pairs.to_connect(registry.states.values(), registry.clock()):
            task = asyncio.create_task(self._connect(prefill, decode), name="connecting engines")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        stats.pairs["warm"], stats.pairs["connecting"] = len(pairs.warm), len(pairs.connecting)
        stats.pair_failures = pairs.failures

    def _on_leaving(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._splitter.pairs.remove_endpoint(key)

    async def _connect(self, prefill: Candidate, decode: Candidate) -> None:
        pair, good = (prefill.endpoint.key, decode.endpoint.key), False
        try:
            good = await self._transfer(prefill, decode)
        finally:
            self._splitter.pairs.on_connected(pair, self._registry.clock(), good=good)
        if not good:
            logger.warning("no blocks could be transferred from %s to %s; it is tried again", *pair)

    async def _transfer(self, prefill: Candidate, decode: Candidate) -> bool:
        """Have each pair of ranks transfer blocks, one after another; return whether all could."""
        for ranks in rank_pairs(prefill, decode):
            if not await self._transfer_once(prefill, decode, *ranks):
                return False
        return True

    async def _transfer_once(
        self, prefill: Candidate, decode: Candidate, source_rank: int | None, target_rank: int | None
    ) -> bool:
        """Send both legs of a small request; return whether the blocks came across."""
        body = self._body(prefill)
        name = f"{self._registry.director.replica}.pair.{secrets.token_hex(4)}"
        source, target = prefill.endpoint.hostport, decode.endpoint.hostport
        first, headers = prefill_body(PATH, body), _headers(name, source_rank)
        found = await self._client.send(source, PATH, first, headers, CONNECT_SECONDS)
        if not isinstance(found, Prefilled):
            return False
        self._splitter.pairs.on_prefilled(prefill.endpoint.key, found.engine)
        before = await self._client.failed_transfers(target)
        second, headers = decode_body(PATH, body, found), _headers(name, target_rank)
        outcome = await self._client.send(target, PATH, second, headers, CONNECT_SECONDS)
        if outcome is not PrefillFailure.NOTHING:  # what a complete answer without blocks to fetch is
            return False
        return await self._client.failed_transfers(target) == before

    def _body(self, prefill: Candidate) -> bytes:
        model = model_of(self._registry, prefill.endpoint.key)
        text = " ".join(secrets.token_hex(4) for _ in range(WORDS))
        named = "" if model is None else f'"model":"{model}",'
        return f'{{{named}"prompt":"{text}","max_tokens":1,"temperature":0}}'.encode()


def _headers(name: str, rank: int | None) -> dict[str, str]:
    headers = {SESSION_HEADER: name, REQUEST_ID_HEADER: name}
    return headers if rank is None else headers | {DATA_PARALLEL_RANK_HEADER: str(rank)}


@asynccontextmanager
async def open_legs(
    settings: Settings, registry: EndpointRegistry
) -> AsyncIterator[tuple[LegDriver, PairConnector]]:
    """Connect a director that disaggregates with its engines; the caller runs the connector of pairs."""
    director = registry.director
    splitter = director.splitter
    assert splitter is not None, "disaggregation is on"
    director.metrics.gauges.disaggregation = lambda: splitter.stats
    second = SecondLeg(director, splitter, settings.kv_lease)
    async with PrefillClient(settings.engine_key_file) as client:
        driver = LegDriver(second, client, registry.clock)
        try:
            yield driver, PairConnector(registry, second, client)
        finally:
            await driver.close()
