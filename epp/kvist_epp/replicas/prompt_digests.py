"""Digests of prompts in flight, with which replicas send a new prefix to one endpoint instead of one each.

Replicas that share only their load would even avoid the endpoint that has just received a prefix, and
replicas that sent it there at the same moment would each count its prefill. A replica therefore announces
every request with many uncached tokens, for as long as it is open: a digest of each prefix of 4, 8, 12 … KiB
of its prompt and one of the whole prompt, 8 bytes each. Pure.
"""

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Final, NamedTuple

from kvist_epp.index.byte_index import Root

STEP_BYTES: Final = 4096
"""Bytes of the prompt between two digests."""
MAX_STEPS: Final = 64
"""Maximum number of prefix digests; text after 256 KiB is only part of the digest of the whole prompt."""
ANNOUNCED_TOKENS: Final = 512
"""Uncached tokens from which a request is announced: 32 ms of prefill on a fast GPU, more than a decode
step."""
URGENT_TOKENS: Final = 2048
"""Uncached tokens from which a request is announced at once: a tenth of a second of prefill."""


class PromptDigests(NamedTuple):
    """Digests of one prompt and of its prefixes."""

    root: Root
    prefixes: tuple[int, ...]
    """Digests of the first ``STEP_BYTES`` bytes, of twice as many, and so on."""
    whole: int = 0
    """Digest of the whole prompt; 0 if the sender did not announce it."""

    @classmethod
    def compute(cls, root: Root, prompt: bytes) -> "PromptDigests":
        """Return the digests of a prompt; takes a millisecond per megabyte."""
        *prefixes, whole = (digest for _, digest in _digests(prompt))
        return cls(root, tuple(prefixes), whole)

    @property
    def content(self) -> tuple[Root, int] | None:
        """Key that is equal for equal prompts to equal models; None without a digest of the whole prompt."""
        return (self.root, self.whole) if self.whole else None

    @property
    def keys(self) -> Iterator[tuple[Root, int]]:
        """All keys that the prompt is found by: those of its prefixes and that of the whole."""
        return ((self.root, digest) for digest in (*self.prefixes, self.whole))


class PrefixesInFlight:
    """Prefixes that other replicas have sent to endpoints, by digest."""

    def __init__(self) -> None:
        self._requests: dict[tuple[Root, int], dict[str, int]] = {}
        """(root, digest) → endpoint key → number of requests."""

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, endpoint: str, digests: PromptDigests) -> None:
        """Record that a request with this prompt is in flight to the endpoint."""
        for key in digests.keys:
            counts = self._requests.setdefault(key, {})
            counts[endpoint] = counts.get(endpoint, 0) + 1

    def remove(self, endpoint: str, digests: PromptDigests) -> None:
        """Undo one ``add``: the request has ended."""
        for key in digests.keys:
            counts = self._requests[key]
            counts[endpoint] -= 1
            if not counts[endpoint]:
                del counts[endpoint]
            if not counts:
                del self._requests[key]

    def match(self, root: Root, prompt: bytes) -> Mapping[str, int]:
        """Return for each endpoint how many bytes of the prompt's prefix are in flight to it.

        A count is a multiple of ``STEP_BYTES``, or the length of the whole prompt. Endpoints without a match
        are left out.
        """
        found: dict[str, int] = {}
        if not self._requests or not prompt:
            return found
        for size, digest in _digests(prompt):
            counts = self._requests.get((root, digest))
            if counts is None:
                break
            found.update(dict.fromkeys(counts, size))
        return found


def _digests(prompt: bytes) -> Iterator[tuple[int, int]]:
    """Yield (bytes, digest) of each whole step, then of the whole prompt."""
    state, last = blake2b(digest_size=8), b""
    end = min(len(prompt) // STEP_BYTES, MAX_STEPS) * STEP_BYTES
    for start in range(0, end, STEP_BYTES):
        state.update(prompt[start : start + STEP_BYTES])
        last = state.copy().digest()
        yield start + STEP_BYTES, int.from_bytes(last, "big")
    whole = blake2b(last + prompt[end:], digest_size=8, person=b"whole")
    yield len(prompt), int.from_bytes(whole.digest(), "big")
