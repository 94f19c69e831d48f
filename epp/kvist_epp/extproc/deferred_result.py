"""A decision that comes later, for a request that waits: a callback instead of a task.

Tens of thousands may wait at once, and a task with its coroutine costs each of them two kilobytes.
"""

import asyncio
from collections.abc import Callable, Generator
from typing import Any

from kvist_epp.errors import PickError
from kvist_epp.extproc.pick_request import Decision, Picked

Tell = Callable[[Decision | Exception], None]
"""Gets the decision, or what went wrong while it was made."""


class Pending:
    """Tells its decision once, unless it is cancelled before. Used on the loop's thread only."""

    __slots__ = ()

    def then(self, tell: Tell) -> None:
        """Have it told, later and never from within this call; to be called once and at once."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Nobody wants the decision any more: nothing will be told. Harmless after it was told."""
        raise NotImplementedError

    def __await__(self) -> Generator[Any, None, Decision]:
        """Wait for it; cancelling the wait cancels the request."""
        future: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()

        def told(decision: Decision | Exception) -> None:
            if future.done():
                return
            if isinstance(decision, (Picked, PickError)):
                future.set_result(decision)
            else:
                future.set_exception(decision)

        self.then(told)
        try:
            return (yield from future)
        finally:
            self.cancel()
