"""What the picker makes of a request before it chooses: its prompt's bytes, and who holds how much of them.

The parsed body is let go again: a request that waits keeps its prompt, and is matched anew when its turn
comes.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from kvist_epp.extproc.pick_request import PickRequest
from kvist_epp.index.byte_index import Root
from kvist_epp.index.lookup import Found, Holding, Lookup
from kvist_epp.prefix_stats.recent_uses import Uses
from kvist_epp.prompt.model import Model
from kvist_epp.prompt.request import Kind, Request, parse
from kvist_epp.scheduling.pick import Demand
from kvist_epp.telemetry.histogram import Stages

_NO_REQUEST: Final = Request(kind=Kind.OTHER)
_NOBODY: Final[dict[str, Holding]] = {}


class Thought(msgspec.Struct):
    """One request as the picker understands it."""

    kind: str
    model: str | None
    """The served model or adapter it names."""
    session: str | None
    """The id that its body names."""
    prompts: Sequence[bytes]
    root: Root
    found: Found
    mode: str
    """``precise``, ``approximate`` or ``load``: what the choice rests on."""

    def demand(self, uses: Uses, now: float) -> Demand:
        """As the policy sees it."""
        return Demand(self.found.tokens, self.found.hits, uses.lately(self.found.place, now))

    @property
    def prompt_bytes(self) -> int:
        """Of all its prompts; 0 where none is understood."""
        return self.found.size if self.prompts else 0

    def pause(self) -> None:
        """It waits: who holds what will have changed."""
        self.found.hits, self.found.matches = _NOBODY, ()

    def resume(self, lookup: Lookup) -> None:
        """Its turn: who holds what now?"""
        if self.prompts:
            self.found = lookup.look(self.root, self.prompts)


class Means(Protocol):
    """What it takes to understand a request."""

    model: Model | None
    lookup: Lookup
    adapters: frozenset[str]


def think(
    ask: PickRequest, stages: Stages, means: Means, failed: Callable[[str], None], *, learn: bool = True
) -> Thought:
    """Parse, render, match. ``failed`` is told why a prompt could not be rendered. Raises ``BadRequest``.

    ``learn``: estimates may follow what is matched.
    """
    request = _NO_REQUEST if ask.partial else parse(ask.path, ask.body, method=ask.method)
    stages.mark("parse")
    prompts = _prompts(request, ask.body, means.model, failed)
    stages.mark("render")
    adapter = request.model if request.model in means.adapters else None
    root = (adapter, request.salt)
    if prompts:
        found, mode = means.lookup.look(root, prompts, learn=learn), _mode(request, means.model)
    else:
        size = len(ask.body)
        found, mode = Found(size, means.lookup.tokens(size), {}), "load"
    stages.mark("match")
    return Thought(request.kind.value, request.model, request.session, prompts, root, found, mode)


def _prompts(
    request: Request, body: bytes, model: Model | None, failed: Callable[[str], None]
) -> Sequence[bytes]:
    if request.kind is Kind.OTHER:
        return ()
    if model is None:
        return (_bare(body),)
    return model.prompts(request, failed)


def _mode(request: Request, model: Model | None) -> str:
    faithful = model is not None and model.faithful
    return "precise" if faithful and request.exact else "approximate"


def _bare(body: bytes) -> bytes:
    """Without a template: the body from its messages or prompt on, so that what clients vary comes later."""
    starts = [at for name in (b'"messages"', b'"prompt"', b'"input"') if (at := body.find(name)) >= 0]
    return body[min(starts) :] if starts else body
