"""Names the data-parallel ranks behind the ports of the endpoints that were picked for a request. Pure.

Endpoints are picked by the rank that holds most of a prompt; which of them computes it is decided for the
picked ones alone (``scheduling.rank_choice``).
"""

from typing import TYPE_CHECKING

import msgspec

from kvist_epp.director.request_context import RequestContext
from kvist_epp.index.cached_part import CachedPart
from kvist_epp.names import DATA_PARALLEL_RANK_HEADER
from kvist_epp.scheduling.candidate_table import PickedEndpoints
from kvist_epp.scheduling.pick import ScoredEndpoint
from kvist_epp.scheduling.rank_choice import choose_rank

if TYPE_CHECKING:
    from kvist_epp.director.director import Director


def name_ranks(
    director: "Director", context: RequestContext, picked: PickedEndpoints, now: float
) -> PickedEndpoints:
    """Store the ranks of the picked endpoints in the context; return the pick with what these have cached.

    A rank that the client names is left as it is. The match has what the ranks hold afterwards, too.
    """
    if DATA_PARALLEL_RANK_HEADER in context.kept_headers:
        return picked
    rows = (picked.best,) if picked.split is None else (picked.split.prefill, picked.split.decode)
    named = [_with_rank(director, context, row, now) for row in rows]
    context.ranks = {row.endpoint.key: rank for row, rank in named}
    return picked.moved(named[0][0]) if picked.split is None else picked


def _with_rank(
    director: "Director", context: RequestContext, row: ScoredEndpoint, now: float
) -> tuple[ScoredEndpoint, int | None]:
    """Return the rank to name at an endpoint, and the endpoint with what that has cached."""
    key, found, lookup = row.endpoint.key, context.match.found, director.lookup
    member, holding = lookup.members.get(key), found.hits.get(key)
    if member is None or holding is None or holding.rank is None:
        return row, None
    if len(found.matches) != 1:  # of several prompts, ranks may hold some each
        return row, holding.rank
    [matches] = found.matches
    held = [lookup.usable(key, matches, matches.of(publisher)) for publisher in member.publishers]
    load, uses = director.tracker.load(key), director.recent_uses.decayed_count(found.place, now)
    # of the requests with this prefix, as many as come to one of the endpoints that hold it
    rank = choose_rank(held, load, found.tokens, uses / len(found.hits), director.policy)
    if rank is None or (less := held[holding.rank].tokens - held[rank].tokens) <= 0:
        return row, rank
    mine, indexed = held[rank], max(0, holding.indexed - less)
    found.hits[key] = CachedPart(max(0, holding.tokens - less), mine.bytes, mine.lower, indexed, rank)
    used = msgspec.structs.replace(
        row,
        matched_tokens=max(0, row.matched_tokens - less),
        matched_bytes=mine.bytes,
        uncached_tokens=min(row.uncached_tokens + less, found.tokens),
        predicted_ttft_seconds=row.predicted_ttft_seconds + less / load.rate,
    )
    return used, rank
