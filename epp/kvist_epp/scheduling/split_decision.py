"""Whether another endpoint than the one that answers should compute a prompt; decided by cost. Pure.

Any engine with NIXL can compute a prompt for another one and can receive what another one has computed
(vLLM's NixlConnector; roles are advisory). So a request has two kinds of alternatives, both in seconds::

    aggregated    = wait + slot + deferral + prefill + load + eviction + decode + interference + opening
    disaggregated = prefill_wait + prefill + transfer + handshake         at the prefill endpoint, then
                    admission + decode + interference + opening + copy    at the decode endpoint

``prefill`` is the work times the price that the sequences on *that* endpoint put on it: each waits while the
prompt is computed. ``interference`` is the price of what prompts to come there will do to the sequence of
this request. Both together make an endpoint with few sequences compute prompts, and one with few prompts
decode, where endpoints are fluid (role ``both``), in a ratio that follows the traffic.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest
from itertools import product
from math import inf
from typing import Final

import msgspec

from kvist_epp.scheduling.cost import DEFAULT, Policy, terms
from kvist_epp.scheduling.leg_costs import (
    RULES,
    DisaggregationPolicy,
    LegCosts,
    odds_ratio,
    seconds_per_sequence,
)
from kvist_epp.scheduling.pick import Candidate, Demand, ScoredEndpoint, allows, cost_rows

PAIRED: Final = 4
"""Of each set of compatible endpoints, the cheapest for either leg that are paired with each other, or each
with so many that it has met."""


class SplitDecision(msgspec.Struct, frozen=True):
    """A request whose prompt one endpoint computes and another one answers, with both alternatives' costs."""

    prefill: ScoredEndpoint
    """The endpoint of the first leg; ``uncached_tokens`` are computed there."""
    decode: ScoredEndpoint
    """The endpoint that answers."""
    transferred_tokens: int
    """Tokens of the prompt that the decode endpoint does not have."""
    split_terms: Mapping[str, float]
    """Seconds of the disaggregated alternative by ``SPLIT_TERMS``."""
    whole_terms: Mapping[str, float]
    """Seconds of the aggregated alternative by ``WHOLE_TERMS``."""
    whole: ScoredEndpoint
    """The endpoint of the aggregated alternative: the ordinary pick, or one that is clearly better."""
    chosen: bool
    """The disaggregated alternative is cheaper by more than the margin."""
    reason: str
    """The decision in words."""

    @property
    def split_seconds(self) -> float:
        """Cost of the disaggregated alternative."""
        return sum(self.split_terms.values())

    @property
    def whole_seconds(self) -> float:
        """Cost of the aggregated alternative."""
        return sum(self.whole_terms.values())

    @property
    def predicted_ttft_seconds(self) -> float:
        """Predicted time to the first token of the disaggregated alternative."""
        names = ("prefill_wait", "transfer", "handshake", "admission")
        work = self.prefill.predicted_ttft_seconds - self.split_terms["prefill_wait"]
        return sum(self.split_terms[name] for name in names) + max(0.0, work)


class Undecided(msgspec.Struct, frozen=True):
    """Why no pair of endpoints was considered."""

    label: str
    """The same as a label of metrics."""
    reason: str
    whole: ScoredEndpoint
    """The endpoint for both legs."""


class WarmPairs:
    """Pairs of engines whose handshake is done; NIXL connects two engines at their first transfer."""

    def __init__(self) -> None:
        self._decodes: dict[str, set[str]] = {}
        self._prefills: dict[str, set[str]] = {}

    def add(self, prefill: str, decode: str) -> None:
        """Note that blocks were transferred from one endpoint to another (keys)."""
        self._decodes.setdefault(prefill, set()).add(decode)
        self._prefills.setdefault(decode, set()).add(prefill)

    def remove_endpoint(self, key: str) -> None:
        """Forget the pairs of an endpoint that has left or restarted."""
        for decode in self._decodes.pop(key, ()):
            self._prefills.get(decode, set()).discard(key)
        for prefill in self._prefills.pop(key, ()):
            self._decodes.get(prefill, set()).discard(key)

    def decodes_of(self, prefill: str) -> Collection[str]:
        """Return the endpoints to which an endpoint has transferred blocks."""
        return self._decodes.get(prefill, ())

    def prefills_of(self, decode: str) -> Collection[str]:
        """Return the endpoints from which an endpoint has got blocks."""
        return self._prefills.get(decode, ())

    def __contains__(self, pair: tuple[str, str]) -> bool:
        return pair[1] in self._decodes.get(pair[0], ())

    def __len__(self) -> int:
        return sum(map(len, self._decodes.values()))


