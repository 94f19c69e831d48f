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

from collections.abc import Iterator, Mapping, Sequence
from heapq import nsmallest
from itertools import product
from math import inf

import msgspec

from kvist_epp.scheduling.cost import DEFAULT, Policy, terms
from kvist_epp.scheduling.leg_columns import PAIRED, LegColumns
from kvist_epp.scheduling.leg_costs import (
    RULES,
    DisaggregationPolicy,
    LegCosts,
    decode_seconds,
    pressure,
    seconds_per_sequence,
)
from kvist_epp.scheduling.leg_table import LegTable, WarmPairs
from kvist_epp.scheduling.pick import Candidate, Demand, ScoredEndpoint, cost_rows


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


def weigh(
    table: LegTable,
    demand: Demand,
    best: ScoredEndpoint,
    *,
    now: float,
    warm: WarmPairs | None = None,
    max_backlog: float = inf,
    policy: Policy = DEFAULT,
    rules: DisaggregationPolicy = RULES,
) -> SplitDecision | Undecided:
    """Return the cheapest pair beside the aggregated alternative, whichever is chosen.

    ``best``: the ordinary pick. ``warm``: pairs that need no handshake; None: all are warm. The two endpoints
    of a pair differ, have equal compatibility labels, and roles that allow their legs. Among few endpoints
    each is looked at; among many, columns find those that are compared.
    """
    columns = None
    if table.figures is None:
        legs = _legs_of_all(table.candidates, demand, now, policy, rules, max_backlog)
    else:
        table.drain(now)
        columns = LegColumns(table, table.figures, demand, now, policy, rules, max_backlog)
        known = (table.place.get(best.endpoint.key), columns.cheapest_whole())
        legs = columns.legs(sorted({at for at in known if at is not None}))
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
    pair = _cheapest(legs, demand, warm, rules) if columns is None else _cheapest_of_many(columns, warm)
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


def _cheapest_of_many(
    columns: LegColumns, warm: WarmPairs | None
) -> tuple[LegCosts, LegCosts, dict[str, float]] | None:
    """Return the same of many endpoints."""
    if (pair := columns.cheapest_pair(warm)) is None:
        return None
    prefill, decode = columns.legs(pair)
    cold = warm is not None and (prefill.endpoint.key, decode.endpoint.key) not in warm
    return prefill, decode, _terms(prefill, decode, columns.demand, cold=cold, rules=columns.rules)


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
