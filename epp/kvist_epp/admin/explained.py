"""What ``/debug/pick`` answers. Pure."""

from collections.abc import Sequence

from kvist_epp.scheduling.pick import MAX_ENDPOINTS, Scored


def pick_document(
    mode: str, prompt_bytes: int, rows: Sequence[Scored], *, limit: int = MAX_ENDPOINTS
) -> dict[str, object]:
    """``/debug/pick``: ``explain``'s rows, the ``ip:port`` of those that ``choose`` would answer, and whether
    all are full."""
    eligible = [row for row in rows if row.eligible]
    return {
        "mode": mode,
        "prompt_bytes": prompt_bytes,
        "endpoints": [_row(row) for row in rows],
        "picked": [row.endpoint.hostport for row in eligible[:limit]],
        "full": bool(eligible) and eligible[0].full,
    }


def _row(row: Scored) -> dict[str, object]:
    return {
        "endpoint": row.endpoint.hostport,
        "name": row.endpoint.key,
        "eligible": row.eligible,
        "matched_tokens": row.matched_tokens,
        "matched_bytes": row.matched_bytes,
        "uncached_tokens": row.uncached_tokens,
        "owed_tokens": row.owed_tokens,
        "predicted_ttft_seconds": round(row.predicted_ttft_seconds, 6),
        "reason": row.reason,
    }
