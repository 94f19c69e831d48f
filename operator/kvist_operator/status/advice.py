"""Advice on a running pool: sentences from the pool, its plan and the engines' figures. Pure.

A sentence names the figures and the field to change. It is repeated word for word until its figures have
changed by a factor of two or its cause is clearly over: advice that flickers would write the status of a pool
at rest.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvist_operator.memory.layout import GIB
from kvist_operator.plan import Plan
from kvist_operator.spec.pool import Pool

PREEMPTED: Final = 0.01
"""Smallest share of preempted requests for which there is advice."""
QUEUE: Final = 1.0
"""Smallest number of requests waiting in an engine for which there is advice."""
FALLS_SHORT: Final = 0.7
"""Share of the promised hit rate below which there is advice."""
OFF: Final = (0.9, 1.15)
"""Ratio of reported to planned tokens of cache within which the plan counts as right."""
ROOMY: Final = 0.5
"""Share of the cache in use below which the cache is not the cause of a queue."""
FULL: Final = 0.9
SETTLED: Final = 0.5
"""Advice is kept until its figure has fallen to this part of its threshold."""
ENOUGH: Final = 50
"""Number of requests in the window below which rates are not used."""
FEWER: Final = 0.75
"""Largest share of the present number of sequences that is advised against preemptions: with that number the
cache did overflow, whatever the last scrape shows."""
MOST_SHARE: Final = 97
NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")
GUIDE: Final = "docs/guides/troubleshooting.md"
GATEWAY_GUIDE: Final = "docs/guides/attach-gateway.md"
ENVOY_GUIDE: Final = "docs/guides/attach-envoy.md"
TLS_GUIDE: Final = "docs/guides/tls.md"
HANDSHAKE: Final = "failed in their TLS handshake"
REFUSED: Final = 20
"""Failed TLS handshakes below which they may be those of a person who tries something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Activity of one pool's engines in a window, from the pickers' scrapes."""

    requests: float = 0.0
    """Requests that ended, all engines together."""
    preemptions: float = 0.0
    """Preemptions: a request lost its KV cache blocks and was computed again; all engines together."""
    prompt_tokens: float = 0.0
    """Tokens of prompts that were looked up in the cache, all engines together."""
    cached_tokens: float = 0.0
    """Tokens of prompts that were found in the cache, all engines together."""
    running: float = 0.0
    """Requests in the batch of an engine, the mean over engines."""
    waiting: float = 0.0
    """Requests that wait in an engine, the mean over engines."""
    kv_usage: float = 0.0
    """Share of the cache that running requests hold, 0 to 1, the mean over engines."""
    kv_tokens: int | None = None
    """Tokens of a replica's cache: the least that an engine reports; None if no engine reports it."""
    picked: int | None = None
    """Requests for which the pickers picked an endpoint in half an hour; None if not all of them report it
    for as long as the engines' counters reach back."""
    tls_refusals: int = 0
    """Connections to the pickers whose TLS handshake failed."""


@dataclass(frozen=True, slots=True)
class _Case:
    """Input of a rule."""

    pool: Pool
    plan: Plan
    seen: Figures
    """Of the engines that write answers."""
    prefill: Figures | None
    """Of those that only prefill; None without roles."""
    standing: Mapping[str, str]
    """The advice that the status has now, by its first words."""

    def limit(self, value: float, head: str) -> float:
        """Return a threshold, lower for advice that the status has already."""
        return value * SETTLED if head in self.standing else value


def advice(
    pool: Pool,
    plan: Plan,
    figures: Figures,
    before: Sequence[str] = (),
    *,
    prefill: Figures | None = None,
) -> tuple[str, ...]:
    """Return sentences, the most urgent first; ``before`` is the advice that the status has now.

    ``figures`` are of the engines that write answers, ``prefill`` of those that only prefill.
    """
    old = {_head(line): line for line in before}
    case = _Case(pool, plan, figures, prefill, old)
    found = (rule(case) for rule in RULES)
    return tuple(_kept(line, old.get(_head(line), "")) for line in found if line)


def _head(line: str) -> str:
    return line.partition(":")[0]


