"""``/debug/decisions``: the last decisions, of this replica and the others."""

from collections.abc import Generator, Iterable
from typing import Any, Final
from urllib.parse import quote

from aiohttp import web

from kvist_epp.admin.replica_pages import ReplicaPages
from kvist_epp.admin.slices import run_in_slices
from kvist_epp.director.decision_log import Decision, DecisionLog

DEFAULT_LIMIT: Final = 50
MAX_LIMIT: Final = 200
"""Decisions of one page; a page of so many with 20 endpoints each takes 10 ms to encode."""
MAX_EARLIER: Final = 10
"""Earlier decisions of the same id that are shown with the newest."""
MAX_SHOWN: Final = 80
"""Characters of an id that an error repeats."""


class DecisionPages:
    """The decisions of this replica, with those of the others on request."""

    def __init__(self, log: DecisionLog, replicas: ReplicaPages | None) -> None:
        """``replicas``: None where there are no others."""
        self._log = log
        self._replicas = replicas

    async def latest(self, limit: int, request_id: str = "", *, alone: bool = False) -> dict[str, Any]:
        """Return the last decisions, newest first: all, or those with this request or session id.

        ``alone``: those of this replica only.
        """
        log = self._log
        chosen = log.of_id(request_id)[:limit] if request_id else log.newest(limit)
        decisions, _ = await run_in_slices(_documents(log, chosen))
        document = {"replica": log.replica, "kept": log.kept(), "unreachable": [], "decisions": decisions}
        if alone or self._replicas is None:
            return document
        query = f"limit={limit}" + (f"&id={quote(request_id, safe='')}" if request_id else "")
        pages = await self._replicas.get(f"/debug/decisions?{query}")
        document["unreachable"] = sorted(name for name, page in pages.items() if page is None)
        document["others"] = {name: page["kept"] for name, page in pages.items() if page is not None}
        for page in pages.values():
            if page is not None:
                decisions.extend(page["decisions"])
        decisions.sort(key=lambda decision: -float(decision["at"]))
        del decisions[limit:]
        return document

    async def of_id(self, request_id: str, *, alone: bool = False) -> dict[str, Any]:
        """Return the newest decision with this request or session id, from this replica or else from
        another; ``earlier`` has those before it. Raises HTTPNotFound that says what is kept."""
        page = await self.latest(MAX_EARLIER + 1, request_id, alone=True)
        if not page["decisions"] and not alone and self._replicas is not None:
            page = await self.latest(MAX_EARLIER + 1, request_id)
        if not page["decisions"]:
            raise web.HTTPNotFound(reason=_missing(request_id, page))
        newest, *earlier = page["decisions"]
        return {**newest, "earlier": earlier}


def _documents(
    log: DecisionLog, decisions: Iterable[Decision]
) -> Generator[None, None, list[dict[str, Any]]]:
    found = []
    for decision in decisions:
        found.append(log.document(decision))
        yield
    return found


def _missing(request_id: str, page: dict[str, Any]) -> str:
    """Return why a decision is not found; without line breaks, as it becomes a reason phrase."""
    shown = "".join(c if c.isprintable() else "?" for c in request_id[:MAX_SHOWN])
    others = len(page.get("others") or ())
    where = f" and of {others} other replica{'s' if others > 1 else ''}" if others else ""
    silent = f"; no answer from {', '.join(page['unreachable'])}" if page["unreachable"] else ""
    return (
        f"no decision on {shown} is among the last {page['kept']['limit']:,} of this replica{where} "
        f"(--decision-log){silent}"
    )
