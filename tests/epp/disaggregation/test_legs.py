"""Both legs of a request without sockets: books, deadline, fallbacks, cancellation, sidecars."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from tests.epp.parts import BLOCK, Parts, ask, chat, make

from kvist_epp.director.decision_log import DecisionLog
from kvist_epp.disaggregation import leg_bodies
from kvist_epp.disaggregation.leg_bodies import Prefilled
from kvist_epp.disaggregation.legs import PrefillLeg, SecondLeg, Splitter
from kvist_epp.disaggregation.prefill_outcome import PrefillFailure
from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.flowcontrol.flow_controller import FlowLimits, QueuedRequest
from kvist_epp.kvevents.observation import Observation
from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.load.in_flight import Leg, RequestState
from kvist_epp.names import PREFILLER_HEADER, REQUEST_ID_HEADER, SESSION_HEADER
from kvist_epp.scheduling.leg_costs import DisaggregationPolicy
from kvist_epp.scheduling.pick import Candidate

EAGER = DisaggregationPolicy(least_tokens=1.0, margin_seconds=-1e9)
LEASE = 30.0
PREFILLED = Prefilled(b'{"do_remote_prefill":true,"opaque":[1]}', b"[7,8]", "engine-a")
TEXT = "A prompt of some length that an endpoint has to compute before another one can answer it. " * 8


class Pool:
    """One prefill endpoint (10.0.0.1) and so many decode endpoints, whose pairs are warm."""

    def __init__(self, decoders: int = 1, *, sidecar: bool = False, warm: bool = True, **more: Any) -> None:
        self.splitter = Splitter(sidecar=sidecar, rules=EAGER)
        decisions = DecisionLog(10, "r", clock=lambda: 0.0, wall=lambda: 0.0)
        self.parts: Parts = make(1 + decoders, splitter=self.splitter, decisions=decisions, **more)
        self.director, self.clock = self.parts.director, self.parts.clock
        self.decisions = decisions
        self.roles(*["prefill", *["decode"] * decoders])
        self.second = SecondLeg(self.director, self.splitter, LEASE)
        for number in range(1, 1 + decoders) if warm else ():
            self.splitter.pairs.warm.add("t/e0", f"t/e{number}")

    def roles(self, *roles: str, compatibility: tuple[str, ...] = ()) -> None:
        """Give the endpoints these roles and labels; fewer roles than endpoints: the last ones have left."""
        found = []
        for number, role in enumerate(roles):
            endpoint = self.parts.endpoints[number]
            labels = {"kvist.dev/role": role}
            if compatibility:
                labels["kvist.dev/kv-compatibility"] = compatibility[number]
            fresh = type(endpoint)(endpoint.name, "t", endpoint.address, endpoint.port, labels)
            found.append(Candidate(fresh, self.load(number)))
        self.director.set_endpoints(found, self.clock())

    def load(self, number: int) -> EndpointLoad:
        """Return the load of an endpoint."""
        return self.director.tracker.load(f"t/e{number}")

    def begin(
        self, body: dict[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> PrefillLeg:
        """Offer a request that is split."""
        found = self.director.offer(ask(body or chat(TEXT), headers=headers), self.clock())
        assert isinstance(found, PrefillLeg), found
        return found

    def end(
        self,
        leg: PrefillLeg,
        outcome: Prefilled | PrefillFailure = PREFILLED,
        *,
        ended_at: float | None = None,
    ) -> PickResult:
        """End leg 1 now."""
        now = self.clock()
        found = self.second.on_prefilled(leg, outcome, now if ended_at is None else ended_at, now)
        assert isinstance(found, PickResult), found
        return found

    def fallbacks(self) -> dict[str, int]:
        """Return the fallbacks so far by reason."""
        return {reason: count for reason, count in self.splitter.stats.fallbacks.items() if count}

    def reserved(self) -> list[int]:
        """Return the places kept at each endpoint."""
        return [self.load(number).reserved for number in range(len(self.parts.endpoints))]

    def attempts(self) -> list[int]:
        """Return the attempts at each endpoint."""
        return [len(self.load(number).attempts) for number in range(len(self.parts.endpoints))]


def members(answer: PickResult) -> dict[str, Any]:
    """Return the body of leg 2."""
    assert answer.body is not None
    found: dict[str, Any] = json.loads(answer.body)
    return found


def test_both_legs_carry_the_same_names() -> None:
    """Leg 1 goes to the prefill endpoint and leg 2 to the decode endpoint, with one request id and
    session."""
    pool = Pool()
    leg = pool.begin()
    assert (leg.hostport, leg.path) == ("10.0.0.1:8000", "/v1/chat/completions")
    assert json.loads(leg.prefill_body)["max_completion_tokens"] == 1
    answer = pool.end(leg)

    assert answer.endpoints == ("10.0.0.2:8000",)
    sent = dict(answer.headers)
    assert leg.headers[SESSION_HEADER] == sent[SESSION_HEADER] == answer.session
    assert leg.headers[REQUEST_ID_HEADER] == sent[REQUEST_ID_HEADER]
    transfer = members(answer)["kv_transfer_params"]
    assert transfer == {"do_remote_prefill": True, "opaque": [1], "prompt_token_ids": [7, 8]}
    assert pool.fallbacks() == {}


def test_a_clients_names_are_kept_in_both_legs() -> None:
    """A request id and a session that the client has chosen are those of leg 1, too."""
    leg = Pool().begin(headers={REQUEST_ID_HEADER: "mine", SESSION_HEADER: "talk"})
    assert (leg.headers[REQUEST_ID_HEADER], leg.headers[SESSION_HEADER]) == ("mine", "talk")


def test_the_books_of_both_endpoints() -> None:
    """In leg 1 the prompt is the prefill endpoint's backlog and a place is kept where it is answered; in leg
    2 the decode endpoint has the request, and no endpoint the prompt."""
    pool = Pool()
    leg = pool.begin()
    assert pool.attempts() == [1, 0]
    assert pool.reserved() == [0, 1]
    assert pool.load(0).backlog_tokens > 50
    assert pool.load(1).running == 1

    pool.end(leg)
    assert pool.attempts() == [0, 1]
    assert pool.reserved() == [0, 0]
    assert (pool.load(0).backlog_tokens, pool.load(1).backlog_tokens) == (0, 0)
    assert [one.leg for one in leg.request.attempts] == [Leg.PREFILL, Leg.DECODE]

    pool.parts.end(leg.request.session)
    assert pool.attempts() == [0, 0]
    assert len(pool.director.table) == 0


@pytest.mark.parametrize(("seconds", "used"), [(19.9, True), (20.1, False)])
def test_blocks_are_used_within_two_thirds_of_their_lease(seconds: float, used: bool) -> None:
    """Past the deadline the decode endpoint computes the prompt, which is counted; before it, it does not."""
    pool = Pool()
    leg = pool.begin()
    ended_at = pool.clock()
    pool.clock.now += seconds
    answer = pool.end(leg, ended_at=ended_at)

    assert answer.endpoints == ("10.0.0.2:8000",)
    assert (answer.body is not None) is used
    assert pool.fallbacks() == ({} if used else {"lease": 1})
    assert (pool.load(1).backlog_tokens > 50) is not used


@pytest.mark.parametrize("failure", list(PrefillFailure))
def test_a_failure_of_leg_1_costs_no_request(failure: PrefillFailure) -> None:
    """Whatever happens to leg 1, the decode endpoint computes the client's own body at once."""
    pool = Pool()
    leg = pool.begin()
    answer = pool.end(leg, failure)

    assert answer.endpoints == ("10.0.0.2:8000",)
    assert answer.body is None
    assert pool.fallbacks() == {failure.value: 1}
    assert pool.load(1).backlog_tokens > 50
    assert pool.reserved() == [0, 0]


