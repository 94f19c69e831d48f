"""Requests and KV events of a real vLLM with a host tier and a disk tier; see ``tests.engine.tiers``."""

import gzip
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

GOLDEN = Path(__file__).parent / "golden" / "tiers-vllm-0.32.0.msgpack.gz"
MODES = ("self-describing", "warm-disk", "placeholders")
VOCABULARY = 512
_SOURCE = re.compile(r'prompt_tokens_cached_by_source_total\{.*source="(\w+)"\} (\S+)')


class Step(msgspec.Struct, kw_only=True):
    """One request, and what the engine published until its next one."""

    name: str
    prompt: list[int]
    """Token ids."""
    salt: str | None
    session: str
    cached: int
    """Tokens, by the usage of the response."""
    metrics: str
    """Lines of the engine's /metrics after the request."""
    batches: list[tuple[int, bytes]]
    """(sequence number, payload)"""

    @property
    def sources(self) -> dict[str, int]:
        """Cached prompt tokens since the engine's start by the tier that they came from."""
        return {source: int(float(value)) for source, value in _SOURCE.findall(self.metrics)}


class Run(msgspec.Struct):
    """One engine from its start on."""

    mode: str
    steps: list[Step]

    def with_sources(self) -> Iterator[tuple[Step, dict[str, int]]]:
        """Yield each request with the tokens that it got from each tier."""
        before: dict[str, int] = {}
        for step in self.steps:
            yield step, {source: n - before.get(source, 0) for source, n in step.sources.items()}
            before = step.sources


def recorded(mode: str, golden: Path = GOLDEN) -> Run:
    """Return one of the recorded runs."""
    runs = msgspec.msgpack.decode(gzip.decompress(golden.read_bytes()), type=list[Run])
    return next(run for run in runs if run.mode == mode)


class NumberedTokens:
    """A vocabulary whose token ``n`` is the text ``<n>``: prompts of token ids without their tokenizer."""

    chunks = None

    def __init__(self) -> None:
        self.pieces: Sequence[bytes] = [b"<%d>" % token for token in range(VOCABULARY)]

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text of whole tokens, or of the whole tokens in it."""
        return [int(number) for number in re.findall(r"<(\d+)>", text)]

    def text(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of these tokens."""
        return b"".join(self.pieces[token] for token in ids)
