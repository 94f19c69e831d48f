"""The live page of a pool under load: every size and theme, by keyboard, and through what goes wrong.

The tests share one pool, in order: the last ones kill an engine and start the picker again.
"""

import asyncio
import json
import re
import subprocess

import pytest
from playwright.async_api import Browser
from tests.browser.binaries import w3m
from tests.browser.pool import Pool
from tests.browser.viewer import NARROW, WIDE, Theme, viewer

from kvist_sim.launch import metric

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

SECRET = "what the owl said to the fox"
REQUEST = json.dumps({"model": "kvist-demo", "messages": [{"role": "user", "content": SECRET}]})
ROWS = "document.querySelectorAll('.endpoints tbody tr').length"
PICKS = "document.querySelectorAll('.picks tbody tr').length"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
async def test_the_page_is_sound(chromium: Browser, pool: Pool, size: tuple[int, int], theme: Theme) -> None:
    """At both widths and in both themes: no message on the console, nothing wider than the window, and no
    rule of accessibility broken, contrast included."""
    async with viewer(chromium, pool.url(), size=size, theme=theme) as seen:
        await seen.live()
        await seen.until(f"{ROWS} === 4 && {PICKS} === 12")
        await asyncio.sleep(1.5)
        assert await seen.accessibility() == []
        assert await seen.overflow() <= 0
        assert seen.problems == []
        await seen.picture(f"load-{size[0]}-{theme}")


async def test_the_figures_follow_the_load(chromium: Browser, pool: Pool) -> None:
    """Without a reload the page shows requests, cache hits and picks as they come; the document and the
    metrics agree with it."""
    async with viewer(chromium, pool.url()) as seen:
        await seen.live()
        first = await seen.page.locator(".picks tbody tr code").first.inner_text()
        await seen.until(f"document.querySelector('.picks tbody tr code').textContent !== '{first}'")
        rate = float((await seen.figure("Requests")).removesuffix("/s"))
        cached = float((await seen.figure("Prompt tokens from cache")).removesuffix("%"))
        saved = await seen.page.locator(".tile", has_text="Prefill saved").inner_text()
        document = await pool.document()
        picked = await metric(pool.pickers[0], "kvist_epp_requests_total", 'outcome="picked"')

    assert 2 < rate < 60
    assert 5 < cached <= 100
    assert re.search(r"GPU-(s|min), price \d+\.\d\d in", saved)
    assert 0 <= picked - document["traffic"]["since_start"]["picked"] < 100
    assert document["ttft"]["shown"] == "prefilled"
    assert document["hit_rate"]["true"] is not None
    assert SECRET not in json.dumps(document)


async def test_every_control_is_reached_by_keyboard(chromium: Browser, pool: Pool) -> None:
    """The skip link leads to the endpoints; each stop has a visible focus; find, filter and order work, and
    keep their state and the focus while newer figures come in."""
    async with viewer(chromium, pool.url()) as seen:
        await seen.live()
        keyboard = seen.page.keyboard
        stops: list[str] = []
        while "BODY" not in stops and len(stops) < 40:
            await keyboard.press("Tab")
            stop = await seen.page.evaluate(
                "(() => { const e = document.activeElement, s = getComputedStyle(e);"
                " return [e.id || e.className || e.tagName, s.outlineStyle !== 'none'] })()"
            )
            stops.append(stop[0])
            assert stop[1] or stop[0] == "BODY", stop
        assert stops[0] == "skip"
        assert {"pause", "find", "show", "order", "path", "body"} <= set(stops)

        await seen.page.locator(".skip").focus()
        await keyboard.press("Enter")
        assert await seen.page.evaluate("document.activeElement.id") == "h-endpoints"
        await keyboard.press("Tab")
        await keyboard.type("engine-2")
        shown = "[...document.querySelectorAll('.endpoints tbody tr')].filter(r => !r.hidden).length"
        assert await seen.page.evaluate(shown) == 1
        await asyncio.sleep(2.5)
        assert await seen.page.evaluate(shown) == 1
        assert await seen.page.evaluate("document.activeElement.id") == "find"
        assert await seen.page.locator("#shown").inner_text() == "1 of 4"
        await seen.page.locator("#find").fill("")
        await seen.page.locator("#order").select_option("name")
        names = await seen.page.locator(".endpoints tbody th").all_inner_texts()
        assert names == sorted(names)


async def test_a_viewer_can_stop_the_page(chromium: Browser, pool: Pool) -> None:
    """Paused figures stay as they are, and go on when the viewer says so."""
    text = "document.getElementById('picks').innerText"
    async with viewer(chromium, pool.url()) as seen:
        await seen.live()
        await seen.until(f"{PICKS} === 12")
        await seen.page.locator("#pause").press("Enter")
        before = await seen.page.evaluate(text)
        await asyncio.sleep(2.5)
        assert await seen.page.evaluate(text) == before
        assert await seen.page.locator("#pause").get_attribute("aria-pressed") == "true"
        await seen.page.locator("#pause").press("Enter")
        await seen.until(f"{text} !== {json.dumps(before)}")


