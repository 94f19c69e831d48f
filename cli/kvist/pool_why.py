"""Explain an InferencePool from its status, for ``kvist why``: problems, remedies, cache, plan. Pure.

``explanation`` turns the object into plain values (``-o json``), and ``page`` those into one page of text.
Fields that are absent or have an unexpected type count as not reported: the object may be of an older
operator, or of a file that was edited.
"""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from kvist_operator.status.advice import OFF
from kvist_operator.status.reasons import REASONS, Reason

from .plan_text import PARTS, bar, from_status, reasons, sizes, width

Json = dict[str, Any]
FINE: Final = "nothing"
"""Remedy of reasons that describe a pool without a problem."""
OTHERS: Final = Reason(
    "a reason of the gateway's controller, or of a newer operator", "read the message of the condition"
)
MESSAGE: Final = 700
"""Characters of a message on the page; an engine's own error may be longer, and ``-o json`` has all."""
_MEMORY: Final = ("per_gpu_gib", "usable_gib", "unused_gib", *(key for _, key, _ in PARTS))
_AGES: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def explanation(resource: Mapping[str, Any]) -> Json:
    """Return what is known of a pool, from its object with status."""
    meta, spec, status = (_mapping(resource.get(key)) for key in ("metadata", "spec", "status"))
    model = _mapping(spec.get("model"))
    plan = from_status(_mapping(status.get("plan")))
    conditions = [_condition(each) for each in _mappings(status.get("conditions"))]
    return {
        "namespace": _text(meta.get("namespace")) or "default",
        "name": _text(meta.get("name")),
        "generation": _number(meta.get("generation")),
        "observed_generation": _number(status.get("observedGeneration")),
        "model": _text(model.get("source")),
        "revision": _text(_mapping(status.get("model")).get("revision")),
        "url": _text(status.get("url")),
        "operator": _text(status.get("operator")),
        "preset": _text(status.get("preset")),
        "replicas": {
            "desired": _number(spec.get("replicas"), 1),
            "ready": _number(status.get("readyReplicas")),
            "updated": _number(status.get("updatedReplicas")),
        },
        "cache": _cache(plan, status),
        "problems": _problems(conditions),
        "advice": [_text(each) for each in _list(status.get("advice"))],
        "conditions": conditions,
        "plan": plan,
        "not_taken": _not_taken(plan, status, conditions),
    }


def _condition(raw: Mapping[str, Any]) -> Json:
    reason = _text(raw.get("reason"))
    known = REASONS.get(reason, OTHERS)
    return {
        "type": _text(raw.get("type")),
        "status": _text(raw.get("status")),
        "reason": reason,
        "message": _text(raw.get("message")),
        "since": _text(raw.get("lastTransitionTime")),
        "meaning": known.meaning.replace("`", ""),
        "remedy": known.remedy.replace("`", ""),
    }


def _problems(conditions: Sequence[Json]) -> list[Json]:
    """Return the conditions with something to do, each cause once: Ready repeats the first of the others."""
    found: dict[str, Json] = {}
    for each in conditions:
        if each["remedy"] == FINE:
            continue
        first = found.setdefault(each["reason"], {**each, "types": []})
        first["types"].append(each["type"])
    return [{key: value for key, value in each.items() if key != "type"} for each in found.values()]


def _cache(plan: Mapping[str, Any], status: Mapping[str, Any]) -> Json:
    """Return planned and reported tokens of a replica's KV cache, and how they compare."""
    memory = _mapping(plan.get("memory"))
    planned, reported = memory.get("kv_tokens"), status.get("reportedKvTokens")
    planned = planned if isinstance(planned, int) else None
    reported = reported if isinstance(reported, int) else None
    ratio = reported / planned if planned and reported is not None else None
    return {
        "planned_tokens": planned,
        "reported_tokens": reported,
        "reported_share": None if ratio is None else round(ratio, 4),
        "verdict": _compared(planned, reported, ratio, refused=plan.get("verdict") == "refused"),
    }


