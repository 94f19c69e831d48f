"""One document of all replicas of the picker, and the shares and quantiles computed from its sums. Pure.

Each replica counts the requests that it routed, so counts add up. What scrapes and gossip show (state, load,
backlog, KV cache use) is the same on all replicas but for a moment; it is taken from the replica that makes
the page, and a replica that sees another state of an endpoint is named.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

from kvist_epp.admin.live.recent_samples import quantile

Json = dict[str, Any]
Document = Mapping[str, Any]

PICKS: Final = 12
MAX_ENDPOINTS: Final = 10_000
"""Endpoints that are merged at most."""
_TRAFFIC: Final = (
    *("requests_per_second", "picked", "refused", "prompt_tokens", "predicted_tokens"),
    *("verified_tokens", "true_tokens", "saved_tokens", "saved_seconds"),
)
_SINCE_START: Final = ("picked", "refused", "saved_tokens", "saved_gpu_seconds", "saved_money")
_ENDPOINT: Final = (
    *("requests_per_second", "prompt_tokens", "predicted_tokens", "verified_tokens", "true_tokens"),
)
_QUEUE: Final = ("requests", "tokens", "bytes", "picks_per_second")
_LEVEL: Final = ("requests", "tokens", "bytes", "tenants")
_TTFT_SOURCES: Final = {
    "observed": "seen in responses",
    "prefilled": "end of prefill by KV events",
    "predicted": "predicted at the pick",
}
"""Sources of the time to the first token, the best first."""
_NUMBER: Final = re.compile(r"([0-9]+)")
_SERIES: Final = ("requests_per_second", "saved_tokens", "queued")
_PAIRS: Final = ("predicted", "true")


def merged(own: Document, others: Mapping[str, Document | None]) -> Json:
    """Return the document of all replicas, with shares and quantiles.

    ``others``: documents of the other replicas by their ids, None for a replica that did not answer; an
    answer of another version counts as none.
    """
    usable = {name: doc for name, doc in others.items() if doc is not None and _usable(doc, own)}
    documents = [own, *usable.values()]
    found: Json = dict(own)
    found["replicas"] = [_replica(own, is_self=True)] + [
        _replica(usable[name]) if name in usable else {"replica": name, "answers": False, "self": False}
        for name in sorted(others)
    ]
    found["traffic"] = _sums(documents)
    found["ttft"] = _ttft([doc["ttft"] for doc in documents])
    found["endpoints"] = _endpoints(own, list(usable.values()))
    found["queue"] = _queue([doc["queue"] for doc in documents])
    picks = [pick for doc in documents for pick in doc["picks"]]
    found["picks"] = sorted(picks, key=lambda pick: -float(pick.get("at") or 0))[:PICKS]
    found["unknown"] = _unknown(own, others, usable)
    found["history"] = _history([doc["history"] for doc in documents], own["ttft"]["bounds"])
    found["hit_rate"] = {
        "predicted": share(found["traffic"], "predicted_tokens", "prompt_tokens"),
        "true": share(found["traffic"], "true_tokens", "verified_tokens"),
    }
    return found


def share(sums: Mapping[str, Any], part: str, whole: str) -> float | None:
    """Return part / whole, at most 1; None if there is nothing of the whole."""
    return _ratio(sums.get(part) or 0, sums.get(whole) or 0)


def _ratio(part: float, whole: float) -> float | None:
    return round(min(part / whole, 1.0), 4) if whole > 0 else None


def _usable(doc: Document, own: Document) -> bool:
    """Return whether a replica's document has the parts that this version adds up."""
    return doc.get("version") == own["version"] and own.keys() <= doc.keys()


def _replica(doc: Document, *, is_self: bool = False) -> Json:
    traffic = doc["traffic"]
    return {
        "replica": doc["replica"],
        "answers": True,
        "self": is_self,
        "started": doc["started"],
        "health": doc["health"],
        "requests_per_second": traffic["requests_per_second"],
        "predicted": share(traffic, "predicted_tokens", "prompt_tokens"),
        "true": share(traffic, "true_tokens", "verified_tokens"),
        "saved_tokens": traffic["saved_tokens"],
        "queued": doc["queue"].get("requests", 0),
        "ttft": _quantiles(doc["ttft"]["bounds"], doc["ttft"]["predicted"]),
    }


def _sums(documents: Sequence[Document]) -> Json:
    first = documents[0]["traffic"]
    found = {**first, **_add([doc["traffic"] for doc in documents], _TRAFFIC)}
    since = [doc["traffic"]["since_start"] for doc in documents]
    found["since_start"] = {**first["since_start"], **_add(since, _SINCE_START)}
    found["since_start"]["seconds"] = max(one["seconds"] for one in since)
    seconds = found["saved_seconds"] * first["gpus_per_endpoint"]
    price = first["gpu_hour_price"]
    found["saved_gpu_seconds"] = round(seconds, 3)
    found["saved_money"] = None if price is None else round(seconds / 3600 * price, 4)
    return found


