"""Gaps of the live page: what it cannot know, why, and what would change that. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvist_epp.admin.live.endpoint_condition import EndpointCondition
from kvist_epp.prompt.model import NO_TEMPLATE

WINDOW_SECONDS: Final = 300.0
"""History that the page shows once the picker has run for so long."""

_REMEDIES: Final = {
    "the picker does not subscribe to its KV events": (
        "start the engine with --kv-events-config, and name its ports in the endpoints file or the pod's "
        "annotations; leave --kv-events at true"
    ),
    "it publishes no KV events": (
        "start the engine with --kv-events-config, and check that the picker reaches its event port"
    ),
    "--model is not set": "start the picker with --model",
    NO_TEMPLATE: "--chat-template=FILE, as the engines have it",
    "the tokenizer is not loaded yet": "wait, or see /readyz for the reason",
    "the first replay of its KV events has not finished": "wait until its replay has been read",
    "some of its KV events are missing": "give the engine a replay_endpoint in --kv-events-config",
}
_REMEDY_OF_ERRORS: Final = (
    "none needed: it is used again once its predictions are right; if that does not happen, compare the "
    "picker's --model and chat template with the engine's"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """Facts that decide what is unknown."""

    window_seconds: float
    conditions: Sequence[EndpointCondition]
    ends_known: bool
    """A gateway reports how requests end."""
    observed: bool
    """Responses pass the picker."""
    price: float
    by_prefix: bool
    untracked: int
    """Requests on engines that no replica of the picker routed."""
    why_no_chats: str = ""
    """Why chats are not rendered; empty if they are, or there is no model."""


def unknowns(facts: Unknown) -> list[dict[str, Any]]:
    """Return what cannot be known, each with the reason and the remedy."""
    return [
        {"what": what, "why": why, "remedy": remedy}
        for what, why, remedy in (*_of_endpoints(facts), *_of_settings(facts))
    ]


def _of_endpoints(facts: Unknown) -> Iterator[tuple[str, str, str]]:
    if not facts.by_prefix:
        yield (
            "what the engines have cached",
            "--prefix-matching is off: requests are routed by load alone",
            "start the picker with --prefix-matching=true if the engines have a prefix cache",
        )
    reasons = Counter(one.approximate for one in facts.conditions if one.approximate)
    for reason, count in reasons.most_common(5):
        what = f"the true cache contents of {_endpoints(count)} (approximate mode: routing history instead)"
        yield what, reason, _REMEDIES.get(reason, _REMEDY_OF_ERRORS)
    if facts.why_no_chats:
        what = "the prompts of chats (their plain text is matched, in approximate mode)"
        remedy = _REMEDIES.get(facts.why_no_chats, "none: the picker cannot write them yet")
        yield what, facts.why_no_chats, remedy
    problems = Counter(one.metrics_problem for one in facts.conditions if one.metrics_problem)
    for reason, count in problems.most_common(5):
        yield (
            f"batch, KV cache use and foreign traffic of {_endpoints(count)}",
            reason,
            "let the picker read vLLM's /metrics at the endpoint's own port",
        )
    if facts.untracked:
        yield (
            f"where {facts.untracked} requests on the engines come from",
            "they did not pass through this picker or its replicas",
            "send all traffic through the gateway; until then they count as load",
        )


def _of_settings(facts: Unknown) -> Iterator[tuple[str, str, str]]:
    if not facts.ends_known:
        yield (
            "when exactly requests end",
            "no gateway reports it: no access log arrives, and no response passes the picker",
            "send Envoy's gRPC access log to the picker (guide: attach-gateway)",
        )
    if not facts.observed:
        yield (
            "time to first token as clients see it",
            "responses do not pass the picker",
            "--observe-responses=true, with response processing switched on in Envoy",
        )
    if not facts.price:
        yield (
            "money saved",
            "no price is set",
            "--gpu-hour-price=PRICE, and --gpus-per-endpoint=N where an endpoint has several GPUs",
        )
    if facts.window_seconds < WINDOW_SECONDS - 15:
        yield (
            "what happened before",
            f"this replica has counted for {facts.window_seconds:.0f} s only",
            "wait: figures cover the last five minutes once they have passed",
        )


def _endpoints(count: int) -> str:
    return "1 endpoint" if count == 1 else f"{count} endpoints"