def _kept(new: str, old: str) -> str:
    """Return the old sentence if the new one differs only in figures, and these by less than a factor of
    two."""
    if NUMBER.sub("", new) != NUMBER.sub("", old):
        return new
    pairs = zip(map(float, NUMBER.findall(new)), map(float, NUMBER.findall(old)), strict=True)
    return old if all(a <= 2 * b and b <= 2 * a for a, b in pairs) else new


def _preempted(case: _Case) -> str:
    head, seen = "Preemptions", case.seen
    share = seen.preemptions / max(1.0, seen.requests)
    if case.plan.settings.pooling or seen.requests < ENOUGH or share < case.limit(PREEMPTED, head):
        return ""
    often = f"{_percent(share)} of requests lost their cache and were computed again"
    return f"{head}: {often}. {_fewer(case.plan, seen)}{_more_memory(case.plan)}"


def _fewer(plan: Plan, seen: Figures) -> str:
    """Return how many sequences of the observed size the cache holds, with a tenth to spare, and fewer than
    now."""
    most = plan.settings.sequences
    fit = int(min(0.9 * seen.running / seen.kv_usage, FEWER * most)) if seen.kv_usage else 0
    fit = fit // 8 * 8 or fit
    if not 0 < fit < most:
        return "Lower spec.engine.maxNumSeqs, or "
    return f"Set spec.engine.maxNumSeqs to {fit} (it is {most}), or "


def _more_memory(plan: Plan) -> str:
    share = plan.settings.share
    if share >= MOST_SHARE or plan.hardware.accelerator.vendor == "cpu":
        return "increase the KV cache: spec.engine.kvCacheDtype, more memory, or more replicas."
    each = _counted(plan.layout.data * plan.memory.total / 100 / plan.memory.bytes_per_token)
    field = "spec.engine.gpuMemoryUtilizationPercent"
    return f"raise {field} above {share}: each percent is about {each} tokens of cache."


def _off(case: _Case) -> str:
    planned, reported = case.plan.memory.kv_tokens, case.seen.kv_tokens
    if not reported or planned <= 0 or OFF[0] <= reported / planned <= OFF[1]:
        return ""
    both = f"engines report {reported} tokens of cache, {planned} were planned ({reported / planned:.0%})"
    if reported > planned:
        raised = "spec.engine.maxModelLen or spec.engine.maxNumSeqs can be raised"
        return f"Cache: {both}. The plan was cautious: {raised}."
    if case.plan.doubts:
        doubt = case.plan.doubts[0]
        return f"Cache: {both}. The plan is unverified ({doubt}): the reported figure is the true one."
    free = case.plan.memory.total * (1 - case.plan.settings.share / 100) / GIB
    return (
        f"Cache: {both}. Another process uses more than {free:.1f} GiB of the GPU, or this image uses more "
        "than the plan counts: check that no other process uses the GPU, and what spec.engine.extraArgs and "
        "spec.engine.env add."
    )


def _waiting(case: _Case) -> str:
    head, seen, run = "Queue", case.seen, case.plan.settings
    if seen.waiting < case.limit(QUEUE, head) or ROOMY <= seen.kv_usage < FULL:
        return ""
    used = f"{_percent(seen.kv_usage)} of its cache is in use"
    queue = f"{head}: {_counted(seen.waiting)} requests wait in each engine, {used}"
    if seen.kv_usage >= FULL:
        return f"{queue}: more replicas, or more cache in each (spec.engine.kvCacheDtype, more accelerators)."
    if seen.running >= FULL * run.sequences:
        more = f"raise spec.engine.maxNumSeqs to {2 * run.sequences} (it is {run.sequences})"
        return f"{queue} and its batch is full: {more}."
    more = f"spec.engine.maxNumBatchedTokens (it is {run.batched_tokens}) where the time per token allows"
    return f"{queue} and its batch has room, so they wait for prefill: more replicas, or a larger {more}."