def _compared(planned: int | None, reported: int | None, ratio: float | None, *, refused: bool) -> str:
    if planned == 0:
        return "none, because the plan is refused" if refused else "the model has none"
    if planned is None:
        return "not planned yet"
    if reported is None or ratio is None:
        return "not reported yet: no engine is ready, or no picker has reported on it"
    if ratio < OFF[0]:
        return "less than planned; advice has the likely cause"
    return "more than planned" if ratio > OFF[1] else "as planned"


def _not_taken(plan: Mapping[str, Any], status: Mapping[str, Any], conditions: Sequence[Json]) -> list[Json]:
    """Return what was considered and not taken: other sizes, a spec that is refused, changes that wait."""
    found = [{"kind": "size", "text": _text(each)} for each in _list(plan.get("neighbours"))]
    refusals = [each for each in conditions if each["type"] == "Accepted" and each["status"] == "False"]
    if plan.get("verdict") != "refused":
        # engines of the last good plan keep running while the new spec is refused
        found += [{"kind": "refused", "text": each["message"]} for each in refusals]
    elif plan.get("nearest"):
        found.append({"kind": "nearest", "text": _text(plan["nearest"])})
    pending = _mapping(status.get("pendingPlan"))
    return found + [{"kind": "pending", "text": _text(each)} for each in _list(pending.get("changes"))]


def page(found: Mapping[str, Any], now: datetime, heading: Callable[[str], str] = str) -> str:
    """Return the page of a pool; ``now`` is for the ages of conditions, ``heading`` marks first lines."""
    parts = [
        _head(found),
        _section("what to do", _todo(found)),
        _section("conditions", _table(found["conditions"], now)),
        _memory(found["plan"]),
        _section("considered and not taken", [f"  {line}" for line in _refused(found["not_taken"])]),
        _section("why", reasons(_choices(found["plan"]))),
    ]
    return "\n\n".join("\n".join((heading(part[0]), *part[1:])) for part in parts if part)


def _head(found: Mapping[str, Any]) -> list[str]:
    plan, replicas = found["plan"], found["replicas"]
    ready: Json = next((each for each in found["conditions"] if each["type"] == "Ready"), {})
    state = {"True": "ready", "False": "not ready"}.get(ready.get("status", ""), "not known to be ready")
    lines = [f"pool {found['namespace']}/{found['name']}: {state}"]
    lines[0] += f" ({ready['reason']})" if ready else ""
    shape = _text(plan.get("model"))
    commit = f" at commit {found['revision'][:12]}" if found["revision"] else ""
    gpus, spread = _mapping(plan.get("accelerator")), sizes(_mapping(plan.get("parallelism")))
    each = f", each {_text(gpus.get('summary'))}{f' ({spread})' if spread else ''}" if gpus else ""
    updated = f", {replicas['updated']} on this plan" if plan else ""
    verdict = [_text(plan.get("verdict")), *map(_text, _list(plan.get("notes")))]
    facts = {
        "model": f"{found['model']}{commit}{f': {shape}' if shape else ''}",
        "replicas": f"{replicas['ready']} of {replicas['desired']} ready{updated}{each}",
        "plan": f"{'; '.join(filter(None, verdict))} [{_text(plan.get('hash'))}]" if plan else "none yet",
        "KV cache": _cache_line(found["cache"]),
        "requests": found["url"] or "at the address of the Gateway",
    }
    price = plan.get("price_per_hour")
    if isinstance(price, int | float):
        facts["price"] = f"{price:.2f} per hour and replica"
    if found["preset"]:
        facts["preset"] = found["preset"]
    if found["operator"]:
        facts["operator"] = found["operator"]
    if found["generation"] > found["observed_generation"]:
        lines.append(
            "the operator has not processed the latest change of the spec yet; this is the state before"
        )
    for name, value in facts.items():
        lines += _hanging(f"  {name:<9} ", value)
    return lines


