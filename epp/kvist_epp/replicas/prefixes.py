"""Prompts on their way elsewhere, by digests: replicas send a new prefix to one pod, not to one pod each.

Replicas that share their load and nothing else would even avoid the pod that just got the prefix; and those
that sent it there at the same moment would count its work once each. Only prompts with much that is new are
told: a digest of each prefix of 4, 8, 12 … KiB and of the whole, 8 bytes each, as long as the request is
open. Pure.
"""

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Final, NamedTuple

from kvist_epp.index.byte_index import Root

STEP: Final = 4096
"""Bytes between two digests."""
STEPS: Final = 64
"""Digests at most; what comes after 256 KiB is not told."""
LEAST_TOKENS: Final = 512
"""Tokens a request must have to prefill to be told: 32 ms on a fast GPU, more than a step of decoding."""
HURRY_TOKENS: Final = 2048
"""The same to be told at once: a tenth of a second."""


class Prefix(NamedTuple):
    """A prompt's beginning."""

    root: Root
    digests: tuple[int, ...]
    """Of its first ``STEP`` bytes, twice as many, and so on."""
    whole: int = 0
    """Of all of it; 0: not told."""

    @classmethod
    def of(cls, root: Root, prompt: bytes) -> "Prefix":
        """A millisecond a megabyte."""
        *digests, whole = (digest for _, digest in _digests(prompt))
        return cls(root, tuple(digests), whole)

    @property
    def content(self) -> tuple[Root, int] | None:
        """Equal for equal prompts to equal models; None: not told."""
        return (self.root, self.whole) if self.whole else None

    @property
    def keys(self) -> Iterator[tuple[Root, int]]:
        """Of everything it can be found by."""
        return ((self.root, digest) for digest in (*self.digests, self.whole))


class Prefixes:
    """Who has what on the way, by endpoint."""

    def __init__(self) -> None:
        self._holders: dict[tuple[Root, int], dict[str, int]] = {}
        """Root and digest → endpoint key → requests."""

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, endpoint: str, prefix: Prefix) -> None:
        """A request with this beginning is on its way there."""
        for key in prefix.keys:
            holders = self._holders.setdefault(key, {})
            holders[endpoint] = holders.get(endpoint, 0) + 1

    def drop(self, endpoint: str, prefix: Prefix) -> None:
        """It has ended."""
        for key in prefix.keys:
            holders = self._holders[key]
            holders[endpoint] -= 1
            if not holders[endpoint]:
                del holders[endpoint]
            if not holders:
                del self._holders[key]

    def match(self, root: Root, prompt: bytes) -> Mapping[str, int]:
        """How many bytes of the prompt's beginning are on their way to each endpoint: whole steps, or all."""
        found: dict[str, int] = {}
        if not self._holders or not prompt:
            return found
        for size, digest in _digests(prompt):
            holders = self._holders.get((root, digest))
            if holders is None:
                break
            found.update(dict.fromkeys(holders, size))
        return found


def _digests(prompt: bytes) -> Iterator[tuple[int, int]]:
    """(bytes, digest) of each whole step, then of everything."""
    state, told = blake2b(digest_size=8), b""
    end = min(len(prompt) // STEP, STEPS) * STEP
    for start in range(0, end, STEP):
        state.update(prompt[start : start + STEP])
        told = state.copy().digest()
        yield start + STEP, int.from_bytes(told, "big")
    whole = blake2b(told + prompt[end:], digest_size=8, person=b"whole")
    yield len(prompt), int.from_bytes(whole.digest(), "big")
