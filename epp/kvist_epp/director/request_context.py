"""One request from its question to its answer, at once or after it has waited."""

from typing import Final, Protocol, Self

import msgspec

from kvist_epp.director.prompt_match import Thought
from kvist_epp.errors import NoEndpoints, PickError
from kvist_epp.extproc.pick_request import Decision, PickRequest
from kvist_epp.flowcontrol.deficit_round_robin import Spot
from kvist_epp.flowcontrol.priorities import tenant
from kvist_epp.index.lookup import Found
from kvist_epp.names import DATA_PARALLEL_RANK_HEADER, REQUEST_ID_HEADER, SESSION_HEADER
from kvist_epp.scheduling.pick import canonical, members
from kvist_epp.telemetry.histogram import Stages
from kvist_epp.telemetry.request_log import RequestLine

HELD_BYTES: Final = 4_000
"""What a waiting request takes besides its body and its prompt (3,300 bytes in ``kvist bench queue``)."""

_NOTHING: Final = Thought("other", None, None, (), (None, None), Found(0, 0, {}), "")
"""Understood of a request so far."""


class Owner(Protocol):
    """The picker, as a request that has waited sees it."""

    def resumed(self, asked: "Asked") -> Decision | Spot:
        """Its turn has come; or where else it has to wait."""

    def refused(self, asked: "Asked", error: PickError) -> None:
        """It is not picked."""


class Asked(msgspec.Struct):
    """One request; the ``Errand`` of one that has to wait."""

    owner: Owner
    own: str
    """The id that is ours alone."""
    tenant: str
    """Whose it is; empty: nobody says."""
    subset: tuple[str, ...] | None
    line: RequestLine
    stages: Stages
    kept: tuple[str, ...]
    """Which of the headers that we would set it brought."""
    patient: bool
    """It may wait: it has a body, so it wants something computed."""
    thought: Thought
    priority: int | None = None
    """None: the request names none."""

    @classmethod
    def of(cls, owner: Owner, ask: PickRequest, own: str) -> Self:
        """Not understood yet."""
        headers = ask.headers
        line = RequestLine(
            id=headers.get(REQUEST_ID_HEADER) or own,
            session=headers.get(SESSION_HEADER, ""),
            path=ask.path,
            kind=_NOTHING.kind,
            outcome="picked",
        )
        kept = tuple([name for name in (REQUEST_ID_HEADER, DATA_PARALLEL_RANK_HEADER) if name in headers])
        patient = ask.partial or len(ask.body) > 0
        return cls(owner, own, tenant(headers), ask.subset, line, Stages(), kept, patient, _NOTHING)

    def understood(self, thought: Thought, priority: int | None) -> None:
        """What it says."""
        self.thought, self.priority = thought, priority
        line = self.line
        if theirs := line.session or thought.session:
            self.kept += (SESSION_HEADER,)
        line.session = theirs or self.own
        line.kind, line.model, line.mode = thought.kind, thought.model, thought.mode
        line.priority = priority or 0

    def narrow(self, hostports: tuple[str, ...]) -> None:
        """Only these endpoints serve its model. Raises ``NoEndpoints``: the gateway allows none of them."""
        allowed = None if self.subset is None else canonical(self.subset)
        self.subset = hostports if allowed is None else tuple(members(allowed, hostports))
        if not self.subset:
            raise NoEndpoints("no endpoint in the gateway's subset serves this model")

    def spot(self) -> Spot:
        """Where it waits for whatever endpoint has room."""
        return Spot(None if self.subset is None else canonical(self.subset))

    def cost(self, ask: PickRequest) -> tuple[int, int]:
        """Tokens and bytes while it waits."""
        thought = self.thought
        return thought.found.tokens, HELD_BYTES + len(ask.body) + sum(map(len, thought.prompts))

    def go(self, waited: float) -> Decision | Spot:
        """Its turn has come."""
        self.line.waited_ms = round(waited * 1000, 3)
        return self.owner.resumed(self)

    def refused(self, error: PickError, waited: float) -> None:
        """It has waited in vain."""
        self.line.waited_ms = round(waited * 1000, 3)
        self.owner.refused(self, error)
