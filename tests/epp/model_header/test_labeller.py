"""One request of the role ``model-header``: which headers are set, which go, what is counted and logged."""

import json
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.epp.extproc import messages as m

from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pick_request import PickRequest, PickResult
from kvist_epp.extproc.session import ExtProcSession
from kvist_epp.http2.call import Message
from kvist_epp.model_header.labeller import LABELS, OUTCOMES, HeaderMetrics, Labeller
from kvist_epp.names import BASE_MODEL_HEADER, MODEL_HEADER, MODEL_REWRITE_HEADER
from kvist_epp.telemetry.request_log import LogWriter, RequestLog

BASES = {"sql-lora": "qwen3-32b", "poems": "qwen3-32b"}
FORGED = {MODEL_HEADER: "mine", BASE_MODEL_HEADER: "mine"}


class Silent(RequestLog):
    """Keeps the lines instead of writing them."""

    def __init__(self) -> None:
        super().__init__(LogWriter(os.open(os.devnull, os.O_WRONLY)))
        self.lines: list[Any] = []

    def write(self, line: Any, *, prompt: bytes = b"") -> None:
        self.lines.append(line)


@pytest.fixture
def log() -> Silent:
    """The log of one test."""
    return Silent()


def asked(body: bytes, headers: dict[str, str] | None = None, *, partial: bool = False) -> PickRequest:
    """A question about this body."""
    return PickRequest("POST", "/v1/chat/completions", headers or {}, body, None, partial=partial)


def labeller(log: RequestLog | None = None, metrics: HeaderMetrics | None = None) -> Labeller:
    """One that knows two adapters."""
    silent = log or RequestLog(None, enabled=False)  # type: ignore[arg-type]  # nothing is written
    return Labeller(BASES, metrics or HeaderMetrics(), silent)


def named(model: object) -> bytes:
    """A body that names this model."""
    return json.dumps({"messages": [], "model": model}).encode()


@pytest.mark.parametrize(
    ("model", "headers"),
    [
        ("llama", {MODEL_HEADER: "llama"}),
        ("sql-lora", {MODEL_HEADER: "sql-lora", BASE_MODEL_HEADER: "qwen3-32b"}),
        ("qwen3-32b", {MODEL_HEADER: "qwen3-32b", BASE_MODEL_HEADER: "qwen3-32b"}),
    ],
)
def test_the_header_is_the_bodys_model(model: str, headers: dict[str, str]) -> None:
    """The header is the body's model as it is; for adapters, and base models, the base model is named too."""
    assert labeller().decide(asked(named(model))) == PickResult((), tuple(headers.items()))


@pytest.mark.parametrize("body", [b"", b"[]", b"no json", b'{"prompt": "x"}', named(7), named("a\nb")])
@pytest.mark.parametrize("partial", [False, True])
def test_without_a_model_a_clients_header_goes(body: bytes, partial: bool) -> None:
    """Whatever the body is: nothing is set, and both headers of the client are taken away."""
    assert labeller().decide(asked(body, FORGED, partial=partial)) == PickResult((), remove=LABELS)


def test_a_beginning_is_not_answered_for() -> None:
    """A partial body gets no header, since a later ``model`` could be another one."""
    assert labeller().decide(asked(named("llama"), partial=True)) == PickResult(())


def test_a_clients_header_is_replaced() -> None:
    """With a model the header is overwritten; the other one goes when it has no value here."""
    picked = labeller().decide(asked(named("llama"), FORGED))
    assert picked == PickResult((), ((MODEL_HEADER, "llama"),), remove=(BASE_MODEL_HEADER,))


def test_the_route_follows_a_rewritten_name() -> None:
    """A request that a picker will rename goes where its new name goes."""
    headers = {MODEL_REWRITE_HEADER: "llama"}
    assert labeller().decide(asked(named("other"), headers)).headers == ((MODEL_HEADER, "llama"),)
    assert labeller().decide(asked(b"{}", headers)).headers == ()