def test_an_endpoint_that_failed_is_spared() -> None:
    """After an endpoint could not be reached, requests are not split with it for a while."""
    pool = Pool()
    pool.end(pool.begin(), PrefillFailure.UNREACHABLE)
    assert isinstance(pool.director.offer(ask(chat(TEXT + "2")), pool.clock()), PickResult)
    pool.clock.now += 5.1
    pool.begin(chat(TEXT + "3"))


def test_a_refused_request_says_nothing_of_the_endpoint() -> None:
    """A request that the engine refuses is answered by the decode endpoint, and the next one is split
    again."""
    pool = Pool()
    pool.end(pool.begin(), PrefillFailure.REFUSED)
    pool.begin(chat(TEXT + "2"))


def test_new_pairs_are_not_used() -> None:
    """A request is not split between engines that have not met."""
    pool = Pool(warm=False)
    assert isinstance(pool.director.offer(ask(chat(TEXT)), pool.clock()), PickResult)
    assert pool.splitter.stats.decisions["new-pair"] == 1


def test_a_client_that_leaves_in_leg_1_leaves_nothing_behind() -> None:
    """A cancelled request is in no endpoint's books, and its outcome is counted."""
    pool = Pool()
    leg = pool.begin()
    pool.second.on_cancelled(leg, pool.clock())
    assert pool.attempts() == pool.reserved() == [0, 0]
    assert len(pool.director.table) == 0
    assert pool.director.metrics.requests["rejected-context-cancelled"] == 1


