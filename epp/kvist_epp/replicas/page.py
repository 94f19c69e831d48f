"""What ``/debug/peers`` shows, as a plain document. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from kvist_epp.replicas.followers import Followers
from kvist_epp.replicas.peer_connection import Link
from kvist_epp.replicas.remote_load import Book
from kvist_epp.replicas.replication_stats import Tally


def document(
    book: Book, links: Iterable[Link], followers: Followers, tally: Tally, now: float
) -> dict[str, Any]:
    """Replicas as we know them, addresses and what they led to, those who follow us, the snapshot."""
    return {
        "replicas": list(_replicas(book, now)),
        "addresses": [_address(link) for link in links],
        "followers": _followers(followers),
        "snapshot": {
            "seconds": round(tally.snapshot_seconds, 3),
            "blocks": tally.snapshot_blocks,
            "publishers": tally.snapshot_publishers,
            **tally.snapshots,
        },
    }


def _replicas(book: Book, now: float) -> Iterable[Mapping[str, Any]]:
    for peer in book.peers.values():
        yield {
            "replica": peer.replica,
            "standing": peer.standing.value,
            "requests": len(peer.entries),
            "on_unknown_endpoints": len(peer.parked),
            "heard_seconds_ago": round(now - peer.heard_at, 3),
        }


def _address(link: Link) -> Mapping[str, Any]:
    return {
        "address": str(link.address),
        "host": link.address.host,
        "state": link.state.value,
        "replica": link.hello and link.hello.replica,
        "problem": link.problem,
    }


def _followers(followers: Followers) -> Mapping[str, Any]:
    return {
        name: {"round_trip_seconds": call.outgoing.round_trip, "waits": call.outgoing.waits}
        for name, call in followers.calls.items()
    }
