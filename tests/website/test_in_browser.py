"""The built site in a real Chromium: pictures are drawn, the search answers, no page is too wide."""

import functools
import http.server
import threading
from collections.abc import Iterator
from typing import Any, Final

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from tests.browser.binaries import chromium
from tests.website.pages import ROOT

SITE: Final = ROOT / "build" / "site"
WIDTHS: Final = (390, 1440)
PAGES: Final = (
    "index.html",
    "comparison.html",
    "architecture.html",
    "benchmarks.html",
    "guides/attach-envoy.html",
    "reference/picker-flags.html",
    "reference/inferencepool.html",
    "tutorials/laptop.html",
)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, as any static host does, without a log."""

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Address of the site on a static host."""
    handler = functools.partial(_Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Yield a headless Chromium."""
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(address: str, browser: Browser) -> Iterator[Page]:
    """Yield a page whose console reports no error, and which asks no other host for anything."""
    problems: list[str] = []
    page = browser.new_page(base_url=address)
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(address) else problems.append(asked.url))
    yield page
    page.close()
    assert problems == []


def test_pictures_are_drawn(page: Page) -> None:
    """Each picture of the architecture is drawn, and its text is gone."""
    page.goto("architecture.html")
    page.wait_for_function("document.querySelectorAll('pre.mermaid').length === 0", timeout=60_000)
    pictures = page.locator("div.mermaid")
    heights = pictures.evaluate_all("all => all.map(one => one.getBoundingClientRect().height)")
    assert len(heights) == 4
    assert min(heights) > 100


def test_the_search_answers(page: Page) -> None:
    """A flag that is typed into the search is found on the page of flags."""
    page.goto("index.html")
    page.locator("input[name=query]").first.click()
    page.keyboard.type("prewarm-tokens")
    found = page.locator(".md-search-result__link[href*='reference/picker-flags']").first
    found.wait_for(state="attached", timeout=60_000)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_its_window(page: Page, width: int) -> None:
    """Tables and code that are too wide scroll in a box of their own."""
    page.set_viewport_size({"width": width, "height": 900})
    wide = []
    for uri in PAGES:
        page.goto(uri)
        if page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") > 0:
            wide.append(uri)
    assert wide == []
