"""Load the model's tokenizer and templates and activate them, at startup or while requests are served.

If the Hugging Face hub does not deliver the files, the picker serves in approximate mode and keeps retrying
with growing pauses: a picker that exits would be restarted again and again and serve no request, while one
in approximate mode only routes less well. ``--model-required`` chooses the exit. A local folder with a fault
does not repair itself, so that is an error at once.
"""

import asyncio
import gc
import json
import logging
import random
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from threading import Thread
from typing import Final

from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.errors import ModelFilesError, SettingsError
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.kvevents.observation import Observation
from kvist_epp.kvevents.subscriber import Subscriber
from kvist_epp.prompt.chat_rules import ChatRules
from kvist_epp.prompt.model import Chats, Model
from kvist_epp.prompt.model_files import HUB
from kvist_epp.settings.settings import Settings

logger = logging.getLogger(__name__)

INITIAL_WAIT_SECONDS: Final = 30.0
"""Time to wait for the first download before ports open; the download goes on in the background."""
FIRST_PAUSE: Final = 5.0
LONGEST_PAUSE: Final = 300.0
"""First and longest pause between two attempts, in seconds; the pause doubles after each attempt."""

Load = Callable[[str, Chats], Model]


class ModelLoader:
    """Loads the model once before ports open (``load_initial``) and retries in the background (``run``)."""

    def __init__(
        self, settings: Settings, load: Load = Model.load, wait_seconds: float = INITIAL_WAIT_SECONDS
    ) -> None:
        self.failures = 0
        self.problem = ""
        """Why the model is not loaded; empty if it is loaded, or if none is configured."""
        self._source = settings.model if settings.prefix_matching else ""
        self._by_load = not settings.prefix_matching
        self._required = settings.model_required or not settings.model.startswith(HUB)
        self._chats = chats_of(settings)
        self._load: Callable[[str], Model] = lambda source: load(source, self._chats)
        self._wait_seconds = wait_seconds
        self._attempt: Future[Model] | None = None

    def load_initial(self) -> Model | None:
        """Return the model, or None for approximate mode, for now or for good.

        Blocks for ``wait_seconds`` at most, or without a limit if the model is required; a signal still ends
        the process.

        Raises:
            ModelFilesError: the model is required and cannot be loaded.
        """
        if self._by_load:
            logger.info("the picker routes by load alone (--prefix-matching=false)")
            return None
        if not self._source:
            logger.warning(
                "--model is not set: the picker runs in approximate mode, which uses the routing history only"
            )
            return None
        self._chats.templates()  # a template file of this machine is readable now or never
        if self._required:
            return _log_limits(self._load(self._source))
        self._attempt = _load_in_thread(self._load, self._source)
        try:
            return self._on_loaded(self._attempt.result(self._wait_seconds))
        except TimeoutError:
            self.problem = f"{self._source} was not loaded within {self._wait_seconds:g} s"
        except ModelFilesError as error:
            self._on_failed(error)
        logger.warning("the picker runs in approximate mode until the tokenizer is loaded: %s", self.problem)
        return None

    async def run(self, activate: Callable[[Model], None]) -> None:
        """Retry until the model is loaded, call ``activate`` once, then wait until cancelled."""
        pause = FIRST_PAUSE
        while self.problem:
            if self._attempt is None:
                logger.info("the picker tries to load the tokenizer again in %.0f s", pause)
                await asyncio.sleep(pause * random.uniform(0.9, 1.1))
                pause = min(2 * pause, LONGEST_PAUSE)
                self._attempt = _load_in_thread(self._load, self._source)
            if (model := await self._finish(self._attempt)) is not None:
                activate(model)
        await asyncio.Event().wait()

    async def _finish(self, attempt: Future[Model]) -> Model | None:
        try:
            return self._on_loaded(await asyncio.wrap_future(attempt))
        except ModelFilesError as error:
            self._on_failed(error)
        except Exception as error:  # an unexpected file content is no reason to stop serving
            logger.exception("the tokenizer cannot be loaded")
            self._on_failed(error)
        logger.warning("the picker is still in approximate mode: %s", self.problem)
        return None

    def _on_loaded(self, model: Model) -> Model:
        self._attempt, self.problem = None, ""
        return _log_limits(model)

    def _on_failed(self, error: Exception) -> None:
        self._attempt = None
        self.failures += 1
        self.problem = str(error) if isinstance(error, ModelFilesError) else type(error).__name__


