"""Times of tokens and what is saved, as the director's metrics have them."""

from typing import Literal

import pytest
from tests.epp.parts import BLOCK, Parts, ask, chat, make

from kvist_epp.director.completion import CompletionHandler
from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.extproc.response import FirstToken, ObservedResponse, Usage
from kvist_epp.kvevents.observation import Observation
from kvist_epp.load.in_flight import InFlightRequest, RequestListener
from kvist_epp.names import REQUEST_ID_HEADER, SESSION_HEADER
from kvist_epp.settings.settings import Settings
from kvist_epp.telemetry.counters import Histogram

LONG = "The library opens at nine and closes when the last reader has left. " * 12
HEADERS = {SESSION_HEADER: "s", REQUEST_ID_HEADER: "id"}


class FirstTokens(RequestListener):
    """Keeps the first tokens that requests are reported to have had."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    def on_first_token(self, request: InFlightRequest, seconds: float, now: float) -> None:
        """Keep its id and the time."""
        self.seen.append((request.request_id, seconds))


def _first(seconds: float, *, status: int = 200, served: str | None = None) -> FirstToken:
    return FirstToken("s", "id", served, status, seconds)


def _whole(
    first: float | None, seconds: float, completion: int | None, status: int = 200
) -> ObservedResponse:
    usage = Usage(prompt=10, completion=completion)
    return ObservedResponse(
        "s", "id", None, status, usage, complete=True, first_token_seconds=first, seconds=seconds
    )


def _counts(histogram: Histogram) -> tuple[int, float]:
    return histogram.count, histogram.total


def test_the_first_token_is_compared_with_its_prediction() -> None:
    """The time since the arrival is observed, and the time since the pick divided by what was predicted."""
    listener = FirstTokens()
    parts = make(1, listeners=[listener])
    parts.decide(ask(chat(LONG), headers=HEADERS))
    [request] = parts.director.table
    predicted = request.predicted_ttft_seconds
    parts.clock.now += 3 * predicted
    CompletionHandler(parts.director, parts.clock).on_first_token(_first(9.0))

    metrics = parts.director.metrics
    assert predicted > 0
    assert _counts(metrics.predicted_first_token) == (1, predicted)
    assert _counts(metrics.first_token) == (1, 9.0)
    assert metrics.first_token_ratio.total == pytest.approx(3.0)
    assert listener.seen == [("id", 9.0)]
    assert [found.request_id for found in metrics.first_token.exemplars().values()] == ["id"]


def test_an_error_has_no_first_token() -> None:
    """The body of an error is no output of the model."""
    parts = make(1)
    parts.decide(ask(chat(LONG), headers=HEADERS))
    CompletionHandler(parts.director, parts.clock).on_first_token(_first(9.0, status=500))

    assert parts.director.metrics.first_token.count == 0


def test_another_endpoint_than_the_predicted_one_has_no_ratio() -> None:
    """The prediction was for the picked endpoint: a request that another serves has a time, no ratio."""
    for told in ("response", "events"):
        parts = make(2)
        picked = parts.decide(ask(chat(LONG), headers=HEADERS))
        assert isinstance(picked, PickResult)
        other = picked.endpoints[1]
        if told == "events":
            [request] = parts.director.table
            served = next(endpoint for endpoint in parts.endpoints if endpoint.hostport == other)
            parts.director.progress.on_served_elsewhere(request, served, parts.clock())
        CompletionHandler(parts.director, parts.clock).on_first_token(_first(2.0, served=other))

        metrics = parts.director.metrics
        assert (metrics.first_token.count, metrics.first_token_ratio.count) == (1, 0)


def test_a_request_that_has_ended_still_has_its_time() -> None:
    """The time to the first token does not depend on the picker's record of the request."""
    parts = make(1)
    CompletionHandler(parts.director, parts.clock).on_first_token(_first(2.0))

    assert _counts(parts.director.metrics.first_token) == (1, 2.0)


