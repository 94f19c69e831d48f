"""The data-parallel rank behind an endpoint's port to which a request goes, by the cost of each. Pure.

Each rank has a KV cache and a batch of its own. A request that names no rank goes to the one with the fewest
requests, whatever that has cached; one that always names the rank with the longest match would leave the
others idle, since the system prompt that all requests begin with is on one of them first. So ranks are
compared as endpoints are: by what they have cached and by what they have to do.
"""

from collections.abc import Sequence

from kvist_epp.load.endpoint_load import EndpointLoad
from kvist_epp.scheduling.cost import (
    DEFAULT,
    CachedPrefix,
    EndpointCost,
    Policy,
    terms,
    uncached_tokens,
)


def choose_rank(
    held: Sequence[CachedPrefix], load: EndpointLoad, tokens: int, uses: float, policy: Policy = DEFAULT
) -> int | None:
    """Return the rank with the least cost; None: all hold the same, and the engine knows best.

    ``held``: what each rank holds of a prompt of ``tokens``; ``uses``: how often its prefix was asked for
    here in the last moments. Requests whose rank is not known count for all ranks alike.
    """
    if len({hit.tokens for hit in held}) == 1:
        return None
    ranks = len(held)
    running, backlog = [0] * ranks, [0.0] * ranks
    for attempt in load.attempts:
        if (at := attempt.rank) is not None and at < ranks:
            running[at] += 1
            backlog[at] += attempt.backlog
    others = max(0, load.running - sum(running)) // ranks
    slots = None if load.slots is None else max(1, load.slots // ranks)
    rows = []
    for hit, number, left in zip(held, running, backlog, strict=True):
        rank = EndpointLoad(
            load.key, rate=load.rate, backlog_tokens=left, slots=slots, decode_seconds=load.decode_seconds
        )
        uncached = uncached_tokens(tokens, hit)
        rows.append(EndpointCost(rank, hit, uncached, uncached / load.rate, number + others))
    costs = [sum(each) for each in zip(*terms(rows, tokens, uses, policy), strict=True)]
    return min(range(ranks), key=lambda at: (costs[at], running[at]))