def test_a_decode_endpoint_that_left_is_replaced() -> None:
    """Another decode endpoint of the same compatibility gets the blocks."""
    pool = Pool(decoders=2)
    leg = pool.begin()
    left = int(leg.split.decode.endpoint.name[1:])
    director, key = pool.director, f"t/e{left}"
    kept = [one for one in director.candidates if one.endpoint.key != key]
    director.tracker.remove_endpoint(key)
    director.set_endpoints(kept, pool.clock())
    answer = pool.end(leg)
    assert answer.endpoints == (f"10.0.0.{4 - left}:8000",)
    assert "kv_transfer_params" in members(answer)


def test_the_only_decode_endpoint_left() -> None:
    """Without another decode endpoint the endpoint that computed the prompt answers, without a transfer."""
    pool = Pool()
    leg = pool.begin()
    pool.director.tracker.remove_endpoint("t/e1")
    pool.roles("prefill")
    answer = pool.end(leg)
    assert answer.endpoints == ("10.0.0.1:8000",)
    assert answer.body is None
    assert pool.fallbacks() == {"decode-left": 1}


def test_a_prefill_endpoint_that_leaves_does_not_take_the_request_with_it() -> None:
    """A request whose prefill endpoint leaves in leg 1 is still in the books, and is computed where it is
    answered when leg 1 fails."""
    pool = Pool()
    leg = pool.begin()
    assert pool.director.tracker.remove_endpoint("t/e0") == []
    answer = pool.end(leg, PrefillFailure.UNREACHABLE)
    assert answer.endpoints == ("10.0.0.2:8000",)
    assert leg.request.state is RequestState.SENT


def test_endpoints_of_another_compatibility_are_no_fall_back_of_the_gateway() -> None:
    """Leg 2 names only endpoints that can fetch the blocks; a request that is computed anew may go
    anywhere."""
    pool = Pool(decoders=3)
    pool.roles("prefill", "decode", "decode", "decode", compatibility=("a", "a", "a", "b"))
    for number in range(2):
        answer = pool.end(pool.begin(chat(f"{number}{TEXT}")))
        assert set(answer.endpoints) <= {"10.0.0.2:8000", "10.0.0.3:8000"}
    whole = pool.end(pool.begin(chat(f"9{TEXT}")), PrefillFailure.ERROR)
    assert len(whole.endpoints) > 1


def test_events_of_a_transfer_are_no_cache_misses() -> None:
    """The decode engine reports all blocks as new, without a parent: nothing is compared, no rate is learned,
    and the request goes on to decode."""
    pool = Pool()
    leg = pool.begin()
    pool.end(leg)
    rate = pool.load(1).rate
    session = leg.request.session
    seen = Observation("p", "t/e1", session, 40 * BLOCK, 0, "prefill", 40 * BLOCK)
    pool.clock.now += 0.01
    pool.director.progress.on_observation(seen, pool.clock())
    assert leg.request.cached_tokens is None
    assert pool.load(1).rate == rate
    assert leg.request.state is RequestState.DECODING


def test_late_events_of_the_prefill_endpoint_move_nothing() -> None:
    """An event of leg 1 that comes after leg 2 has begun does not take the request to the prefill endpoint,
    even where every endpoint may answer."""
    pool = Pool()
    pool.roles("both", "both")
    pool.splitter.pairs.warm.add("t/e1", "t/e0")
    leg = pool.begin()
    prefill, decode = leg.split.prefill.endpoint.key, leg.split.decode.endpoint.key
    pool.end(leg)
    seen = Observation("p", prefill, leg.request.session, BLOCK, None, "prefill", 4 * BLOCK)
    pool.director.progress.on_observation(seen, pool.clock())
    assert leg.request.endpoint == decode


def test_the_prefill_endpoints_cache_is_compared() -> None:
    """The cached tokens of the prefill engine's first event count as the truth of the request there."""
    pool = Pool()
    leg = pool.begin()
    seen = Observation("p", "t/e0", leg.request.session, 4 * BLOCK, 2 * BLOCK, "prefill", 6 * BLOCK)
    pool.director.progress.on_observation(seen, pool.clock())
    assert leg.request.cached_tokens == 2 * BLOCK
    assert leg.request.endpoint == "t/e0"


