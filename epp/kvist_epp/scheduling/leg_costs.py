"""The cost of either leg of a request at one endpoint, or of both; the constants of disaggregation. Pure.

``disaggregation`` compares endpoints and pairs of them by these costs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kvist_epp.load.endpoint_load import DEFAULT_TRANSFER_RATE, EndpointLoad
from kvist_epp.load.prefill_share import MEMORY_SECONDS
from kvist_epp.load.tpot_admission import LEAST_SHARE
from kvist_epp.scheduling.cost import TERMS, EndpointCost, Policy
from kvist_epp.scheduling.pick import Candidate, ScoredEndpoint, scored

_AT: Final = {name: at for at, name in enumerate(TERMS)}


@dataclass(frozen=True, slots=True)
class DisaggregationPolicy:
    """Every constant of the decision, in seconds and tokens."""

    least_tokens: float = 512.0
    """A prompt with fewer uncached tokens is never computed elsewhere: up to 286 ride on a decode step at no
    cost (15,928 tokens/s x 18 ms), and two requests instead of one take as long as the rest."""
    margin_seconds: float = 0.02
    """The disaggregated alternative must be cheaper by this much: estimates are no better, and a request that
    stays has one engine less that may fail."""
    leg_seconds: float = 0.02
    """Fixed time of a transfer: the first leg's answer, the second leg's request, and the notifications of
    both engines."""
    handshake_seconds: float = 2.4
    """First transfer between two engines that have not met: measured with vLLM 0.32 on CPUs."""
    decode_seconds: float = 5.0
    """Time from first to last token of a request until endpoints have shown theirs: 250 tokens at 20 ms."""
    most_price: float = 0.16
    """Price of a second of prefill for each sequence that decodes there, at most: the share of slow answers
    is steep near the target, and what is known of it is seconds old. Twice ``Policy.price_running``."""
    slow_seconds: float = 2.0
    """Seconds of waiting for a first token that an answer slower than the TPOT target outweighs: what users
    of chats accept at most. Only under a target; without one, a second of delay costs
    ``Policy.price_running``."""
    crowded: float = 0.25
    """An endpoint whose sequences leave less than this share of its time for prompts has enough of them."""
    opening_seconds: float = 5.0
    """Price of the first sequence on an endpoint, where prompts would prolong answers by all that the target
    allows if every endpoint computed its part of them."""
    pressing: float = 1.5
    """The price grows with how much prompts press (0 to 1) to the power of this: a soft threshold."""
    opened: float = 8.0
    """Sequences from which one more costs half of that; with twice as many a fifth, and so on with the
    square. An endpoint with a few has hardly more of its time for prompts than one with many, so that all of
    the first ones are dear."""
    usual_share: float = 0.5
    """Share of its time that prompts may take on an endpoint that has shown no sequences yet: a token takes
    18 ms undisturbed, and may take 36 under a target of 40."""
    most_share: float = 0.9
    """Share of its time that an endpoint is taken to spend on prompts at most: beyond, sequences there would
    never end."""


RULES: Final = DisaggregationPolicy()
SPLIT_TERMS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "prefill_wait": "At the prefill endpoint: backlog, slot, TPOT target, loads from slower tiers.",
        "prefill": "The work times its price there, and what evictions cost others.",
        "transfer": "A fixed time, and the tokens that the decode endpoint lacks and waits for.",
        "handshake": "The first transfer between two engines.",
        "admission": "Until the decode endpoint has a slot, blocks and time, after the rest.",
        "decode": "A little per sequence at the decode endpoint.",
        "interference": "What prompts at the decode endpoint will do to this answer.",
        "opening": "The price of a sequence at an endpoint with few, where prompts press.",
        "copy": "A little for the share of the prompt that two endpoints hold then.",
    }
)
"""Terms of the disaggregated alternative, in the order in which they are added."""
WHOLE_TERMS: Final = (
    "wait",
    "slot",
    "deferral",
    "prefill",
    "load",
    "eviction",
    "decode",
    "interference",
    "opening",
)
"""Terms of the aggregated alternative: those of the ordinary cost, with the price of prefill at the
endpoint."""


class LegCosts:
    """One endpoint for one request: what either leg, or both together, cost there."""

    __slots__ = (
        "allowed",
        "deferral",
        "endpoint",
        "full",
        "interference",
        "load",
        "missing",
        "no_room",
        "opening",
        "policy",
        "prefill_seconds",
        "receiving",
        "row",
        "rules",
        "seconds",
        "share",
        "takes_requests",
    )

    def __init__(
        self,
        candidate: Candidate,
        row: EndpointCost,
        seconds: tuple[float, ...],
        now: float,
        policy: Policy,
        rules: DisaggregationPolicy,
        max_backlog: float,
    ) -> None:
        self.endpoint, self.load, self.row, self.seconds = candidate.endpoint, row.load, row, seconds
        self.takes_requests = not candidate.refusal
        self.policy, self.rules = policy, rules
        self.share = self.load.prefill_share.at(now)
        """Part of its time that goes to prompts."""
        self.receiving = max(0.0, self.load.receives_until - now)
        """Seconds until what is on its way here has arrived."""
        self.interference = 0.0
        """The price of that."""
        self.opening = 0.0
        """The price of a sequence where there are few: prompts would have to wait for it."""
        self.prefill_seconds = 0.0
        """The work that this request answers for, times its price here."""
        self.full = self.load.full(max_backlog)
        self.no_room = self.load.tpot is not None and not self.load.tpot.has_room(row.uncached)
        self.missing = row.uncached
        self.allowed = row.prefill_share
        """Part of its time that prompts may take (TPOT target), with the sequences that it has now."""
        self.deferral = self.term("deferral")
        """Seconds until the TPOT target lets it take up the prompt."""
        if self.load.tpot is not None and row.deferred:
            until = self.load.tpot.seconds_until_admitted(row.uncached, self.load.rate, now)
            self.deferral = max(self.deferral, until)

    def set_allowed(self, per_sequence: float) -> None:
        """Correct what is known of the endpoint for sequences that came since it was measured.

        ``per_sequence``: seconds by which a sequence prolongs a token. Where sequences are packed, an
        endpoint gets more of them between two scrapes than it had, and would look as free as before.
        """
        if (tpot := self.load.tpot) is not None:
            self.allowed = tpot.share_with(decoding(self.load), per_sequence)

    def set_prices(self, answer_seconds: float, pressure: float) -> None:
        """Set what prompts do to sequences here; ``answer_seconds``: from the first to the last token.

        Without a TPOT target each second that a sequence waits for a prompt has a price. With one, an answer
        that is fast enough loses nothing: the share of answers that are ``slow`` counts, with the work and
        without it, among the sequences that pass while the work is remembered.
        """
        row, rules = self.row, self.rules
        work = row.work * row.own / row.uncached if row.uncached else row.work
        sequences = decoding(self.load)
        self.opening = rules.opening_seconds * pressure / (1.0 + (sequences / rules.opened) ** 2)
        if self.load.tpot is None:
            price = self.policy.price_running
            self.interference = price * answer_seconds * odds(self.share, rules)
            self.prefill_seconds = work * (1.0 + price * sequences)
            return
        before = slow(self.share, self.allowed, rules)
        after = slow(self.share + row.work / MEMORY_SECONDS, self.allowed, rules)
        passing = max(1.0, MEMORY_SECONDS / answer_seconds)
        crowd = min(1.0, max(0.0, (rules.crowded - self.allowed) / (rules.crowded - LEAST_SHARE)))
        self.interference = rules.slow_seconds * max(before, crowd)
        price = min(rules.slow_seconds * passing * (after - before), rules.most_price * row.work)
        self.prefill_seconds = work + price * sequences

    def term(self, name: str) -> float:
        """Return a term of the ordinary cost."""
        return self.seconds[_AT[name]]

    def whole(self) -> dict[str, float]:
        """Return the terms of both legs here, by ``WHOLE_TERMS``."""
        return {
            "wait": self.term("wait"),
            "slot": self.term("slot"),
            "deferral": self.deferral,
            "prefill": self.prefill_seconds,
            "load": self.term("load"),
            "eviction": self.term("eviction"),
            "decode": self.term("decode"),
            "interference": self.interference,
            "opening": self.opening,
        }

    def whole_cost(self) -> float:
        """The ordinary cost with what prompts do to the sequence, by which endpoints for both legs are
        compared.

        The price of work is the pool's mean there: with each endpoint's own, whole requests would part the
        pool.
        """
        ordinary = sum(self.seconds) - self.term("deferral") + self.deferral
        return ordinary + self.interference + self.opening

    @property
    def prefill_cost(self) -> float:
        """Cost of the first leg here."""
        return self.prefill_wait + self.prefill_seconds + self.term("eviction")

    @property
    def prefill_wait(self) -> float:
        """Seconds until its prefill begins, loads from slower tiers included."""
        return self.term("wait") + self.term("slot") + self.deferral + self.term("load")

    @property
    def transfer_seconds(self) -> float:
        """Seconds of receiving what it does not hold of the prompt."""
        return self.rules.leg_seconds + self.missing / self._transfer_rate

    @property
    def queue_seconds(self) -> float:
        """Seconds until it has received what is on its way and what it is promised."""
        return self.receiving + self.load.promised_tokens / self._transfer_rate

    @property
    def _transfer_rate(self) -> float:
        return self.load.transfer_rate or DEFAULT_TRANSFER_RATE

    @property
    def room_seconds(self) -> float:
        """Seconds until it has a slot and blocks for the request."""
        return self.term("slot") + (self.policy.deferred_seconds if self.no_room else 0.0)

    @property
    def decode_cost(self) -> float:
        """Cost of the second leg here, without its wait behind prompts, which may pass during the first."""
        return (
            self.queue_seconds
            + self.transfer_seconds
            + self.room_seconds
            + self.term("decode")
            + self.interference
            + self.opening
        )

    def scored(self) -> ScoredEndpoint:
        """Return what is shown of it."""
        return scored(self.endpoint, self.row, self.seconds, full=self.full)


def odds(share: float, rules: DisaggregationPolicy = RULES) -> float:
    """Return by how much of its length prompts prolong an answer, if they take this share of the time."""
    share = min(share, rules.most_share)
    return share / (1.0 - share)


def slow(share: float, allowed: float, rules: DisaggregationPolicy = RULES) -> float:
    """Return the part of answers that are slower than the target, 0..1, where prompts take this share of an
    endpoint's time and may take ``allowed``. The cube is a soft threshold: half of them where both are equal.
    """
    cube = odds_ratio(share, allowed, rules) ** 3
    return cube / (1.0 + cube)


def odds_ratio(share: float, allowed: float, rules: DisaggregationPolicy = RULES) -> float:
    """Return by how much prompts prolong an answer, by how much they may: 1 where they take the share of the
    time that is ``allowed``."""
    if allowed >= 1.0:  # nothing is known of sequences there
        allowed = rules.usual_share
    return odds(share, rules) / max(odds(allowed, rules), 0.01)


def pressure(share: float, allowed: float, rules: DisaggregationPolicy = RULES) -> float:
    """Return how much prompts press, 0..1: how much they would prolong answers if all endpoints had equal
    parts of both, by how much they may, to the power of ``pressing``: a soft threshold.

    ``share``: the mean part of the endpoints' time that goes to prompts; ``allowed``: the mean part that may.
    Where answers would be fast enough with their share of the prompts, nothing is gained by an endpoint
    without sequences, and its cache is missed.
    """
    pressed: float = odds_ratio(share, allowed, rules) ** rules.pressing
    return min(1.0, pressed)


def decode_seconds(candidates: Iterable[Candidate], rules: DisaggregationPolicy = RULES) -> float:
    """Return how long answers take, by the endpoints that give them."""
    known = [
        one.load.decode_seconds for one in candidates if one.load.decode_seconds and one.endpoint.can_decode
    ]
    return max(known, default=rules.decode_seconds)


def seconds_per_sequence(loads: Iterable[EndpointLoad]) -> float:
    """Return by how many seconds a sequence prolongs a token, over all endpoints; 0 while it is not known.

    A decode step reads the weights once, and the keys and values of each of its sequences.
    """
    times = [load.tpot.token_time for load in loads if load.tpot is not None]
    learned = [one for one in times if one.slowdown]
    sequences = sum([one.sequences for one in learned])
    return sum([one.slowdown for one in learned]) / sequences if sequences else 0.0


def decoding(load: EndpointLoad) -> int:
    """Return how many sequences decode on an endpoint, as far as known."""
    return max(0, load.running - len(load.prefill_queue))
