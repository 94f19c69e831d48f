"""From when on prompts are understood and events learned: at the start, or when the tokenizer comes later."""

import gc
from contextlib import AsyncExitStack
from dataclasses import dataclass

from kvist_epp.director.endpoint_registry import Membership
from kvist_epp.errors import SettingsError
from kvist_epp.kvevents.ingestion import Learner
from kvist_epp.kvevents.subscriber import Subscriber
from kvist_epp.prompt.model import Model
from kvist_epp.settings.settings import Settings


@dataclass(frozen=True, slots=True)
class Understanding:
    """What a model brings with it; it is closed with ``stack``."""

    settings: Settings
    membership: Membership
    stack: AsyncExitStack

    def begin(self, model: Model) -> None:
        """Prompts are rendered by this model; where its bytes are faithful, engines' events are followed.

        Raises SettingsError: the address for events cannot be had.
        """
        membership, picker = self.membership, self.membership.picker
        picker.model = model
        learner = subscriber = None
        if self.settings.kv_events and model.faithful:
            learner = Learner(picker.index, model)
            subscriber = self._subscriber(learner)
            self.stack.push_async_callback(subscriber.close)
            picker.expect = learner.expect
            learner.begins = picker.begins
        membership.understand(learner, subscriber)

    def late(self, model: Model) -> None:
        """The same while requests are served."""
        self.begin(model)
        gc.freeze()

    def _subscriber(self, learner: Learner) -> Subscriber:
        bind, observe = self.settings.kv_events_bind, self.membership.picker.observed
        try:
            return Subscriber(learner, observe=observe, bind=bind or None)
        except (OSError, ValueError) as error:
            raise SettingsError(f"--kv-events-bind: cannot bind {bind}: {error}") from error
