"""What the debug pages show, as plain documents. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from kvist_epp.fleet.ledger import Ledger
from kvist_epp.fleet.scrape import EngineState
from kvist_epp.schedule.pick import MAX_ENDPOINTS, Scored


def pick_document(
    mode: str, prompt_bytes: int, rows: Sequence[Scored], *, limit: int = MAX_ENDPOINTS
) -> dict[str, object]:
    """``/debug/pick``: ``explain``'s rows, and the ``ip:port`` of those that ``choose`` would answer."""
    picked = [row.endpoint.hostport for row in rows if row.eligible][:limit]
    return {
        "mode": mode,
        "prompt_bytes": prompt_bytes,
        "endpoints": [_row(row) for row in rows],
        "picked": picked,
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


def fleet_document(states: Mapping[str, EngineState], ledger: Ledger, now: float) -> dict[str, object]:
    """``/debug/fleet``: each endpoint, what it said at the last scrape and what it owes by our books."""
    return {"endpoints": [_engine(state, ledger, now) for state in states.values()]}


def _engine(state: EngineState, ledger: Ledger, now: float) -> dict[str, object]:
    endpoint, load, rates = state.endpoint, ledger.load(state.endpoint.key), state.rates
    return {
        "endpoint": endpoint.hostport,
        "name": endpoint.key,
        "labels": dict(endpoint.labels),
        "kv_events": [source.events for source in endpoint.sources],
        "state": state.state.value,
        "problem": state.problem or state.models_problem,
        "models": sorted(state.served.models),
        "adapters": sorted(state.served.adapters),
        "max_model_len": state.served.max_model_len,
        "owed_tokens": round(load.drain(now)),
        "requests": len(load.requests),
        "foreign_requests": load.foreign,
        "slots": load.slots,
        "prefill_tokens_per_second": round(load.rate, 1),
        "prefill_rate_learned": rates.prefill is not None,
        "decode_seconds": rates.decode_seconds,
        "seconds_per_token": rates.token_seconds,
        "hit_ratio": rates.hit_ratio,
        "scraped": asdict(state.sample),
    }