async def test_a_pasted_request_is_explained(chromium: Browser, pool: Pool) -> None:
    """The answer appears on the page without a reload and agrees with /debug/pick; what is refused is
    explained, too; no page shows the text to another viewer."""
    async with viewer(chromium, pool.url()) as seen:
        await seen.live()
        await seen.page.locator("#body").fill(REQUEST)
        await seen.page.get_by_role("button", name="Explain").click()
        await seen.until("document.querySelector('#explanation h3') !== null")
        assert (await seen.page.locator("#explanation h3").inner_text()).startswith(
            "It would go to 127.0.0.1:"
        )
        assert await seen.page.locator("#explanation tbody tr").count() == 4
        assert await seen.page.evaluate("document.activeElement.tagName") == "H3"
        assert await seen.accessibility() == []
        await seen.page.locator("#body").fill("{")
        await seen.page.get_by_role("button", name="Explain").click()
        await seen.until("document.querySelector('#explanation h3').textContent === 'It would be refused'")
        assert seen.problems == []
    async with viewer(chromium, pool.url()) as other:
        assert SECRET not in await other.page.content()
    log = pool.pickers[0].child.log.read_text()
    assert SECRET not in log + json.dumps(await pool.document())


async def test_the_page_works_without_scripts(chromium: Browser, pool: Pool) -> None:
    """All tables are there, the form answers with a page, and the page loads itself again."""
    async with viewer(chromium, pool.url(), scripts=False) as seen:
        assert await seen.page.locator(".endpoints tbody tr").count() == 4
        assert "loads itself again" in await seen.page.locator("#freshness").inner_text()
        assert await seen.page.locator("#pause").count() == 0
        async with seen.page.expect_navigation(timeout=15_000):
            pass
        await seen.page.locator("#body").fill(REQUEST)
        await seen.page.get_by_role("button", name="Explain").click()
        await seen.page.locator("#explanation h3").wait_for()
        assert (await seen.page.locator("#body").input_value()) == REQUEST
        assert await seen.page.locator("#explanation tbody tr").count() == 4
        assert seen.problems == []
        await seen.picture("no-scripts")


async def test_the_page_is_plain_text_in_a_terminal_browser(pool: Pool) -> None:
    """w3m shows the figures of each endpoint in a line, and the rest below each other."""
    text = await asyncio.to_thread(_dump, pool.url())
    rows = [line for line in text.splitlines() if line.strip().startswith("local/engine-")]
    assert len(rows) >= 4
    assert re.search(r"local/engine-0 127[.:0-9]+ ready +\d+ of 256", text)
    assert "What this page cannot know" in text


def _dump(url: str) -> str:
    """Return what w3m shows of a page."""
    command = [str(w3m()), "-dump", "-cols", "240", url]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


async def test_an_endpoint_that_dies_comes_first(chromium: Browser, pool: Pool) -> None:
    """Within seconds the row of a killed engine is at the top with the reason, the header says that one
    endpoint needs attention, and screen readers hear it once."""
    async with viewer(chromium, pool.url()) as seen, viewer(chromium, pool.url(), size=NARROW) as small:
        await seen.live()
        await small.live()
        await seen.until(f"{ROWS} === 4")
        await asyncio.sleep(1)
        await pool.kill_engine(2)
        await seen.until(
            "document.querySelector('.endpoints tbody .state').textContent === 'unreachable'", 30
        )
        first = seen.page.locator(".endpoints tbody tr").first
        assert "local/engine-2" in await first.inner_text()
        assert "Needs attention 1 of 4 endpoints" in await seen.page.locator("#health").inner_text()
        await seen.until("document.getElementById('announcement').textContent.startsWith('1 of 4')", 60)
        await seen.page.locator("#show").select_option("attention")
        assert await seen.page.locator(".endpoints tbody tr:visible").count() == 1
        await seen.page.locator("#show").select_option("")
        assert await seen.accessibility() == []
        assert seen.problems == []
        await seen.picture("dead-endpoint-1440")
        await small.until("document.querySelector('.endpoints tbody .state').textContent === 'unreachable'")
        assert await small.overflow() <= 0
        await small.picture("dead-endpoint-390")


async def test_a_picker_that_is_started_again_is_followed(chromium: Browser, pool: Pool) -> None:
    """While the picker is away the page says so and how old its figures are; then it goes on by itself and
    says that the counters began again."""
    async with viewer(chromium, pool.url()) as seen:
        await seen.live()
        await pool.end_picker()
        await seen.until("document.getElementById('freshness').textContent.startsWith('Connection lost')", 60)
        await seen.picture("picker-away")
        assert await seen.page.locator(".endpoints tbody tr").count() == 4
        await pool.start_picker()
        await seen.until("document.getElementById('freshness').textContent === 'Live'", 60)
        await seen.until("!document.getElementById('notice').hidden")
        assert "The picker was restarted" in await seen.page.locator("#notice").inner_text()
        await seen.until(f"{PICKS} > 0")
        await seen.picture("picker-back")
        # the browser itself reports connections that were refused, and nothing else
        assert [text for text in seen.problems if "ERR_" not in text] == []
