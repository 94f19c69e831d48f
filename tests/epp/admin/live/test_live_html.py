"""The page as HTML: every figure is there without JavaScript, and no value is markup."""

import json
from html.parser import HTMLParser
from typing import Any

import pytest
from tests.epp.admin.live.documents import document, endpoint, pick

from kvist_epp.admin.live.live_html import MAX_ROWS, SECTIONS, LiveHtml, bar, spark, stack
from kvist_epp.admin.live.replica_merge import merged
from kvist_epp.scheduling.cost import TERMS

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
VOID = {"meta", "link", "input", "br", "img"}


class Checker(HTMLParser):
    """Notes elements, attributes and text, and elements that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.wrong: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element."""
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element without content."""
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """Close an element."""
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        """Collect the text."""
        self.text += f"{data} "


@pytest.fixture(scope="module")
def html() -> LiveHtml:
    """Compile the templates once."""
    return LiveHtml()


def finish(steps: Any) -> bytes:
    """Run a generator to its end."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        found: bytes = end.value
        return found


def page(html: LiveHtml, doc: dict[str, Any], **more: Any) -> tuple[str, Checker]:
    """Return the whole page and what a parser makes of it."""
    text = html.page(doc, finish(html.sections(doc)), **more)
    checker = Checker()
    checker.feed(text)
    checker.close()
    return text, checker


def poisoned(value: Any) -> Any:
    """Replace every text of a document with markup, but keep the words that decide about the form."""
    keep = {"shown", "severity", "terms", "picked"}
    if isinstance(value, dict):
        return {key: one if key in keep else poisoned(one) for key, one in value.items()}
    if isinstance(value, list):
        return [poisoned(one) for one in value]
    return HOSTILE if isinstance(value, str) else value


def test_the_page_is_well_formed_and_plain(html: LiveHtml) -> None:
    """Elements close in order; there is no inline script, style or event handler, as the policy demands."""
    doc = merged(document(endpoints=5, picks=3), {"b": document("b"), "c": None})
    _, found = page(html, doc, explained={"path": "/v1/x", "body": "{}", "answer": None, "error": "no"})

    assert (found.wrong, found.open) == ([], [])
    for tag, attributes in found.elements:
        assert tag != "style"
        assert tag != "script" or attributes["src"], attributes
        assert not [name for name in attributes if name == "style" or name.startswith("on")]


def test_no_value_becomes_markup(html: LiveHtml) -> None:
    """Names, reasons, models and ids, which clients and engines choose, are shown as text."""
    doc = poisoned(merged(document(endpoints=2, picks=2), {"b": document("b"), "c": None}))
    doc["health"]["warnings"] = [HOSTILE]
    explained = {"path": HOSTILE, "body": f"</textarea>{HOSTILE}", "answer": None, "error": HOSTILE}
    _, found = page(html, doc, explained=explained)

    assert [tag for tag, _ in found.elements].count("script") == 1
    assert not [tag for tag, _ in found.elements if tag == "img"]
    assert (found.wrong, found.open) == ([], [])
    assert found.text.count("<script>alert(1)</script>") > 20


def test_every_figure_is_in_the_text(html: LiveHtml) -> None:
    """A terminal browser shows what the graphics show."""
    doc = merged(document(endpoints=2, picks=1), {})
    _, found = page(html, doc)
    for text in (
        "12.5/s",
        "78 %",
        "predicted 80 %",
        "17M",
        "17.8 GPU-min",
        "serving/qwen-1",
        "10.0.0.2:8000",
    ):
        assert text in found.text
    for text in ("of 256", "75 ms", "wait 20 ms", "work 80 ms", "serving/qwen-0", "90 %", "118 ms"):
        assert text in found.text
    assert "Money saved" in found.text


def test_slower_tiers_have_a_column_where_there_are_any(html: LiveHtml) -> None:
    """Tokens on host memory and storage stand beside the KV cache; a pool whose engines have none, or a
    replica of an older version, is without the column."""
    doc = merged(document(endpoints=3), {})
    _, tiered = page(html, doc)
    for one in doc["endpoints"]:
        one["tiers"] = {}
    del doc["endpoints"][0]["tiers"]
    _, plain = page(html, doc)

    def cells(found: Checker) -> tuple[int, int]:
        roles = [attributes.get("role") for _, attributes in found.elements]
        labels = [attributes.get("data-label") for _, attributes in found.elements]
        return roles.count("columnheader"), labels.count("Slower tiers")

    assert "11M" in tiered.text
    assert "host\xa02M, shared\xa09M" in tiered.text
    assert (cells(tiered)[0] - cells(plain)[0], cells(tiered)[1], cells(plain)[1]) == (1, 3, 0)


