"""The model's tokenizer where it comes from the hub: if it does not come, requests are served all the same.

A picker that ends because the hub is away is started again and again, and nobody is served; one in
approximate mode routes a little worse. So it goes on asking, with growing pauses, and whoever wants it
otherwise says so (``--model-required``). What is wrong with a folder does not mend itself: that is an error
at once.
"""

import asyncio
import json
import logging
import random
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Final

from kvist_epp.errors import ModelFilesError
from kvist_epp.prompt.model import Chats, Model
from kvist_epp.prompt.source import HUB
from kvist_epp.settings.settings import Settings

logger = logging.getLogger(__name__)

PATIENCE_SECONDS: Final = 30.0
"""The first answer is waited for so long; then ports open, and it may still come."""
FIRST_PAUSE: Final = 5.0
LONGEST_PAUSE: Final = 300.0

Load = Callable[[str, Chats], Model]


class Tokenizer:
    """Asked for once before anything else runs (``first``), then in the background (``run``)."""

    def __init__(
        self, settings: Settings, load: Load = Model.load, patience: float = PATIENCE_SECONDS
    ) -> None:
        self.failures = 0
        self.problem = ""
        """Why it is not there; empty when it is, or when nobody wants one."""
        self._source = settings.model
        self._required = settings.model_required or not settings.model.startswith(HUB)
        self._chats = chats_of(settings)
        self._load: Callable[[str], Model] = lambda source: load(source, self._chats)
        self._patience = patience
        self._attempt: Future[Model] | None = None

    def first(self) -> Model | None:
        """The model, or None: approximate mode, for now or for good. Blocks, while a signal still ends the
        process.

        Raises:
            ModelFilesError: it must be there and is not.
        """
        if not self._source:
            logger.warning("no --model: approximate mode, from the routing history alone")
            return None
        self._chats.templates()  # a file of this machine is there, or never will be
        if self._required:
            return _told(self._load(self._source))
        self._attempt = _begun(self._load, self._source)
        try:
            return self._done(self._attempt.result(self._patience))
        except TimeoutError:
            self.problem = f"{self._source} has not come within {self._patience:g} s"
        except ModelFilesError as error:
            self._failed(error)
        logger.warning("approximate mode until the tokenizer is there: %s", self.problem)
        return None

    async def run(self, came: Callable[[Model], None]) -> None:
        """Asks until it is there, then calls ``came`` once; waits for ever."""
        pause = FIRST_PAUSE
        while self.problem:
            if self._attempt is None:
                logger.info("asking for the tokenizer again in %.0f s", pause)
                await asyncio.sleep(pause * random.uniform(0.9, 1.1))
                pause = min(2 * pause, LONGEST_PAUSE)
                self._attempt = _begun(self._load, self._source)
            if (found := await self._settled(self._attempt)) is not None:
                came(found)
        await asyncio.Event().wait()

    async def _settled(self, attempt: Future[Model]) -> Model | None:
        try:
            return self._done(await asyncio.wrap_future(attempt))
        except ModelFilesError as error:
            self._failed(error)
        except Exception as error:  # a file that surprises us is no reason to stop serving
            logger.exception("the tokenizer cannot be read")
            self._failed(error)
        logger.warning("approximate mode, still: %s", self.problem)
        return None

    def _done(self, model: Model) -> Model:
        self._attempt, self.problem = None, ""
        return _told(model)

    def _failed(self, error: Exception) -> None:
        self._attempt = None
        self.failures += 1
        self.problem = str(error) if isinstance(error, ModelFilesError) else type(error).__name__


def chats_of(settings: Settings) -> Chats:
    """What the engines were told of their chats."""
    style = settings.chat_template_content_format
    return Chats(
        settings.chat_template,
        None if style == "auto" else "openai" if style == "openai" else "string",
        json.loads(settings.default_chat_template_kwargs or "{}"),
    )


def _begun(load: Callable[[str], Model], source: str) -> Future[Model]:
    """Loads in a thread that nobody waits for at the end: the hub may take minutes to time out."""
    found: Future[Model] = Future()
    found.set_running_or_notify_cancel()

    def work() -> None:
        try:
            model = load(source)
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            found.set_exception(error)
        else:
            found.set_result(model)

    Thread(target=work, name="tokenizer", daemon=True).start()
    return found


def _told(model: Model) -> Model:
    if not model.faithful:
        logger.warning("%s: approximate mode, its bytes are not faithful: %s", model.name, model.why_not)
    return model
