"""The live page over real HTTP: headers, refusals, documents and the form."""

import io
import json
import logging
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
from tests.epp.admin.live.documents import document
from tests.epp.admin.live.live_site import FORM, PATHS, SECRET, explain, site
from tests.epp.parts import make

from kvist_epp.admin.admin_server import PickerPages, serve
from kvist_epp.admin.live.live_page import SECURITY_HEADERS, make_live_page
from kvist_epp.admin.live.request_origin import RequestOrigin
from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.settings.settings import Settings
from kvist_epp.telemetry.metrics import PickerMetrics


async def test_every_answer_has_the_security_headers() -> None:
    """Policy, nosniff, no frames, no referrer to other sites; refusals included."""
    async with site() as running:
        answers = [await running.get(path) for path in PATHS]
        answers += [await running.get(path, Host="evil.example") for path in (*PATHS, "/live/events")]

    assert [status for status, _, _ in answers] == [200] * 5 + [421] * 6
    for _, _, headers in answers:
        found = {name: headers[name] for name in SECURITY_HEADERS if name != "Cache-Control"}
        assert found == {name: text for name, text in SECURITY_HEADERS.items() if name != "Cache-Control"}
    policy = SECURITY_HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "no-store" in answers[0][2]["Cache-Control"]
    assert "immutable" in answers[2][2]["Cache-Control"]


async def test_the_page_can_be_switched_off() -> None:
    """Without its routes none of its paths is there, and the other pages stay."""
    pages = PickerPages(
        metrics=PickerMetrics().snapshot, explain=explain, debug_fleet=dict, index=dict, not_ready=str
    )
    server = await serve(pages, "127.0.0.1", 0)
    async with aiohttp.ClientSession() as client:
        found = []
        for path in (*PATHS, "/live/events", "/healthz"):
            async with client.get(f"http://127.0.0.1:{server.port}{path}") as answer:
                found.append(answer.status)
        async with client.get(f"http://127.0.0.1:{server.port}/debug") as answer:
            listed = await answer.text()
    await server.close()

    assert found == [404] * 6 + [200]
    assert "live page" not in listed


async def test_the_setting_decides_whether_there_is_a_page() -> None:
    """A picker has a live page unless --live-page=false; the page knows the replica and its decisions."""
    parts = make(1)
    found = []
    for settings in (Settings(), Settings(live_page=False)):
        registry = EndpointRegistry(settings, parts.director, parts.clock, scrape_interval=0.0)
        page = make_live_page(
            settings,
            registry,
            None,
            explain,
            origin=RequestOrigin(),
            not_ready=str,
            warnings=tuple,
            version="1.2.3",
        )
        found.append(page)
    assert found[0] is not None
    snapshot = await found[0]._all.current()

    assert found[1] is None
    assert (snapshot.document["replica"], snapshot.document["picks"]) == (parts.director.replica, [])


async def test_the_document_is_json_of_all_replicas_or_of_this_one() -> None:
    """/live/state adds up the replicas; ?replicas=false is what a replica sends to another one."""
    async with site({"b": document("b"), "c": None}) as running:
        _, everything, _ = await running.get("/live/state")
        _, own, _ = await running.get("/live/state?replicas=false")

    assert [one["answers"] for one in json.loads(everything)["replicas"]] == [True, True, False]
    assert json.loads(everything)["traffic"]["requests_per_second"] == 25.0
    assert json.loads(own)["traffic"]["requests_per_second"] == 12.5
    assert json.loads(own)["replicas"] == []


async def test_a_pasted_request_is_explained_and_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    """The form works as a plain form and as a fragment; the text is echoed to its viewer and nowhere else."""
    form = {"path": "/v1/completions?x=1", "body": json.dumps({"prompt": SECRET})}
    with caplog.at_level(logging.DEBUG):
        async with site() as running:
            whole = await running.post(form, Origin=running.url)
            fragment = await running.post(form, "?fragment")
            later = [await running.get(path) for path in ("/", "/live/state", "/debug")]

    assert (whole[0], fragment[0]) == (200, 200)
    assert "It would go to 10.0.0.1:8000/v1/completions" in whole[1]
    assert SECRET in whole[1]
    assert "<html" in whole[1]
    assert fragment[1].lstrip().startswith("<h3")
    assert SECRET not in fragment[1] + caplog.text + "".join(text for _, text, _ in later)


@pytest.mark.parametrize(
    ("form", "headers", "status", "text"),
    [
        ({"body": "bad"}, {}, 200, "the body is not JSON (400, bad-request)"),
        ({"body": "fault"}, {}, 500, "this page failed"),
        ({"body": "{}"}, {"Origin": "http://evil.example"}, 403, "may not use this page"),
        ({"body": "{}"}, {"Origin": "null"}, 403, "may not use this page"),
        ({"body": "{}"}, {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 403, "other sites"),
        ({"body": "{}"}, {"Host": "evil.example"}, 421, "--live-page-hosts"),
        (b"{}", {"Content-Type": "application/json"}, 415, "/debug/pick"),
        (b"body=" + b"x" * (1 << 20), FORM, 413, "1 MiB"),
        (
            "&".join(f"a{n}=1" for n in range(50)),
            {"Content-Type": "application/x-www-form-urlencoded"},
            400,
            "",
        ),
    ],
)
async def test_what_the_form_refuses(form: Any, headers: dict[str, str], status: int, text: str) -> None:
    """A request that would be refused is explained; foreign pages, other types and long bodies are
    refused."""
    async with site() as running:
        found = await running.post(io.BytesIO(form) if isinstance(form, bytes) else form, **headers)

    assert found[0] == status
    assert text in found[1]
    assert SECRET not in found[1]


async def test_a_form_of_unknown_length_is_bounded_too() -> None:
    """Chunks are counted as they are read."""

    async def chunks() -> AsyncIterator[bytes]:
        yield urlencode({"body": "x" * (1 << 20)}).encode()

    async with site() as running:
        found = await running.post(chunks(), **FORM)

    assert found[0] == 413