def test_requests_are_counted_and_logged(log: Silent) -> None:
    """By outcome, forged ones besides; no name of a model is in the metrics."""
    metrics = HeaderMetrics(version="1")
    deciding = labeller(log, metrics)
    for ask in (
        asked(named("llama"), {**FORGED, "x-request-id": "r-1"}),
        asked(b""),
        asked(b"{}"),
        asked(named("\n")),
        asked(b"{}", partial=True),
    ):
        deciding.decide(ask)
    page = metrics.snapshot().format("")[0].decode()
    assert [
        line for line in page.splitlines() if line.startswith("kvist_epp_model_header_requests_total{")
    ] == [f'kvist_epp_model_header_requests_total{{outcome="{outcome}"}} 1.0' for outcome in OUTCOMES]
    assert "kvist_epp_model_header_forged_total 1.0" in page
    assert "kvist_epp_model_header_seconds_count 5.0" in page
    assert "llama" not in page
    assert [(line.id, line.outcome, line.model) for line in log.lines][:2] == [
        ("r-1", "named", "llama"),
        ("", "no-body", None),
    ]


MODES = {
    "buffered": m.config(pb.BUFFERED),
    "buffered_partial": m.config(pb.BUFFERED_PARTIAL),
    "duplex": m.config(pb.FULL_DUPLEX_STREAMED, pb.FULL_DUPLEX_STREAMED),
    "streamed": m.config(pb.STREAMED),
    "streamed-early": m.config(pb.STREAMED, early=True),
    "none": m.config(pb.NONE),
    "unsaid": None,
}


def run(protocol: pb.ProtocolConfiguration | None, chunks: list[bytes], *, trailers: bool) -> "Gateway":
    """One request with both headers forged, as a gateway would go on with it."""
    gateway, exchange = Gateway(dict(FORGED)), ExtProcSession(labels=LABELS)
    end = not chunks and not trailers
    sent = [m.request_headers(protocol, end=end, headers=FORGED)]
    sent += [
        m.request_body(chunk, end=number == len(chunks) and not trailers)
        for number, chunk in enumerate(chunks, 1)
    ]
    sent += [m.request_trailers()] if trailers else []
    for message in sent:
        step = exchange.feed(message)
        gateway.take(step.replies)
        if step.request is not None:
            step = exchange.on_decision(labeller().decide(step.request))
            gateway.take(step.replies)
    return gateway


class Gateway:
    """Applies answers to the headers of a request."""

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers
        self.body = b""

    def take(self, replies: tuple[Message, ...]) -> None:
        """In order, taking away before setting, as Envoy does."""
        for reply in map(pb.ProcessingResponse.FromString, map(bytes, replies)):
            assert not reply.HasField("dynamic_metadata")
            kind = reply.WhichOneof("response")
            if kind not in {"request_headers", "request_body"}:
                continue
            common = getattr(reply, kind).response
            for name in common.header_mutation.remove_headers:
                self.headers.pop(name, None)
            self.headers |= m.set_headers(common)
            self.body += common.body_mutation.streamed_response.body
            assert common.clear_route_cache or not common.HasField("header_mutation")


@pytest.mark.parametrize("mode", MODES)
@given(st.lists(st.binary() | st.just(named("llama")), max_size=3), st.booleans())
def test_no_forged_header_survives_any_mode(mode: str, chunks: list[bytes], trailers: bool) -> None:
    """Whatever the mode and the body, also without one before trailers: the client's values are gone."""
    gateway = run(MODES[mode], chunks, trailers=trailers)
    assert "mine" not in gateway.headers.values()
    if mode == "duplex":
        assert gateway.body == b"".join(chunks)


@pytest.mark.parametrize("mode", ["buffered", "duplex", "streamed-early", "unsaid"])
def test_the_model_is_reported_where_the_body_is_seen(mode: str) -> None:
    """The header is set in each mode that shows the whole body."""
    gateway = run(MODES[mode], [named("llama")], trailers=False)
    assert gateway.headers == {MODEL_HEADER: "llama"}
