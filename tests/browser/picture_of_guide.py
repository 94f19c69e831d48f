"""``python -m tests.browser.picture_of_guide``: takes the picture of the live page in its guide.

The pool is under load. Run it after a change of the look of the page, and look at the picture.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.browser.pool import busy_pool
from tests.browser.viewer import browser, viewer

FILE: Final = Path(__file__).parents[2] / "docs" / "pictures" / "live-page.png"
SIZE: Final = (1440, 1130)
ENGINES: Final = 6
RATE: Final = 30.0
"""Requests per second."""
SECONDS: Final = 90.0
"""Time until the lines of the tiles have a shape."""


async def main() -> None:
    """Start the pool, wait, and save what the window shows."""
    with TemporaryDirectory(prefix="kvist-picture-") as folder:
        pool = busy_pool(Path(folder), engines=ENGINES, rate=RATE, arguments=("--gpu-hour-price=3",))
        async with pool as running, browser() as chromium:
            await asyncio.sleep(SECONDS)
            async with viewer(chromium, running.url(), size=SIZE) as seen:
                await seen.live()
                await seen.until("document.querySelectorAll('.picks tbody tr').length > 2")
                await asyncio.sleep(2)
                await seen.page.screenshot(path=FILE)


if __name__ == "__main__":
    asyncio.run(main())
