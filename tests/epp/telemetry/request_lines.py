"""Log lines of requests, for the tests of logs and of traces."""

from typing import Any

from kvist_epp.telemetry.request_log import RequestLine


def line(**more: Any) -> RequestLine:
    """The figures of a picked request; ``more`` replace some."""
    fields: dict[str, Any] = {
        "id": "r1",
        "session": "s1",
        "path": "/v1/chat/completions",
        "kind": "chat",
        "outcome": "picked",
        "mode": "precise",
        "model": "m",
        "endpoint": "10.0.0.1:8000",
        "prompt_bytes": 1000,
        "matched_bytes": 640,
        "matched_tokens": 160,
        "predicted_ttft_ms": 35.5,
        "cost": {"wait": 0.25, "work": 0.5, "copy": 0.0},
        "candidates": 4,
        "us": {"parse": 12, "match": 30},
    }
    return RequestLine(**fields | more)
