"""The live page of a hundred endpoints, and of two replicas."""

import json
import signal
from pathlib import Path

import pytest
from tests.browser.many_engines import FULL, many_engines
from tests.browser.pool import busy_pool
from tests.browser.viewer import NARROW, browser, viewer

from kvist_sim.launch import HOST, picker_ports, start_picker
from kvist_sim.processes import Children

pytestmark = pytest.mark.timeout(300)

DEAD = (5, 60, 99)
VISIBLE = "[...document.querySelectorAll('.endpoints tbody tr')].filter(row => !row.hidden)"


async def test_a_hundred_endpoints_remain_usable(tmp_path: Path) -> None:
    """The worst come first; find, filter and order narrow the table down, also on a phone; and the page stays
    sound."""
    async with many_engines(100, DEAD) as fleet, Children(tmp_path) as children, browser() as chromium:
        file = tmp_path / "hundred.json"
        file.write_text(json.dumps(fleet))
        picker = await start_picker(
            children, file, "", arguments=["--kv-events=false", "--scrape-interval=2"], ports=picker_ports()
        )
        url = f"http://{HOST}:{picker.metrics_port}/"
        async with viewer(chromium, url) as seen:
            await seen.live()
            await seen.until(f"{VISIBLE}.length === 100")
            await seen.until("document.querySelectorAll('.endpoints .state.down').length === 3", 90)
            states = await seen.states()
            assert states[:4] == ["unreachable"] * 3 + ["full"]
            names = await seen.page.locator(".endpoints tbody th").all_inner_texts()
            assert [name.split()[0] for name in names[:6]] == [
                *(f"serving/qwen-{number}" for number in (*DEAD, FULL)),
                "serving/qwen-0",
                "serving/qwen-1",
            ]
            assert "4 of 100 endpoints" in await seen.page.locator("#health").inner_text()
            await seen.page.locator("#show").select_option("attention")
            assert await seen.page.evaluate(f"{VISIBLE}.length") == 4
            await seen.page.locator("#show").select_option("")
            await seen.page.locator("#order").select_option("load")
            assert "qwen-17" in await seen.page.locator(".endpoints tbody tr").first.inner_text()
            await seen.page.locator("#find").fill("qwen-4")
            assert await seen.page.evaluate(f"{VISIBLE}.length") == 11
            assert await seen.page.locator("#shown").inner_text() == "11 of 100"
            await seen.page.locator("#find").fill("")
            await seen.page.locator("#order").select_option("")
            assert await seen.accessibility() == []
            assert await seen.overflow() <= 0
            assert seen.problems == []
            await seen.picture("hundred-1440")
        async with viewer(chromium, url, size=NARROW, theme="dark") as small:
            await small.live()
            assert await small.overflow() <= 0
            assert await small.accessibility() == []
            await small.page.locator("#show").select_option("attention")
            assert await small.page.evaluate(f"{VISIBLE}.length") == 4
            assert small.problems == []
            await small.picture("hundred-390")


async def test_all_replicas_are_on_the_page_of_each(tmp_path: Path) -> None:
    """Each replica shows the numbers of both and their sum; one that has ended is shown as silent, or is
    gone."""
    async with busy_pool(tmp_path, engines=2, pickers=2, rate=8.0) as pool, browser() as chromium:
        rows = "document.querySelectorAll('#summary tbody tr').length"
        async with viewer(chromium, pool.url(0)) as seen, viewer(chromium, pool.url(1), size=NARROW) as other:
            for one in (seen, other):
                await one.live()
                await one.until(f"{rows} === 2", 60)
                assert await one.overflow() <= 0
            document = await pool.document()
            each = [one["requests_per_second"] for one in document["replicas"]]
            assert len(each) == 2
            assert abs(sum(each) - document["traffic"]["requests_per_second"]) < 0.01
            assert await seen.accessibility() == []
            await seen.picture("replicas-1440")
            await other.picture("replicas-390")
            await pool.children.end(pool.pickers.pop(1).child, signal.SIGKILL, 10)
            await seen.until("document.querySelector('#summary').textContent.includes('does not answer')", 60)
            assert "1 replica silent" in await seen.page.locator("#health").inner_text()
            assert seen.problems == []
            await seen.picture("replica-silent")