def weigh(
    candidates: Sequence[Candidate],
    demand: Demand,
    best: ScoredEndpoint,
    subset: tuple[str, ...] | None = None,
    *,
    now: float,
    warm: WarmPairs | None = None,
    max_backlog: float = inf,
    policy: Policy = DEFAULT,
    rules: DisaggregationPolicy = RULES,
) -> SplitDecision | Undecided:
    """Return the cheapest pair beside the aggregated alternative, whichever is chosen.

    ``best``: the ordinary pick. ``warm``: pairs that need no handshake; None: all are warm. The two endpoints
    of a pair differ, have equal compatibility labels, and roles that allow their legs.
    """
    able = [c for c in candidates if c.ready and (subset is None or allows(subset, c.endpoint))]
    rows = cost_rows(able, demand, now, policy) if able else []
    seconds = terms(rows, demand.tokens, demand.uses, policy) if rows else []
    legs = [
        LegCosts(candidate, row, tuple([column[at] for column in seconds]), now, policy, rules, max_backlog)
        for at, (candidate, row) in enumerate(zip(able, rows, strict=True))
    ]
    per_sequence = seconds_per_sequence([one.load for one in legs])
    for one in legs:
        one.set_allowed(per_sequence)
    answer_seconds = _decode_seconds(legs, rules)
    pressure = _pressure(legs, rules)
    for one in legs:
        one.set_prices(answer_seconds, pressure)
    whole = _cheapest_whole(legs, best, rules)
    if whole is None:
        return Undecided("no-pair", "the picked endpoint is not ready", best)
    row = best if whole.endpoint.key == best.endpoint.key else whole.scored()
    uncached = whole.row.uncached
    if uncached < rules.least_tokens:
        why = f"fewer than {rules.least_tokens:.0f}"
        return Undecided(
            "few-tokens", f"{uncached} uncached tokens are too few to compute elsewhere ({why})", row
        )
    pair = _cheapest(legs, demand, warm, rules)
    if pair is None:
        return Undecided("no-pair", "no two ready endpoints have roles and labels that allow it", row)
    prefill, decode, split = pair
    whole_terms = whole.whole()
    total, other = sum(whole_terms.values()), sum(split.values())
    chosen = other < total - rules.margin_seconds
    reason = (
        f"{'prefill at' if chosen else 'not disaggregated: prefill at'} {prefill.endpoint.key} and decode at "
        f"{decode.endpoint.key} costs {other:.3f} s, {decode.missing} tokens transferred; "
        f"all at {whole.endpoint.key} costs {total:.3f} s"
    )
    return SplitDecision(
        prefill.scored(), decode.scored(), decode.missing, split, whole_terms, row, chosen, reason
    )


def _cheapest_whole(
    legs: Sequence[LegCosts], best: ScoredEndpoint, rules: DisaggregationPolicy
) -> LegCosts | None:
    """Return the endpoint for both legs: the ordinary pick unless another one is clearly cheaper."""
    able = [one for one in legs if one.takes_requests]
    picked = next((one for one in able if one.endpoint.key == best.endpoint.key), None)
    if picked is None:
        return None
    open_ones = [one for one in able if not (one.full or one.no_room or one.row.deferred)]
    if not open_ones:
        return picked
    found = min(open_ones, key=LegCosts.whole_cost)
    return found if found.whole_cost() < picked.whole_cost() - rules.margin_seconds else picked


def _pressure(legs: Sequence[LegCosts], rules: DisaggregationPolicy) -> float:
    """Return how much prompts press, 0..1: how much they would prolong answers if all endpoints had equal
    parts of both, by how much they may, to the power of ``pressing``: a soft threshold.

    Where answers would be fast enough with their share of the prompts, nothing is gained by an endpoint
    without sequences, and its cache is missed.
    """
    if not legs:
        return 0.0
    share = sum([one.share for one in legs]) / len(legs)
    allowed = sum([one.allowed for one in legs]) / len(legs)
    pressed: float = odds_ratio(share, allowed, rules) ** rules.pressing
    return min(1.0, pressed)


