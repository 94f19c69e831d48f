"""From when on prompts are understood and events learned: at the start, or when the tokenizer comes later."""

import gc
from contextlib import AsyncExitStack
from dataclasses import dataclass

from kvist_epp.director.endpoint_registry import EndpointRegistry
from kvist_epp.errors import SettingsError
from kvist_epp.kvevents.ingestion import Learner
from kvist_epp.kvevents.observed import Observed
from kvist_epp.kvevents.subscriber import Subscriber
from kvist_epp.prompt.model import Model
from kvist_epp.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class Understanding:
    """What a model brings with it; it is closed with ``stack``."""

    settings: Settings
    registry: EndpointRegistry
    stack: AsyncExitStack

    def begin(self, model: Model) -> None:
        """Render prompts by this model; where its bytes are faithful, follow the engines' events.

        Raises SettingsError: the address for events cannot be had.
        """
        registry, director, clock = self.registry, self.registry.director, self.registry.clock
        learner = subscriber = None
        if self.settings.kv_events and model.faithful:
            learner = Learner(director.index, model)
            learner.begins = lambda source, endpoint, session: director.progress.on_prefill_started(
                source, endpoint, session, clock()
            )
            subscriber = self._subscriber(learner)
            self.stack.push_async_callback(subscriber.close)
        registry.activate(model, learner, subscriber)

    def late(self, model: Model) -> None:
        """Do the same while requests are served."""
        self.begin(model)
        gc.freeze()

    def _subscriber(self, learner: Learner) -> Subscriber:
        director, clock, bind = self.registry.director, self.registry.clock, self.settings.kv_events_bind

        def observe(seen: Observed) -> None:
            director.progress.on_observation(seen, clock())

        try:
            return Subscriber(learner, observe=observe, bind=bind or None)
        except (OSError, ValueError) as error:
            raise SettingsError(f"--kv-events-bind: cannot bind {bind}: {error}") from error
