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
from kvist_epp.scheduling.leg_columns import LegColumns
from kvist_epp.scheduling.leg_costs import (
    RULES,
    DisaggregationPolicy,
    LegCosts,
    decode_seconds,
    pressure,
    seconds_per_sequence,
)
from kvist_epp.scheduling.load_columns import FEW
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
    few: int = FEW,
) -> SplitDecision | Undecided:
    """Return the cheapest pair beside the aggregated alternative, whichever is chosen.

    ``best``: the ordinary pick. ``warm``: pairs that need no handshake; None: all are warm. The two endpoints
    of a pair differ, have equal compatibility labels, and roles that allow their legs. ``few``: endpoints up
    to which each is looked at; among more, columns find those that are compared.
    """
    able = [c for c in candidates if c.ready and (subset is None or allows(subset, c.endpoint))]
    if len(able) > few:
        legs = _legs_of_some(LegColumns(able, demand, now, policy, rules, max_backlog), best, warm)
    else:
        legs = _legs_of_all(able, demand, now, policy, rules, max_backlog)
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


def _legs_of_all(
    candidates: Sequence[Candidate],
    demand: Demand,
    now: float,
    policy: Policy,
    rules: DisaggregationPolicy,
    max_backlog: float,
) -> list[LegCosts]:
    """Return the costs at each endpoint."""
    if not candidates:
        return []
    rows = cost_rows(candidates, demand, now, policy)
    seconds = zip(*terms(rows, demand.tokens, demand.uses, policy), strict=True)
    legs = [
        LegCosts(candidate, row, each, now, policy, rules, max_backlog)
        for candidate, row, each in zip(candidates, rows, seconds, strict=True)
    ]
    per_sequence = seconds_per_sequence([one.load for one in legs])
    for one in legs:
        one.set_allowed(per_sequence)
    answer_seconds = decode_seconds(candidates, rules)
    share, allowed = (sum(each) / len(legs) for each in ([x.share for x in legs], [x.allowed for x in legs]))
    pressed = pressure(share, allowed, rules)
    for one in legs:
        one.set_prices(answer_seconds, pressed)
    return legs


def _legs_of_some(columns: LegColumns, best: ScoredEndpoint, warm: WarmPairs | None) -> list[LegCosts]:
    """Return the costs at those of many endpoints that are compared: the ordinary pick, the cheapest for both
    legs, and the shortlists of each set of compatible ones."""
    place: dict[str, int] = {}
    groups: dict[str, tuple[list[int], list[int]]] = {}
    takers: list[int] = []
    for at, candidate in enumerate(columns.candidates):
        endpoint = candidate.endpoint
        place[endpoint.key] = at
        first, second = groups.setdefault(endpoint.kv_compatibility, ([], []))
        if endpoint.can_prefill:
            first.append(at)
        if endpoint.can_decode:
            second.append(at)
        if not candidate.refusal:
            takers.append(at)
    found = {place[best.endpoint.key]} if best.endpoint.key in place else set()
    shut = columns.closed | columns.deferred
    if open_ones := [at for at in takers if not shut[at]]:
        found.add(open_ones[int(columns.whole_cost[open_ones].argmin())])
    for first, second in groups.values():
        prefills = columns.cheapest(columns.prefill_cost, first, PAIRED)
        decodes = columns.cheapest(columns.decode_cost, second, PAIRED)
        found.update(prefills, decodes)
        if warm is None:
            continue
        among, other = set(first), set(second)
        for at in prefills:
            met = _places(warm.decodes_of(columns.candidates[at].endpoint.key), place, other)
            found.update(columns.cheapest(columns.decode_cost, met, PAIRED))
        for at in decodes:
            met = _places(warm.prefills_of(columns.candidates[at].endpoint.key), place, among)
            found.update(columns.cheapest(columns.prefill_cost, met, PAIRED))
    return columns.legs(found)


def _places(keys: Iterable[str], place: Mapping[str, int], among: Collection[int]) -> list[int]:
    """Return the places of these endpoints that are ``among`` others, in order."""
    return sorted(at for key in keys if (at := place.get(key)) is not None and at in among)


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