def _decode_seconds(legs: Iterable[LegCosts], rules: DisaggregationPolicy) -> float:
    """Return how long answers take, by the endpoints that give them."""
    known = [one.load.decode_seconds for one in legs if one.endpoint.can_decode and one.load.decode_seconds]
    return max(known, default=rules.decode_seconds)


def _cheapest(
    legs: Sequence[LegCosts], demand: Demand, warm: WarmPairs | None, rules: DisaggregationPolicy
) -> tuple[LegCosts, LegCosts, dict[str, float]] | None:
    """Return the cheapest pair and its terms. None: there is no pair.

    Pairs that have met come first, since only they are used; then those without an endpoint that is full.
    """
    groups: dict[str, tuple[list[LegCosts], list[LegCosts]]] = {}
    for one in legs:
        first, second = groups.setdefault(one.endpoint.kv_compatibility, ([], []))
        if one.endpoint.can_prefill:
            first.append(one)
        if one.endpoint.can_decode:
            second.append(one)
    found: tuple[LegCosts, LegCosts, dict[str, float]] | None = None
    least = (True, True, inf)
    for first, second in groups.values():
        for prefill, decode in _shortlist(first, second, warm):
            if prefill is decode:
                continue
            cold = warm is not None and (prefill.endpoint.key, decode.endpoint.key) not in warm
            split = _terms(prefill, decode, demand, cold=cold, rules=rules)
            full = any((prefill.full, prefill.no_room, decode.full, decode.no_room))
            key = cold, full, sum(split.values())
            if found is None or key < least:
                least, found = key, (prefill, decode, split)
    return found


def _shortlist(
    first: Sequence[LegCosts], second: Sequence[LegCosts], warm: WarmPairs | None
) -> Iterator[tuple[LegCosts, LegCosts]]:
    """Yield the pairs of the cheapest endpoints of either leg and, if some of them have not met, of each of
    these with the cheapest that it has met."""
    prefills, decodes = nsmallest(PAIRED, first, key=_as_prefill), nsmallest(PAIRED, second, key=_as_decode)
    yield from product(prefills, decodes)
    if warm is None or all(
        one is other or (one.endpoint.key, other.endpoint.key) in warm
        for one in prefills
        for other in decodes
    ):
        return
    by_key = {one.endpoint.key: one for one in second}
    for one in prefills:
        met = [by_key[key] for key in warm.decodes_of(one.endpoint.key) if key in by_key]
        yield from ((one, other) for other in nsmallest(PAIRED, met, key=_as_decode))
    by_key = {one.endpoint.key: one for one in first}
    for other in decodes:
        met = [by_key[key] for key in warm.prefills_of(other.endpoint.key) if key in by_key]
        yield from ((one, other) for one in nsmallest(PAIRED, met, key=_as_prefill))


def _as_prefill(one: LegCosts) -> tuple[bool, float]:
    return one.full or one.no_room, one.prefill_cost


def _as_decode(one: LegCosts) -> tuple[bool, float]:
    return one.full or one.no_room, one.decode_cost


def _terms(
    prefill: LegCosts, decode: LegCosts, demand: Demand, *, cold: bool, rules: DisaggregationPolicy
) -> dict[str, float]:
    """Return the terms of a pair by ``SPLIT_TERMS``."""
    transfer = decode.transfer_seconds
    handshake = rules.handshake_seconds if cold else 0.0
    there = prefill.prefill_wait + prefill.row.work
    transfer += max(0.0, decode.queue_seconds - there)
    there += transfer + handshake
    return {
        "prefill_wait": prefill.prefill_wait,
        "prefill": prefill.prefill_seconds + prefill.term("eviction"),
        "transfer": transfer,
        "handshake": handshake,
        "admission": decode.room_seconds + max(0.0, decode.term("wait") - there),
        "decode": decode.term("decode"),
        "interference": decode.interference,
        "opening": decode.opening,
        "copy": decode.policy.copy_seconds * decode.missing / max(1, demand.tokens),
    }