@dataclass(frozen=True, slots=True)
class ModelActivator:
    """Puts a loaded model into use; ports and tasks that it opens are closed with ``stack``."""

    settings: Settings
    registry: EndpointRegistry
    stack: AsyncExitStack

    def activate(self, model: Model) -> None:
        """Render prompts with this model and, if its tokens map to bytes exactly, follow the KV events.

        Raises SettingsError if the address for KV events cannot be bound.
        """
        registry, director, clock = self.registry, self.registry.director, self.registry.clock
        ingestor = subscriber = None
        if self.settings.kv_events and model.faithful:
            ingestor = Ingestor(
                director.index,
                model,
                lease_seconds=self.settings.storage_lease,
                on_prefill_started=lambda publisher, endpoint, session: director.progress.on_prefill_started(
                    publisher, endpoint, session, clock()
                ),
            )
            subscriber = self._subscriber(ingestor)
            self.stack.push_async_callback(subscriber.close)
        registry.activate(model, ingestor, subscriber)

    def activate_while_serving(self, model: Model) -> None:
        """Activate a model that was loaded after startup, and exclude it from garbage collection."""
        self.activate(model)
        gc.freeze()

    def _subscriber(self, ingestor: Ingestor) -> Subscriber:
        director, clock, bind = self.registry.director, self.registry.clock, self.settings.kv_events_bind

        def observe(seen: Observation) -> None:
            director.progress.on_observation(seen, clock())

        try:
            return Subscriber(ingestor, observe=observe, bind=bind or None)
        except (OSError, ValueError) as error:
            raise SettingsError(f"--kv-events-bind: cannot bind {bind}: {error}") from error


def chats_of(settings: Settings) -> Chats:
    """Return the chat settings of the engines, as the flags give them."""
    content_format = settings.chat_template_content_format
    return Chats(
        settings.chat_template,
        None if content_format == "auto" else "openai" if content_format == "openai" else "string",
        json.loads(settings.default_chat_template_kwargs or "{}"),
        settings.tokenizer_mode,
        ChatRules(
            hide_unwanted_tools=settings.exclude_tools_when_tool_choice_none,
            efforts=json.loads(settings.reasoning_effort_map or "{}"),
            thinking_off=settings.anthropic_disabled_thinking_effort,
        ),
    )


def _load_in_thread(load: Callable[[str], Model], source: str) -> Future[Model]:
    """Load in a daemon thread, so that the process can end while the hub takes minutes to time out."""
    found: Future[Model] = Future()
    found.set_running_or_notify_cancel()

    def work() -> None:
        try:
            model = load(source)
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            found.set_exception(error)
        else:
            found.set_result(model)

    Thread(target=work, name="tokenizer", daemon=True).start()
    return found


def _log_limits(model: Model) -> Model:
    """Say what the picker cannot do for a model."""
    if model.why_no_chats:
        logger.warning(
            "chats of %s are matched by their plain text, in approximate mode: %s",
            model.name,
            model.why_no_chats,
        )
    if not model.faithful:
        logger.warning(
            "the picker runs in approximate mode, because the tokens of %s do not decode to exact bytes: %s",
            model.name,
            model.why_not,
        )
    elif model.chunks is None:
        logger.info(
            "each block that engines generate costs three times as much CPU: it is not known where the "
            "tokenizer of %s cuts texts",
            model.name,
        )
    return model
