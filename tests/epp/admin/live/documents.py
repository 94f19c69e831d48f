"""Live documents of one replica, made up but of the right form."""

import math
from typing import Any

from kvist_epp.scheduling.cost import TERMS
from kvist_epp.telemetry.counters import TIME_TO_FIRST_TOKEN_BUCKETS

AT = 1_795_500_000.0
Json = dict[str, Any]


def observed(seconds: float, count: int) -> list[int]:
    """Return a cumulative histogram of equal observations."""
    return [count * (bound >= seconds) for bound in TIME_TO_FIRST_TOKEN_BUCKETS] + [count]


def endpoint(number: int, **more: Any) -> Json:
    """Return the row of an endpoint that is ready, with values of its own."""
    wave = [round(2 + 2 * math.sin(number + at / 4), 3) for at in range(30)]
    return {
        "name": f"serving/qwen-{number}",
        "endpoint": f"10.0.{number // 250}.{number % 250 + 1}:8000",
        "role": "both",
        "state": "ready",
        "reason": "",
        "severity": 0,
        "approximate": "",
        "metrics_problem": "",
        "requests": 12 + number % 40,
        "untracked_requests": 0,
        "running": 10 + number % 40,
        "waiting": 2,
        "slots": 256,
        "full": False,
        "backlog_tokens": 1200 * (1 + number % 5),
        "backlog_seconds": 0.075 * (1 + number % 5),
        "kv_usage": round(0.2 + 0.7 * abs(math.sin(number)), 4),
        "kv_tokens": 512_000,
        "tiers": {"CPU": 2_000_000, "SHARED": 9_000_000} if number % 3 == 1 else {},
        "prefill_tokens_per_second": 15_928.0,
        "prefill_rate_learned": True,
        "requests_per_second": 4.2,
        "prompt_tokens": 900_000,
        "predicted_tokens": 700_000,
        "verified_tokens": 800_000,
        "true_tokens": 610_000,
        "looked_up_tokens": 900_000,
        "found_tokens": 700_000,
        "history": {"load": [round(3 * one) for one in wave], "backlog_seconds": wave},
        **more,
    }


def pick(number: int, at: float = AT, **more: Any) -> Json:
    """Return a decision between three endpoints."""
    rows = []
    for place in range(3):
        terms = dict.fromkeys(TERMS, 0.0) | {
            "wait": 0.02 + 0.05 * place,
            "work": 0.08 + 0.02 * (number % 3),
            "decode": 0.03,
            "eviction": 0.01 * place,
        }
        rows.append(
            {
                "endpoint": f"10.0.0.{place + 1}:8000",
                "name": f"serving/qwen-{place}",
                "eligible": True,
                "matched_tokens": 5400 - 2000 * place,
                "uncached_tokens": 600 + 2000 * place,
                "backlog_tokens": 1200,
                "cost_seconds": sum(terms.values()),
                "terms": terms,
                "predicted_ttft_seconds": 0.1 + place / 10,
                "reason": "",
            }
        )
    return {
        "id": f"8d1f0c52-6f5e-4c1b-9d7e-{number:012d}",
        "session": f"session-{number}",
        "at": at - 1.7 * number,
        "replica": "picker-a",
        "kind": "chat",
        "model": "Qwen/Qwen3-32B",
        "mode": "precise",
        "outcome": "picked",
        "priority": 0,
        "prompt_tokens": 6000,
        "prompt_bytes": 24_000,
        "waited_seconds": 0.0,
        "endpoints": rows,
        "picked": [row["endpoint"] for row in rows],
        "candidates": 3,
        "predicted_ttft_seconds": 0.1,
        "actual": {"cached_tokens": 5392, "ttft_seconds": 0.118, "endpoint": None, "ended": None},
        **more,
    }


def document(replica: str = "picker-a", endpoints: int = 3, picks: int = 2, **more: Any) -> Json:
    """Return the document of one replica that has counted for five minutes."""
    hundred = [[70 + at % 9, 100] for at in range(29)]
    return {
        "version": 1,
        "replica": replica,
        "picker_version": "0.1.0",
        "started": AT - 4000,
        "at": AT,
        "pool": {"name": "qwen", "namespace": "serving", "model": "Qwen/Qwen3-32B"},
        "health": {"ready": True, "reason": "", "warnings": []},
        "window_seconds": 300.0,
        "traffic": {
            "requests_per_second": 12.5,
            "picked": 3750,
            "refused": 0,
            "prompt_tokens": 22_500_000,
            "predicted_tokens": 18_000_000,
            "verified_tokens": 20_000_000,
            "true_tokens": 15_600_000,
            "saved_tokens": 17_000_000,
            "saved_seconds": 1067.0,
            "gpus_per_endpoint": 1,
            "gpu_hour_price": None,
            "since_start": {
                "seconds": 4000.0,
                "picked": 50_000,
                "refused": 3,
                "saved_tokens": 226_000_000,
                "saved_gpu_seconds": 14_200.0,
                "saved_money": None,
            },
        },
        "ttft": {
            "bounds": list(TIME_TO_FIRST_TOKEN_BUCKETS),
            "predicted": observed(0.09, 3750),
            "observed": observed(0.2, 3600),
            "prefilled": observed(0.09, 3600),
        },
        "endpoints": [endpoint(number) for number in range(endpoints)],
        "queue": {
            "requests": 0,
            "tokens": 0,
            "bytes": 0,
            "oldest_seconds": 0.0,
            "levels": [],
            "full_endpoints": 0,
            "pool_empty": False,
            "backlog_seconds": 0.2,
            "picks_per_second": 12.5,
            "bounds": {"queue_seconds": 60.0},
        },
        "picks": [pick(number) for number in range(picks)],
        "unknown": [{"what": "money saved", "why": "no price is set", "remedy": "--gpu-hour-price=PRICE"}],
        "history": {
            "step_seconds": 10.0,
            "points": 30,
            "requests_per_second": [12 + 3 * math.sin(at / 3) for at in range(29)],
            "predicted": hundred,
            "true": hundred,
            "saved_tokens": [560_000.0 + 9000 * (at % 7) for at in range(29)],
            "queued": [0.0] * 30,
            "ttft": [observed(0.08 + at / 400, 120) for at in range(29)],
        },
        "replicas": [],
        **more,
    }
