"""What could be better, from what the engines did: (pool, plan, figures) → sentences. Pure.

A sentence names the figures and the field to change. What was said before is said, word for word, until its
figures have moved by a factor of two or it is clearly over: advice that flickers would write the status at
rest.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvist_operator.memory.layout import GIB
from kvist_operator.plan import Plan
from kvist_operator.spec.pool import Pool

PREEMPTED: Final = 0.01
"""Share of requests that lost their cache, from which it is worth a word."""
QUEUE: Final = 1.0
"""Requests that wait in an engine, from which it is worth a word."""
FALLS_SHORT: Final = 0.7
"""Of the promised hit rate: below it prompts are not what the hints say."""
OFF: Final = (0.9, 1.15)
"""Reported tokens of cache by planned ones, within which the plan was right."""
ROOMY: Final = 0.5
"""Share of the cache in use, under which a queue has another cause."""
FULL: Final = 0.9
SETTLED: Final = 0.5
"""What was said is said on until the figure has fallen to this part of its threshold."""
ENOUGH: Final = 50
"""Requests in the window, under which a rate means nothing."""
MOST_SHARE: Final = 97
NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")
GUIDE: Final = "docs/guides/troubleshooting.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Activity of one pool's engines in a window, from the pickers' scrapes."""

    requests: float = 0.0
    """Requests that got their first token, all engines together."""
    preemptions: float = 0.0
    """How often a request was thrown out of the cache and computed again, all engines together."""
    prompt_tokens: float = 0.0
    """Tokens of prompts that were looked up in the cache, all engines together."""
    cached_tokens: float = 0.0
    """Those of them that were found."""
    running: float = 0.0
    """Requests in the batch of an engine, the mean over engines."""
    waiting: float = 0.0
    """Requests that wait in an engine, the mean over engines."""
    kv_usage: float = 0.0
    """Share of the cache that running requests hold, 0 to 1, the mean over engines."""
    kv_tokens: int | None = None
    """Tokens of a replica's cache: the least that an engine reports; None = none has said."""


@dataclass(frozen=True, slots=True)
class _Case:
    """Input of a rule."""

    pool: Pool
    plan: Plan
    seen: Figures
    said: frozenset[str]
    """First words of the advice that stands."""

    def limit(self, value: float, head: str) -> float:
        """A threshold, lower for what has been said."""
        return value * SETTLED if head in self.said else value


def advice(pool: Pool, plan: Plan, figures: Figures, before: Sequence[str] = ()) -> tuple[str, ...]:
    """Sentences, the most urgent first; ``before`` is the advice that stands in the status."""
    old = {_head(line): line for line in before}
    case = _Case(pool, plan, figures, frozenset(old))
    found = (rule(case) for rule in RULES)
    return tuple(_kept(line, old.get(_head(line), "")) for line in found if line)


def _head(line: str) -> str:
    return line.partition(":")[0]


def _kept(new: str, old: str) -> str:
    """The old words where the new ones say the same with figures that are near."""
    if NUMBER.sub("", new) != NUMBER.sub("", old):
        return new
    pairs = zip(map(float, NUMBER.findall(new)), map(float, NUMBER.findall(old)), strict=True)
    return old if all(a <= 2 * b and b <= 2 * a for a, b in pairs) else new


def _preempted(case: _Case) -> str:
    head, seen = "Preemptions", case.seen
    share = seen.preemptions / max(1.0, seen.requests)
    if seen.requests < ENOUGH or share < case.limit(PREEMPTED, head):
        return ""
    often = f"{_percent(share)} of requests lost their cache and were computed again"
    return f"{head}: {often}. {_fewer(case.plan, seen)}{_more_memory(case.plan)}"


def _fewer(plan: Plan, seen: Figures) -> str:
    """Return how many sequences of the observed size the cache holds, with a tenth to spare."""
    most = plan.settings.sequences
    fit = _multiple(min(0.9 * seen.running / seen.kv_usage, most)) if seen.kv_usage else 0
    if not 0 < fit < most:
        return "Lower spec.engine.maxNumSeqs, or "
    return f"Set spec.engine.maxNumSeqs to {fit} (it is {most}), or "


def _multiple(number: float) -> int:
    """Of 8, downwards, where that leaves something."""
    return int(number) // 8 * 8 or int(number)


def _more_memory(plan: Plan) -> str:
    share = plan.settings.share
    if share >= MOST_SHARE or plan.hardware.accelerator.vendor == "cpu":
        return "give it more cache: spec.engine.kvCacheDtype, more memory, or more replicas."
    each = _counted(plan.layout.data * plan.memory.total / 100 / plan.memory.bytes_per_token)
    field = "spec.engine.gpuMemoryUtilizationPercent"
    return f"raise {field} above {share}: each percent is about {each} tokens of cache."


def _off(case: _Case) -> str:
    planned, reported = case.plan.memory.kv_tokens, case.seen.kv_tokens
    if not reported or planned <= 0 or OFF[0] <= reported / planned <= OFF[1]:
        return ""
    both = f"engines report {reported} tokens of cache, {planned} were planned ({reported / planned:.0%})"
    return f"Cache: {both}. {_less(case.plan) if reported < planned else SURPLUS}"


SURPLUS: Final = "The plan was cautious: spec.engine.maxModelLen or spec.engine.maxNumSeqs can be raised."


def _less(plan: Plan) -> str:
    if plan.doubts:
        return f"The plan is unverified ({plan.doubts[0]}): the reported figure is the true one."
    free = plan.memory.total * (1 - plan.settings.share / 100) / GIB
    return (
        f"Something else uses more than {free:.1f} GiB of the GPU, or this image more than the plan counts: "
        "check that no other process uses the GPU, and what spec.engine.extraArgs and env add."
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
    head, seen, promised = "Hit rate", case.seen, _promised(case.pool)
    if seen.requests < ENOUGH or not promised or not seen.prompt_tokens:
        return ""
    rate = seen.cached_tokens / seen.prompt_tokens
    slack = 1 - FALLS_SHORT
    if rate >= promised * (1 - case.limit(slack, head)):
        return ""
    hints = case.pool.workload
    shared = f"spec.workload.sharedPrefixTokens ({hints.shared_prefix_tokens} of {hints.prompt_tokens})"
    return (
        f"{head}: {_percent(rate)} of prompt tokens were in a cache, where {shared} promises "
        f"{_percent(promised)}. Prompts diverge earlier (a date, a name or an id near the beginning, tools "
        "in "
        f'changing order: "Where prompts part" in {GUIDE}), or are evicted before they come again: then '
        "spec.offload.cpu keeps them."
    )


def _promised(pool: Pool) -> float:
    """The hit rate if every prompt but the first had its shared part cached; 0 where no hint says."""
    hints = pool.workload
    if not (pool.engine.prefix_caching and hints.prompt_tokens and hints.shared_prefix_tokens):
        return 0.0
    return hints.shared_prefix_tokens / hints.prompt_tokens


RULES: Final[Sequence[Callable[[_Case], str]]] = (_preempted, _off, _waiting, _missed)
HEADS: Final = frozenset(("Preemptions", "Cache", "Queue", "Hit rate"))
"""First words of what the rules say."""


def standing(before: Sequence[str]) -> tuple[str, ...]:
    """Of the advice in a status what comes from here: it stands while nothing is known of the engines."""
    return tuple(line for line in before if _head(line) in HEADS)


def _percent(share: float) -> str:
    return f"{max(1, round(100 * share)) if share else 0} %"


def _counted(number: float) -> int:
    """For people: at least 1, and no more digits than mean something."""
    return max(1, int(float(f"{number:.2g}")))
