"""The metrics port over real HTTP: pages, refusals, and what is never shown."""

import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from kvist_epp.admin.admin_server import AdminServer, Document, PickerPages, serve
from kvist_epp.errors import BadRequest, SettingsError
from kvist_epp.telemetry.metrics import PickerMetrics

SECRET = "a secret prompt"


class Picker:
    """A picker with fixed pages."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.headers: Mapping[str, str] = {}
        self.why = ""
        self.warning = ""
        self.ca = b""

    def explain(self, path: str, headers: Mapping[str, str], body: bytes) -> Document:
        self.asked.append((path, body))
        self.headers = headers
        if body == b"bad":
            raise BadRequest("the body is not JSON")
        if body == b"fault":
            raise RuntimeError(SECRET)
        return {"mode": "precise", "prompt_bytes": len(body), "endpoints": [], "picked": ["10.0.0.1:8000"]}

    def fleet(self) -> Document:
        return {"endpoints": [{"endpoint": "ns/a"}]}

    def index(self) -> Document:
        return {"blocks": 3}

    def pages(self) -> PickerPages:
        return PickerPages(
            metrics=PickerMetrics().snapshot,
            explain=self.explain,
            debug_fleet=self.fleet,
            index=self.index,
            not_ready=lambda: self.why,
            warning=lambda: self.warning,
            ca=lambda: self.ca,
        )


class Client:
    """A client of one admin server; answers are (status, content type, text)."""

    def __init__(self, picker: Picker, server: AdminServer, session: aiohttp.ClientSession) -> None:
        self.picker = picker
        self._base = f"http://127.0.0.1:{server.port}"
        self._session = session

    async def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, str, str]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._session.request(method, self._base + path, data=body, headers=sent) as answer:
            return answer.status, answer.content_type, await answer.text()


@asynccontextmanager
async def admin() -> AsyncIterator[Client]:
    picker = Picker()
    server = await serve(picker.pages(), "127.0.0.1", 0, body_limit=1000)
    async with aiohttp.ClientSession() as session:
        yield Client(picker, server, session)
    await server.close()


async def test_metrics_are_prometheus_text() -> None:
    """The page /metrics is in Prometheus' text format."""
    async with admin() as client:
        status, content_type, text = await client.ask("GET", "/metrics")

    assert (status, content_type) == (200, "text/plain")
    assert "kvist_epp_pick_seconds_count 0.0" in text


async def test_alive_and_ready_are_two_things() -> None:
    """/healthz is 200 while the process is alive, /readyz gives the reason not to send requests yet."""
    async with admin() as client:
        client.picker.why = "the index is warming up"
        alive, not_ready = await client.ask("GET", "/healthz"), await client.ask("GET", "/readyz")
        client.picker.why = ""
        ready = await client.ask("GET", "/readyz")

    assert (alive[0], not_ready[0], not_ready[2]) == (200, 503, "the index is warming up\n")
    assert (ready[0], ready[2]) == (200, "ok\n")


async def test_pick_explains_without_a_change() -> None:
    """The picker gets the body and the path of x-kvist-path, without its query; the answer is its JSON."""
    async with admin() as client:
        answer = await client.ask("POST", "/debug/pick", b"{}", x_kvist_path="/v1/completions?x=1", X_Id="7")
        await client.ask("POST", "/debug/pick", b"")

    assert json.loads(answer[2]) == {
        "mode": "precise",
        "prompt_bytes": 2,
        "endpoints": [],
        "picked": ["10.0.0.1:8000"],
    }
    assert client.picker.asked == [("/v1/completions", b"{}"), ("/v1/chat/completions", b"")]


async def test_header_names_are_lower_case() -> None:
    """The picker gets headers as the gateway sends them, without the one that was meant for this page."""
    async with admin() as client:
        await client.ask("POST", "/debug/pick", b"{}", x_kvist_path="/x", X_ID="7")

    assert ("x-id" in client.picker.headers, "x-kvist-path" in client.picker.headers) == (True, False)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "error"),
    [
        (
            "POST",
            "/debug/pick",
            b"bad",
            400,
            {"message": "the body is not JSON", "type": "invalid_request_error", "code": "bad-request"},
        ),
        (
            "POST",
            "/debug/pick",
            b"fault",
            500,
            {
                "message": "this page failed; see the log",
                "type": "internal_error",
                "code": "RuntimeError",
            },
        ),
        (
            "POST",
            "/debug/pick",
            b"x" * 2000,
            413,
            {"message": "Request Entity Too Large", "type": "invalid_request_error", "code": None},
        ),
        (
            "GET",
            "/debug/pick",
            None,
            405,
            {"message": "Method Not Allowed", "type": "invalid_request_error", "code": None},
        ),
        (
            "GET",
            "/nowhere",
            None,
            404,
            {"message": "Not Found", "type": "invalid_request_error", "code": None},
        ),
    ],
)
async def test_refusals_are_json(
    method: str, path: str, body: bytes | None, status: int, error: dict[str, str | None]
) -> None:
    """Every refusal is an error object; an internal error shows its type, and nothing that could quote a
    prompt."""
    async with admin() as client:
        answer = await client.ask(method, path, body)

    assert (answer[0], answer[1], json.loads(answer[2])) == (status, "application/json", {"error": error})


