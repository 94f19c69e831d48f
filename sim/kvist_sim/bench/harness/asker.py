"""Send direct requests at a steady rate; each is settled by an access log entry a moment after its pick."""

import asyncio
import itertools
import random
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from kvist_sim.bench.harness.churn import SYSTEMS, body
from kvist_sim.bench.harness.direct import PICKED, Answer, Direct
from kvist_sim.load import CHAT_PATH
from kvist_sim.workloads import text

TICK_SECONDS: Final = 0.01
SERVED_SECONDS: Final = 0.2
"""Seconds from a pick to the access log's entry, in place of an engine's answer."""
REST_SECONDS: Final = 10.0
"""Longest wait for the last answers."""
QUESTIONS: Final = 997
_HEADERS: Final = {":method": "POST", ":path": CHAT_PATH, "content-type": "application/json"}


class Settler:
    """Writes the access log of picked requests, a while after their pick."""

    def __init__(self, log: Direct, seconds: float = SERVED_SECONDS) -> None:
        """``seconds`` is how long an engine would have taken."""
        self._log, self._seconds = log, seconds
        self._clock = asyncio.get_running_loop().time
        self._served: deque[tuple[float, Answer]] = deque()

    def picked(self, answer: Answer) -> None:
        """Queue a request that was picked just now."""
        self._served.append((self._clock(), answer))

    def settle(self, *, rest: bool = False) -> None:
        """Report the end of requests whose time has come; with ``rest``, of all requests."""
        then = self._clock() - (0 if rest else self._seconds)
        due = []
        while self._served and self._served[0][0] <= then:
            due.append(self._served.popleft()[1])
        if due:
            self._log.ended(due)


class Asker:
    """Sends requests over several connections in turn."""

    def __init__(self, connections: Sequence[Direct], rate: float) -> None:
        self._connections = itertools.cycle(connections)
        self._rate = rate
        self._clock = asyncio.get_running_loop().time
        self._settler = Settler(connections[0])
        self.sent = 0
        self.statuses: Counter[int] = Counter()
        self.latencies = array("d")
        """Seconds to the answer, of each pick."""

    @property
    def waiting(self) -> int:
        """Number of requests without an answer."""
        return self.sent - sum(self.statuses.values())

    async def run(self, seconds: float) -> None:
        """Send for ``seconds``, then wait a limited time for the rest (see ``waiting``), and settle
        everything."""
        rng = random.Random("soak questions")
        questions = [text(rng, rng.randint(10, 80)) for _ in range(QUESTIONS)]
        begin = self._clock()
        while (passed := self._clock() - begin) < seconds:
            while self.sent < passed * self._rate:
                self._ask(body(rng.randrange(SYSTEMS), rng.choice(questions)))
            self._settler.settle()
            await asyncio.sleep(TICK_SECONDS)
        for _ in range(round(REST_SECONDS / TICK_SECONDS)):
            if not self.waiting:
                break
            await asyncio.sleep(TICK_SECONDS)
        self._settler.settle(rest=True)

    def _ask(self, content: bytes) -> None:
        begun = self._clock()
        self.sent += 1

        def done(answer: Answer) -> None:
            now = self._clock()
            self.statuses[answer.status] += 1
            if answer.status == PICKED:
                self.latencies.append(now - begun)
                self._settler.picked(answer)

        next(self._connections).ask(f"soak-{self.sent}", _HEADERS, content, done)
