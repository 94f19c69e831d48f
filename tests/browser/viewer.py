"""A real Chromium that looks at the live page, and notes everything that its console reports."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright
from tests.browser.binaries import axe, chromium

WIDE: Final = (1440, 900)
NARROW: Final = (390, 844)
SCREENSHOTS: Final = Path(__file__).parents[2] / "build" / "screenshots"
RULES: Final = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
Theme = Literal["light", "dark"]


@dataclass
class Viewer:
    """One open page."""

    page: Page
    problems: list[str] = field(default_factory=list)
    """Errors and warnings of the console, broken rules of the content security policy among them."""

    async def figure(self, title: str) -> str:
        """Return the figure of a tile."""
        tile = self.page.locator(".tile", has_text=title)
        shown: str = await tile.locator(".figure").inner_text()
        return shown.strip()

    async def until(self, condition: str, seconds: float = 45.0) -> None:
        """Wait until a JavaScript expression is true on the page.

        Asked from outside, because the page's policy forbids what ``wait_for_function`` does in it.
        """
        try:
            async with asyncio.timeout(seconds):
                while not await self.page.evaluate(condition):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"not so after {seconds:g} s: {condition}") from None

    async def live(self) -> None:
        """Wait until the page has the server's stream."""
        await self.until("document.getElementById('freshness').textContent === 'Live'")

    async def states(self) -> list[str]:
        """Return the states of the endpoints in the order of the table."""
        found: list[str] = await self.page.locator(".endpoints tbody .state").all_inner_texts()
        return found

    async def overflow(self) -> int:
        """Return the pixels by which the page is wider than its window."""
        found: int = await self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        return found

    async def accessibility(self) -> list[str]:
        """Return each rule of axe-core that the page breaks, with its first elements; contrast is one."""
        await self.page.evaluate(axe().read_text())
        options = json.dumps({"runOnly": list(RULES)})
        found = await self.page.evaluate(f"axe.run(document, {options})")
        return [
            f"{one['id']}: {one['help']}: {[node['html'][:200] for node in one['nodes'][:3]]}"
            for one in found["violations"]
        ]

    async def picture(self, name: str) -> None:
        """Save a screenshot of the whole page."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        await self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Yield a headless Chromium. Raises BrowserError if there is none."""
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=chromium())
        yield running
        await running.close()


@asynccontextmanager
async def viewer(
    running: Browser,
    url: str,
    *,
    size: Sequence[int] = WIDE,
    theme: Theme = "light",
    scripts: bool = True,
) -> AsyncIterator[Viewer]:
    """Yield a page of a browser profile of its own at ``url``."""
    context = await running.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme=theme,
        java_script_enabled=scripts,
        reduced_motion="reduce",
    )
    page = await context.new_page()
    found = Viewer(page)

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            found.problems.append(f"{message.type}: {message.text}")

    def on_error(error: Any) -> None:
        found.problems.append(f"uncaught: {error}")

    page.on("console", on_console)
    page.on("pageerror", on_error)
    await page.goto(url)
    yield found
    await context.close()