def _add(parts: Sequence[Mapping[str, Any]], names: Iterable[str]) -> Json:
    """Return the sums by name; None where no part has a number."""
    found: Json = {}
    for name in names:
        numbers = [part[name] for part in parts if part.get(name) is not None]
        found[name] = round(sum(numbers), 4) if numbers else None
    return found


def _ttft(parts: Sequence[Document]) -> Json:
    bounds = parts[0]["bounds"]
    found: Json = {"bounds": bounds}
    for name in ("predicted", "observed", "prefilled"):
        total = _add_vectors([part[name] for part in parts if len(part[name]) == len(bounds) + 1])
        found[name] = total
        found[f"{name}_seconds"] = _quantiles(bounds, total)
    found["shown"] = next((name for name in _TTFT_SOURCES if found[f"{name}_seconds"]["count"]), "predicted")
    found["shown_by"] = _TTFT_SOURCES[found["shown"]]
    return found


def _quantiles(bounds: Sequence[float], cumulative: Sequence[float]) -> Json:
    return {
        "count": cumulative[-1] if cumulative else 0,
        "p50": quantile(bounds, cumulative, 0.5),
        "p90": quantile(bounds, cumulative, 0.9),
    }


def _add_vectors(vectors: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*vectors, strict=True)]


def _endpoints(own: Document, others: Sequence[Document]) -> list[Json]:
    found = {row["name"]: dict(row) for row in own["endpoints"]}
    for doc in others:
        for row in doc["endpoints"]:
            mine = found.get(row["name"])
            if mine is None:
                if len(found) < MAX_ENDPOINTS:
                    found[row["name"]] = {**row, "seen_by": f"only {doc['replica']} knows it"}
                continue
            mine |= _add([mine, row], _ENDPOINT)
            if row["state"] != mine["state"]:
                mine["seen_by"] = f"{doc['replica']}: {row['state']}"
    for row in found.values():
        row["hit_rate"] = {
            "predicted": share(row, "predicted_tokens", "prompt_tokens"),
            "true": share(row, "true_tokens", "verified_tokens"),
            "engine": share(row, "found_tokens", "looked_up_tokens"),
        }
    return worst_first(found.values())


def worst_first(rows: Iterable[Json]) -> list[Json]:
    """Return endpoints by severity, then by name, numbers in names by their value: ``a-2`` before ``a-10``.

    Nothing else moves a row, so that a reader finds it where it was.
    """
    return sorted(rows, key=lambda row: (-row["severity"], _natural(row["name"])))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name)]


def _queue(parts: Sequence[Document]) -> Json:
    queues = [part for part in parts if part]
    if not queues:
        return {}
    found: Json = {**queues[0], **_add(queues, _QUEUE)}
    found["oldest_seconds"] = max(part["oldest_seconds"] for part in queues)
    found["full_endpoints"] = max(part["full_endpoints"] for part in queues)
    levels: dict[int, Json] = {}
    for level in (level for part in queues for level in part["levels"]):
        mine = levels.setdefault(level["priority"], {"priority": level["priority"]})
        mine |= _add([mine, level], _LEVEL)
    found["levels"] = [levels[priority] for priority in sorted(levels, reverse=True)]
    return found


def _unknown(own: Document, others: Mapping[str, object], usable: Mapping[str, Document]) -> list[Json]:
    found = {(row["what"], row["why"]): dict(row) for row in own["unknown"]}
    silent = [name for name in others if name not in usable]
    for name in sorted(silent):
        row = {
            "what": f"the requests of replica {name}",
            "why": "it does not answer on its metrics port, or is of another version",
            "remedy": "let replicas reach each other's metrics port; wait during a rolling update",
        }
        found[row["what"], row["why"]] = row
    return list(found.values())


def _history(parts: Sequence[Document], bounds: Sequence[float]) -> Json:
    """Add up the series, the newest points of all replicas beside each other."""
    found: Json = dict(parts[0])
    for name in _SERIES:
        columns = _aligned([part[name] for part in parts])
        found[name] = [round(sum(value or 0 for value in column), 3) for column in columns]
    for name in _PAIRS:
        columns = _aligned([part[name] for part in parts])
        sums = [[sum(numbers) for numbers in zip(*filter(None, column), strict=True)] for column in columns]
        found[name] = sums
        found[f"{name}_share"] = [_ratio(*pair) if pair else None for pair in sums]
    columns = _aligned([part["ttft"] for part in parts])
    found["ttft"] = [_add_vectors([vector for vector in column if vector]) for column in columns]
    found["ttft_p50"] = [quantile(bounds, vector, 0.5) for vector in found["ttft"]]
    return found


def _aligned(series: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return the columns of several series that end at the same time; None where one has not begun."""
    return list(zip_longest(*[list(reversed(one)) for one in series]))[::-1]