@pytest.mark.parametrize(
    ("seen", "mean"),
    [
        (_whole(1.0, 4.0, 31), 0.1),
        (_whole(1.0, 4.0, 1), None),
        (_whole(1.0, 4.0, None), None),
        (_whole(None, 4.0, 31), None),
        (_whole(1.0, 4.0, 31, status=500), None),
        (ObservedResponse("s", "id", None, 200, Usage(1, 31), False, 1.0, 4.0), None),
    ],
    ids=["streamed", "one-token", "no-usage", "not-streamed", "error", "cut"],
)
def test_output_tokens_are_timed_after_the_first(seen: ObservedResponse, mean: float | None) -> None:
    """The mean is over the tokens after the first one, of whole streamed responses that say how many."""
    parts = make(1)
    CompletionHandler(parts.director, parts.clock).on_response(seen)

    found = parts.director.metrics.output_token
    assert found.count == (mean is not None)
    assert found.total == pytest.approx(mean or 0.0)


def test_prompts_routed_by_load_are_in_no_hit_rate() -> None:
    """A request whose prompt is not understood adds nothing to a hit rate, nor to its denominator."""
    parts = make(1)
    parts.decide(ask(b"no document", path="/v1/audio/transcriptions"))
    parts.decide(ask(chat(LONG), headers=HEADERS))
    [*_, request] = parts.director.table

    metrics, name = parts.director.metrics, parts.endpoints[0].hostport
    assert metrics.prompt_tokens == {name: request.tokens}
    assert metrics.predicted_first_token.count == 2


def _saved(parts: Parts) -> tuple[int, float]:
    return parts.director.metrics.saved_tokens, parts.director.metrics.saved_seconds


@pytest.mark.parametrize(
    ("how", "refused", "counts"),
    [
        ("access-log", False, True),
        ("response", False, True),
        ("reconciled", False, True),
        ("access-log", True, False),
        ("expired", False, False),
        ("left", False, False),
    ],
)
def test_predicted_savings_count_at_the_end(how: str, refused: bool, counts: bool) -> None:
    """Without a report of the engine, cached tokens are saved as predicted if the request was served."""
    parts = make(1)
    cached = parts.warm(0, chat(LONG))
    parts.decide(ask(chat(LONG), headers=HEADERS))
    [request] = parts.director.table
    predicted = request.predicted_tokens
    assert cached - 2 * BLOCK <= predicted <= cached
    assert _saved(parts) == (0, 0.0)
    rate = request.attempt.load.rate
    parts.end("s", how=how, without_prefill=refused)

    assert _saved(parts) == ((predicted, predicted / rate) if counts else (0, 0.0))


async def test_true_savings_replace_predicted_ones() -> None:
    """Cached tokens that the engine reports count once, and so do the denominators of the same requests."""
    parts = make(0)
    registry = EndpointRegistry(Settings(), parts.director, parts.clock, scrape_interval=0.0)
    registry.follow(EndpointSet((Endpoint("e1", "t", "10.0.0.1", 80),)))
    parts.decide(ask(chat(LONG), headers=HEADERS))
    [request] = parts.director.table
    request.predicted_tokens = 48
    parts.director.tracker.on_cache_truth(request, 32, parts.clock())
    parts.director.tracker.on_cache_truth(request, 16, parts.clock())
    rate = request.attempt.load.rate
    parts.end("s")

    metrics = parts.director.metrics
    assert _saved(parts) == (32, 32 / rate)
    assert dict(metrics.true_cached) == {"10.0.0.1:80": 32}
    assert dict(metrics.verified_prompt) == {"10.0.0.1:80": request.tokens}
    assert dict(metrics.verified_predicted) == {"10.0.0.1:80": 48}


def test_the_end_of_prefill_is_compared_with_its_prediction() -> None:
    """Events that show the prompt computed are compared once, with the time since the pick; a block of decode
    shows nothing of it."""
    parts = make(1)
    parts.decide(ask(chat(LONG), headers=HEADERS))
    [request] = parts.director.table
    key, predicted = parts.endpoints[0].key, request.predicted_ttft_seconds
    half, whole = request.tokens // 2, request.tokens

    def event(depth: int, phase: Literal["prefill", "decode"] = "prefill") -> None:
        parts.clock.now += predicted
        seen = Observation(f"{key}/0", key, "s", BLOCK, 0, phase, depth)
        parts.director.progress.on_observation(seen, parts.clock())

    ratio = parts.director.metrics.prefill_ratio
    event(half)
    assert ratio.count == 0
    event(whole)
    event(whole)
    event(whole + BLOCK, "decode")
    assert ratio.count == 1
    assert ratio.total == pytest.approx(2.0)
