"""Warm hand-over put into a picker."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvist_epp.director.director import Picker
from kvist_epp.director.endpoint_registry import Membership
from kvist_epp.load.in_flight import Flight
from kvist_epp.prefix_stats.hot_prefixes import Hot
from kvist_epp.prewarm.keeper import Keeper
from kvist_epp.prewarm.plan import HandOver, Step, Terms
from kvist_epp.prewarm.sender import Sender
from kvist_epp.settings.settings import Settings


@asynccontextmanager
async def opened(settings: Settings, membership: Membership) -> AsyncIterator[Keeper]:
    """Hooked into the picker; the caller runs it."""
    picker, hot = membership.picker, Hot()
    start = random.random() if settings.peers else 0.0
    terms = Terms(tokens=settings.hand_over_tokens, step_tokens=settings.hand_over_step_tokens)
    plan = HandOver(picker, hot, terms, name=f"{picker.replica}.hand-over", start=start)
    plan.cache = lambda key: cache_of(membership, key)
    picker.hot = hot
    picker.metrics.gauges.prewarm = lambda: plan.given
    membership.going = lambda keys: plan.going(keys, picker.clock())
    last = settings.scheduling_policy == "priority"
    async with Sender(key_file=settings.engine_key_file, last=last) as sender:
        yield Keeper(
            plan,
            sender,
            clock=picker.clock,
            model=lambda key: model_of(membership, key),
            begun=lambda step: begun(picker, step),
            ended=lambda step: ended(picker, step),
        )


def model_of(membership: Membership, key: str) -> str | None:
    """A name of the base model that this endpoint serves; None: it has not said."""
    state = membership.scraper.states.get(key)
    return min(state.served.models, default=None) if state is not None else None


def cache_of(membership: Membership, key: str) -> int | None:
    """Tokens that this endpoint's cache holds; None: it has not said."""
    state = membership.scraper.states.get(key)
    return state.sample.cache_tokens if state is not None else None


def begun(picker: Picker, step: Step) -> None:
    """Its engine's events will tell of it, and its counters count it."""
    flight = Flight(
        step.session,
        step.endpoint.key,
        picker.clock(),
        tokens=step.tokens,
        indexed=step.held,
        told=True,
        hostport=step.endpoint.hostport,
        request_id=step.session,
    )
    picker.flights.departed(flight)
    picker.departed(flight)


def ended(picker: Picker, step: Step) -> None:
    """No event will be of use any more."""
    picker.flights.landed(step.session)