def _cache_line(cache: Mapping[str, Any]) -> str:
    planned, reported = cache["planned_tokens"], cache["reported_tokens"]
    if not planned:
        return str(cache["verdict"])
    if reported is None:
        return f"{planned:,} tokens planned for each replica; {cache['verdict']}"
    share = f"{100 * cache['reported_share']:.0f} %"
    return f"{planned:,} tokens planned for each replica, {reported:,} reported ({share}): {cache['verdict']}"


def _todo(found: Mapping[str, Any]) -> list[str]:
    """Return problems and advice, numbered; a sentence where there is nothing to do."""
    lines: list[str] = []
    for number, each in enumerate(found["problems"], 1):
        types = ", ".join(each["types"])
        lines += _hanging(f"  {number}. ", f"{each['reason']} ({types}): {_cut(each['message'])}")
        lines += _hanging("     it means  ", each["meaning"])
        lines += _hanging("     to do     ", each["remedy"])
    for number, text in enumerate(found["advice"], len(found["problems"]) + 1):
        lines += _hanging(f"  {number}. ", f"advice: {text}")
    for text in map(_text, _list(found["plan"].get("warnings"))):
        lines += _hanging("  -  ", f"warning of the plan: {text}")
    for text in map(_text, _list(found["plan"].get("doubts"))):
        lines += _hanging("  -  ", f"unverified: {text}")
    return lines or ["  nothing: the pool is as its spec describes it, and there is no advice"]


def _table(conditions: Sequence[Mapping[str, Any]], now: datetime) -> list[str]:
    rows = [
        (each["type"], each["status"], _age(each["since"], now), each["reason"], each["meaning"])
        for each in conditions
    ]
    wide = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    lines: list[str] = []
    for row in rows:
        cells = (f"{cell:<{size}}" for cell, size in zip(row[:4], wide, strict=True))
        lines += _hanging(f"  {'  '.join(cells)}  ", row[4])
    return lines or ["  none: no operator has written a status; see kubectl -n kvist-system get pods"]


def _memory(plan: Mapping[str, Any]) -> list[str]:
    found = _mapping(plan.get("memory"))
    memory = {key: float(_number(found.get(key))) for key in _MEMORY}
    name = _text(_mapping(plan.get("accelerator")).get("name"))
    return bar(memory, name, caches=bool(found.get("kv_bytes_per_token"))) if memory["per_gpu_gib"] else []


_KINDS: Final = {
    "size": "",
    "nearest": "nearest that fits: ",
    "refused": "the spec as it is now, so the engines keep the plan below: ",
    "pending": "change that waits for approval or its window: ",
}


def _refused(not_taken: Iterable[Mapping[str, Any]]) -> list[str]:
    lines = (f"{_KINDS[each['kind']]}{each['text']}" for each in not_taken)
    return [part for line in lines for part in textwrap.wrap(line, width() - 2, break_long_words=False)]


def _choices(plan: Mapping[str, Any]) -> list[dict[str, str]]:
    keys = ("field", "value", "reason", "source")
    return [{key: _text(each.get(key)) for key in keys} for each in _mappings(plan.get("choices"))]


def _section(title: str, lines: list[str]) -> list[str]:
    return [title, *lines] if lines else []


def _hanging(head: str, text: str) -> list[str]:
    """Return a text wrapped behind its head; later lines begin below its first word."""
    room = max(24, width() - len(head))
    wrapped = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
    return [(head if not i else " " * len(head)) + part for i, part in enumerate(wrapped)]


def _cut(message: str) -> str:
    return message if len(message) <= MESSAGE else f"{message[:MESSAGE]}… (-o json has all of it)"


def _age(since: str, now: datetime) -> str:
    """Return how long ago a time of RFC 3339 was, such as ``5 min``; ``-`` if it is none."""
    try:
        seconds = (now - datetime.fromisoformat(since).astimezone(UTC)).total_seconds()
    except (ValueError, OverflowError):
        return "-"
    return next((f"{int(seconds // unit)} {name}" for unit, name in _AGES if seconds >= unit), "0 s")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in _list(value) if isinstance(each, Mapping)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any, default: int = 0) -> Any:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default
