"""Prompts on their way elsewhere, by digests: replicas send a new prefix to one pod, not to one pod each.

Replicas that share their load and nothing else would even avoid the pod that just got the prefix. Only long
prompts that are mostly new are told: a digest of each prefix of 4, 8, 12 … KiB, 8 bytes each, as long as the
request is open. Pure.
"""

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Final, NamedTuple

from kvist_epp.cache.index import Root

STEP: Final = 4096
"""Bytes between two digests."""
STEPS: Final = 64
"""Digests at most; what comes after 256 KiB is not told."""
LEAST_TOKENS: Final = 2048
"""Tokens a request must have to prefill to be told: a tenth of a second on a fast GPU."""


class Prefix(NamedTuple):
    """A prompt's beginning."""

    root: Root
    digests: tuple[int, ...]
    """Of its first ``STEP`` bytes, twice as many, and so on."""

    @classmethod
    def of(cls, root: Root, prompt: bytes) -> "Prefix":
        """Half a millisecond at most."""
        return cls(root, tuple(_digests(prompt)))


class Prefixes:
    """Who has what on the way, by endpoint."""

    def __init__(self) -> None:
        self._holders: dict[tuple[Root, int], dict[str, int]] = {}
        """Root and digest → endpoint key → requests."""

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, endpoint: str, prefix: Prefix) -> None:
        """A request with this beginning is on its way there."""
        for digest in prefix.digests:
            holders = self._holders.setdefault((prefix.root, digest), {})
            holders[endpoint] = holders.get(endpoint, 0) + 1

    def drop(self, endpoint: str, prefix: Prefix) -> None:
        """It has ended."""
        for digest in prefix.digests:
            holders = self._holders[prefix.root, digest]
            holders[endpoint] -= 1
            if not holders[endpoint]:
                del holders[endpoint]
            if not holders:
                del self._holders[prefix.root, digest]

    def match(self, root: Root, prompt: bytes) -> Mapping[str, int]:
        """How many bytes of the prompt's beginning are on their way to each endpoint, in whole steps."""
        found: dict[str, int] = {}
        if not self._holders:
            return found
        for count, digest in enumerate(_digests(prompt), 1):
            holders = self._holders.get((root, digest))
            if holders is None:
                break
            found.update(dict.fromkeys(holders, count * STEP))
        return found


def _digests(prompt: bytes) -> Iterator[int]:
    state = blake2b(digest_size=8)
    for start in range(0, min(len(prompt) // STEP, STEPS) * STEP, STEP):
        state.update(prompt[start : start + STEP])
        yield int.from_bytes(state.copy().digest(), "big")