def _missed(case: _Case) -> str:
    head, seen, hints = "Hit rate", case.seen, case.pool.workload
    if not (case.plan.routes_by_prefix and hints.prompt_tokens and hints.shared_prefix_tokens):
        return ""
    if seen.requests < ENOUGH or not seen.prompt_tokens:
        return ""
    rate = seen.cached_tokens / seen.prompt_tokens
    promised = hints.shared_prefix_tokens / hints.prompt_tokens  # all but the first prompt find this part
    if rate >= promised * (1 - case.limit(1 - FALLS_SHORT, head)):
        return ""
    shared = f"spec.workload.sharedPrefixTokens ({hints.shared_prefix_tokens} of {hints.prompt_tokens})"
    return (
        f"{head}: {_percent(rate)} of prompt tokens were in a cache, where {shared} promises "
        f"{_percent(promised)}. Prompts diverge earlier (a date, a name or an id near the start, tools in "
        f'changing order: "Where prompts diverge" in {GUIDE}), or their KV cache blocks are evicted before '
        "they are used again: then spec.offload.cpu keeps them."
    )


def _ratio(case: _Case) -> str:
    """Return which role lacks engines while the other one has some to spare."""
    head, prefill, decode = "Ratio", case.prefill, case.seen
    if prefill is None:
        return ""
    queue = case.limit(QUEUE, head)
    used = f"{_percent(decode.kv_usage)} of the cache of engines for decode is in use"
    if prefill.waiting >= queue and decode.waiting < QUEUE and decode.kv_usage < ROOMY:
        wait = f"{_counted(prefill.waiting)} requests wait in each engine for prefill"
        more = "raise spec.disaggregation.prefill.replicas, or give it engines of decode"
        return f"{head}: {wait}, and {used}: {more}."
    if decode.waiting >= queue and decode.kv_usage >= FULL and prefill.waiting < QUEUE:
        wait = f"{_counted(decode.waiting)} requests wait in each engine for decode"
        more = "raise spec.disaggregation.decode.replicas (spec.replicas), or give it engines of prefill"
        return f"{head}: {wait}, {used}, and none wait for prefill: {more}."
    return ""


def _unasked(case: _Case) -> str:
    """Return that the gateway does not get through to the pickers, or does not try."""
    head, seen, gateway = "Pickers", case.seen, case.pool.gateway
    old = case.standing.get(head, "")
    if seen.picked is None:
        return old
    if seen.picked:
        return ""
    guide = GATEWAY_GUIDE if gateway.mode == "Route" else TLS_GUIDE
    if seen.tls_refusals >= (REFUSED * SETTLED if HANDSHAKE in old else REFUSED):
        failed = f"{_counted(seen.tls_refusals)} connections to the pickers {HANDSHAKE}"
        log = f"The pickers' log names the reason, and {guide} what a gateway needs."
        return f"{head}: no request was picked, and {failed}. {log}"
    if seen.requests < case.limit(ENOUGH, head):
        return ""
    nothing = f"{head}: engines answered {_counted(seen.requests)} requests, and the pickers picked for none"
    if gateway.mode == "Envoy":
        service = f"the Service {case.pool.name}-envoy"
        return f"{nothing}: clients use another address than {service}, or its pods do not reach the pickers."
    if gateway.mode == "Route":
        return f"{nothing}: see in {GATEWAY_GUIDE} what your gateway needs, and whether clients use it."
    guides = f"{ENVOY_GUIDE} or {GATEWAY_GUIDE}"
    return f"{nothing}: connect them by {guides}, or set spec.picker.mode to Off."


RULES: Final[Sequence[Callable[[_Case], str]]] = (_unasked, _preempted, _off, _ratio, _waiting, _missed)
HEADS: Final = frozenset(("Pickers", "Preemptions", "Cache", "Ratio", "Queue", "Hit rate"))
"""Texts before the colon of each rule's sentences."""


def standing(before: Sequence[str]) -> tuple[str, ...]:
    """Return the advice of these rules in a status, which is kept while there are no figures."""
    return tuple(line for line in before if _head(line) in HEADS)


def _percent(share: float) -> str:
    return f"{max(1, round(100 * share)) if share else 0} %"


def _counted(number: float) -> int:
    """Round to two digits, at least 1."""
    return max(1, int(float(f"{number:.2g}")))