def test_partial_bodies_are_not_split() -> None:
    """A request whose body was not seen whole cannot be changed, so it is sent as it is."""
    pool = Pool()
    found = pool.director.offer(ask(chat(TEXT), partial=True), pool.clock())
    assert isinstance(found, PickResult)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_bodies_in_other_encodings_are_sent_as_they_are(encoding: str) -> None:
    """A body in another encoding of JSON than plain UTF-8, to which members cannot be added, is not split."""
    pool = Pool()
    body = json.dumps(chat(TEXT + "ä"), ensure_ascii=False).encode(encoding)
    answer = pool.director.offer(ask(body), pool.clock())
    assert isinstance(answer, PickResult)
    assert answer.body is None
    assert leg_bodies.obstacle("/v1/chat/completions", body) == "body"


def test_queued_requests_are_split_when_they_are_dispatched() -> None:
    """A request that has waited for capacity has kept its body, and begins with leg 1."""
    pool = Pool(limits=FlowLimits(requests=10))
    pool.load(0).slots = 1
    director, flow = pool.director, pool.director.flow
    assert flow is not None
    first = pool.begin()
    queued = director.offer(ask(chat("2" + TEXT)), pool.clock())
    assert isinstance(queued, QueuedRequest)
    pool.end(first)
    pool.parts.end(first.request.session)
    outcome = flow.poll(pool.clock()).step(pool.clock())
    assert outcome is not None
    assert isinstance(outcome.decision, PrefillLeg)
    answer = pool.end(outcome.decision)
    assert members(answer)["messages"][0]["content"] == "2" + TEXT


def test_the_decision_log_shows_both_legs() -> None:
    """A decision names both endpoints, the terms of both alternatives, how long leg 1 took and what came of
    it."""
    pool = Pool()
    explained = pool.parts.explain(json.dumps(chat(TEXT)).encode())
    assert explained["disaggregation"]["reason"]
    leg = pool.begin()
    pool.clock.now += 0.5
    pool.end(leg, PrefillFailure.TIMEOUT)
    [shown] = pool.decisions.latest(1)
    split = shown["disaggregation"]
    assert (split["prefill"], split["decode"]) == ("10.0.0.1:8000", "10.0.0.2:8000")
    assert (split["prefill_seconds"], split["fallback"]) == (0.5, "timeout")
    assert {"prefill", "transfer"} <= split["terms"].keys()


def test_a_sidecar_is_told_the_prefill_endpoint() -> None:
    """For llm-d's sidecar the answer names the prefill endpoint in a header and changes no body; the books
    move on when the decode engine reports the request."""
    pool = Pool(sidecar=True, warm=False)
    answer = pool.director.offer(ask(chat(TEXT)), pool.clock())
    assert isinstance(answer, PickResult)
    assert answer.endpoints == ("10.0.0.2:8000",)
    assert dict(answer.headers)[PREFILLER_HEADER] == "10.0.0.1:8000"
    assert answer.body is None
    assert (pool.attempts(), pool.reserved()) == ([1, 0], [0, 1])

    seen = Observation("p", "t/e1", answer.session, 4 * BLOCK, 0, "prefill", 4 * BLOCK)
    pool.director.progress.on_observation(seen, pool.clock())
    assert (pool.attempts(), pool.reserved()) == ([0, 1], [0, 0])
    assert pool.director.metrics.served_elsewhere == {}


def test_a_gateway_without_paths_splits_nothing() -> None:
    """A gateway that sends no path passes no header or body on, so neither kind of split would arrive."""
    for sidecar in (True, False):
        pool = Pool(sidecar=sidecar)
        answer = pool.director.offer(ask(chat(TEXT), path=""), pool.clock())
        assert isinstance(answer, PickResult)
        assert PREFILLER_HEADER not in dict(answer.headers)
        assert (answer.endpoints, pool.attempts()) == (("10.0.0.2:8000",), [0, 1])


def test_a_clients_own_prefiller_header_is_removed() -> None:
    """A request that is not split reaches no sidecar with a header of the client's making."""
    pool = Pool(sidecar=True)
    pool.roles("decode", "decode")
    answer = pool.director.offer(ask(chat(TEXT)), pool.clock())
    assert isinstance(answer, PickResult)
    assert answer.remove == (PREFILLER_HEADER,)
