"""One request that prewarming sends to one engine: the next part of a hot prefix. Pure."""

import msgspec

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.load.in_flight import InFlightRequest
from kvist_epp.prefix_stats.hot_prefixes import HotPrefix


class PrewarmStep(msgspec.Struct, frozen=True, eq=False):
    """One request to one engine."""

    request: InFlightRequest
    """In flight like any other, so that the cost includes it."""
    session: str
    """Session id in the load tracker and in the engine's events."""
    endpoint: Endpoint
    prefix: HotPrefix
    blocks: int
    """Blocks of the prefix requested, from the first on."""
    tokens: int
    """Tokens in these blocks."""
    held: int
    """Tokens of them that the endpoint holds already."""

    @property
    def uncached(self) -> int:
        """Tokens to compute."""
        return self.tokens - self.held

    @property
    def text(self) -> bytes:
        """Text of the prompt."""
        return self.prefix.text[: sum(self.prefix.sizes[: self.blocks])]
