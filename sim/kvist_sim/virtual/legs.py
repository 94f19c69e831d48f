"""Requests of two legs in virtual time: one engine computes a prompt, another one receives its blocks and
answers.

As with vLLM's NixlConnector, which pulls: the first engine computes the prompt and one token, and keeps the
blocks; the second one reserves blocks when the request comes to the head of its queue, reads what it does not
hold of the prompt, and admits the request when all of it is there. Its last block is computed again (a whole
prompt in the cache still computes its last tokens). Each engine sends or receives one prompt at a time, so
that transfers of a busy engine wait for each other. Handshakes are done before the run, as the product does
them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvist_sim.engine.timing import KV_BYTES_PER_TOKEN
from kvist_sim.virtual.jobs import Call
from kvist_sim.virtual.policy import Pod

NETWORK_BYTES_PER_SECOND: Final = 12.5e9
"""100 Gbit/s for each engine."""
TRANSFER_RATE: Final = NETWORK_BYTES_PER_SECOND / KV_BYTES_PER_TOKEN
"""Tokens/s from one engine to another."""
LEG_SECONDS: Final = 0.010
"""From the end of the first leg to the second engine's queue: an answer, a request, a gateway."""


@dataclass(slots=True)
class Transfer:
    """The blocks of one prompt on their way."""

    source: Pod
    target: Pod
    links: "Links"
    release: Callable[[], None]
    """Lets the first engine drop its blocks."""
    seconds: float = 0.0
    """Time that the transfer took, waiting for others included."""

    def begin(self, tokens: int, now: float) -> float:
        """Return when ``tokens`` are there."""
        ready = self.links.occupy(self.source, self.target, tokens / TRANSFER_RATE, now)
        self.seconds = ready - now
        self.links.after(self.seconds, lambda _nothing: self.release(), None)
        return ready


class Links:
    """Each engine's link to the network."""

    def __init__(self, after: Callable[[float, Callable[[Any], None], Any], None]) -> None:
        self.after = after
        self._free: dict[Pod, float] = {}

    def occupy(self, one: Pod, other: Pod, seconds: float, now: float) -> float:
        """Return when a transfer of so many seconds between two engines ends; it waits for both links."""
        begin = max(now, self._free.get(one, 0.0), self._free.get(other, 0.0))
        self._free[one] = self._free[other] = end = begin + seconds
        return end


def first_leg(call: Call) -> Call:
    """Return the request for the prompt of a call and one token, which is not shown to the client."""
    leg = Call(call.number, call.session, call.prompt, call.prompt, 1, call.arrived, measured=False)
    leg.output, leg.leg = 1, ".prefill"
    return leg