async def test_a_fault_is_logged_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    """The log names the page, the type and the place of a fault; its text might quote a prompt."""
    with caplog.at_level(logging.ERROR):
        async with admin() as client:
            await client.ask("POST", "/debug/pick", b"fault")

    assert "the page /debug/pick failed with RuntimeError at" in caplog.text
    assert SECRET not in caplog.text


async def test_fleet_index_and_contents() -> None:
    """The debug pages show their documents; /debug lists the pages as text or JSON."""
    async with admin() as client:
        fleet, index = await client.ask("GET", "/debug/fleet"), await client.ask("GET", "/debug/index")
        text = await client.ask("GET", "/debug")
        contents = await client.ask("GET", "/debug", Accept="application/json")

    assert json.loads(fleet[2]) == {"endpoints": [{"endpoint": "ns/a"}]}
    assert json.loads(index[2]) == {"blocks": 3}
    assert text[2].splitlines()[0] == "/metrics            Prometheus metrics"
    assert "/debug/index" in json.loads(contents[2])["pages"]


async def test_a_taken_port_names_the_flag() -> None:
    """If two pickers use one port, the error of the second names the flag to change."""
    first = await serve(Picker().pages(), "127.0.0.1", 0)
    with pytest.raises(SettingsError, match=rf"--metrics-port: cannot listen on 127.0.0.1:{first.port}: "):
        await serve(Picker().pages(), "127.0.0.1", first.port)
    await first.close()


async def test_readiness_carries_warnings() -> None:
    """A problem that needs attention is on /readyz, below the readiness of the picker."""
    async with admin() as client:
        client.picker.warning = "the certificate expired"
        ready = await client.ask("GET", "/readyz")
        client.picker.why = "draining"
        not_ready = await client.ask("GET", "/readyz")

    assert (ready[0], ready[2]) == (200, "ok\nwarning: the certificate expired\n")
    assert (not_ready[0], not_ready[2]) == (503, "draining\nwarning: the certificate expired\n")


async def test_the_authority_can_be_fetched() -> None:
    """/ca.crt is the PEM unchanged; without one, the 404 names the flag that sets it."""
    async with admin() as client:
        absent = await client.ask("GET", "/ca.crt")
        client.picker.ca = b"-----BEGIN CERTIFICATE-----\n"
        found = await client.ask("GET", "/ca.crt")

    assert absent[0] == 404
    assert "--cert-path" in json.loads(absent[2])["error"]["message"]
    assert found == (200, "application/x-pem-file", "-----BEGIN CERTIFICATE-----\n")


OWN_NAMES = ("127.0.0.1:9090", "localhost", "[::1]:9090", "picker.serving.svc:9090")


@pytest.mark.parametrize("path", ["/fleet", "/debug", "/debug/fleet", "/debug/decisions", "/debug/nothing"])
async def test_documents_are_not_served_under_foreign_names(path: str) -> None:
    """A domain that points at the picker (DNS rebinding) gets 421, and a page of another site 403; addresses
    and names of the cluster are answered."""
    async with admin() as client:
        status, kind, text = await client.ask("GET", path, Host="evil.example")
        assert (status, kind) == (421, "application/json")
        assert "--live-page-hosts" in text
        assert (await client.ask("GET", path, Origin="http://evil.example"))[0] == 403
        for name in OWN_NAMES:
            assert (await client.ask("GET", path, Host=name))[0] in {200, 404}


async def test_a_foreign_page_cannot_have_a_request_explained() -> None:
    """The form's target refuses bodies of other sites, even where a link would be followed."""
    async with admin() as client:
        assert (await client.ask("POST", "/debug/pick", b"{}", Host="evil.example"))[0] == 421
        link: Any = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        assert (await client.ask("POST", "/debug/pick", b"{}", **link))[0] == 403
        assert (await client.ask("GET", "/debug", **link))[0] == 200
        assert (await client.ask("POST", "/debug/pick", b"{}"))[0] == 200


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz"])
async def test_scrapers_and_probes_may_use_any_name(path: str) -> None:
    """Metrics and probes have no check of the name: a scraper that is refused is noticed only by a gap."""
    async with admin() as client:
        assert (await client.ask("GET", path, Host="prometheus-target.example"))[0] == 200