def test_links_lead_to_the_picker_itself_under_any_prefix(html: LiveHtml) -> None:
    """Every address is relative, for proxies that serve the page below a path."""
    _, found = page(html, merged(document(picks=1), {}))
    links = [
        value for _, a in found.elements for name, value in a.items() if name in ("href", "src", "action")
    ]

    assert len(links) > 6
    assert not [link for link in links if link is None or link.startswith("/") or "//" in link]


def test_the_page_reloads_itself_only_without_scripts(html: LiveHtml) -> None:
    """The refresh is inside noscript, and absent where it would send the form again."""
    doc = merged(document(), {})
    plain, _ = page(html, doc)
    answered, _ = page(html, doc, explained={"path": "/", "body": "", "answer": None, "error": "x"})

    assert '<noscript><meta http-equiv="refresh" content="5"></noscript>' in plain
    assert "refresh" not in answered


def test_an_explanation_names_the_endpoint_and_the_terms(html: LiveHtml) -> None:
    """The answer of the form has each endpoint with its cost and what it consists of."""
    rows = [dict(row) for row in pick(0)["endpoints"]]
    rows[2] |= {"eligible": False, "reason": "unreachable"}
    answer = {
        "mode": "precise",
        "prompt_bytes": 24_000,
        "full": False,
        "picked": ["10.0.0.1:8000"],
        "endpoints": rows,
    }
    text = html.explanation({"path": "/v1/x", "body": "{}", "error": "", "answer": answer})

    assert "It would go to 10.0.0.1:8000" in text
    assert "wait 70 ms, work 80 ms" in text
    assert "unreachable" in text


@pytest.mark.parametrize(
    "change",
    [
        {"endpoints": []},
        {"picks": []},
        {"queue": {}},
        {"unknown": []},
        {"health": {"ready": False, "reason": "warming up", "warnings": ["x"]}},
        {
            "picks": [
                pick(0, outcome="rejected-saturated", endpoints=[], picked=[], predicted_ttft_seconds=None)
            ]
        },
        {"picks": [pick(0, endpoints=pick(0)["endpoints"][:1], prompt_tokens=0)]},
        {
            "picks": [
                pick(
                    0,
                    endpoints=[*pick(0)["endpoints"][:1], {"name": "b", "eligible": False, "reason": "new"}],
                )
            ]
        },
    ],
)
def test_the_page_can_be_made_of_little(html: LiveHtml, change: dict[str, Any]) -> None:
    """Nothing but the document's form is needed: no endpoint, no pick, no queue."""
    doc = merged(document() | change, {})

    assert page(html, doc)[1].wrong == []


def test_a_large_pool_shows_the_worst_endpoints(html: LiveHtml) -> None:
    """The table is bounded; the page says how many more there are."""
    rows = [endpoint(number) for number in range(MAX_ROWS + 50)]
    rows[-1] |= {"severity": 4, "state": "unreachable"}
    doc = merged(document() | {"endpoints": rows}, {})
    sections = json.loads(finish(html.sections(doc)))

    assert set(sections) == set(SECTIONS)
    assert sections["endpoints"].count("<tr") == MAX_ROWS + 1
    assert f"qwen-{MAX_ROWS + 49}<" in sections["endpoints"].replace(" <", "<")
    assert "50 more endpoints" in sections["endpoints"]


def test_graphics_stay_within_their_frame() -> None:
    """Lines and bars are drawn from any numbers, and absent where nothing is known."""
    assert "points" in spark([0.0, None, 3.0, 1.0])
    assert spark([1.0]) == spark([None, None]) == bar(None) == ""
    assert 'width="100"' in bar(7.0)
    assert 'width="0"' in bar(-1.0)
    widths = stack(dict.fromkeys(TERMS, 1.0), 14.0)
    assert widths.count("<rect") == len(TERMS)
    assert 'x="42.86"' in widths
    assert "<rect" not in stack({}, 0.0)
