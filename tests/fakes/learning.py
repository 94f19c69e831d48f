"""A ingestor with its index, fed with events of one publisher at a time."""

from collections.abc import Sequence

from tests.fakes.vocabulary import Words

from kvist_epp.engines.vllm.event_encoder import encode
from kvist_epp.engines.vllm.extra_keys import Media
from kvist_epp.engines.vllm.kv_events import Batch, Event, Stored
from kvist_epp.index.byte_index import Index
from kvist_epp.kvevents.decode_check import Chunks
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.kvevents.observation import Observation
from kvist_epp.kvevents.publisher_state import PublisherStats

SIZE = 4
"""Tokens a block."""
PROMPT = b"aaaabbbb"


class Learning:
    """Sends events straight into a ingestor."""

    def __init__(self, *, check: bool = True, chunks: Chunks | None = None) -> None:
        self.index = Index()
        self.words = Words(chunks)
        self.now = self.sent_at = 0.0
        self.ingestor = Ingestor(self.index, self.words, check=check, clock=lambda: self.now)
        self.source = "ns/pod/0"

    def send(self, *events: Event) -> list[Observation]:
        """Apply one batch of events, in the form of a message."""
        self.sent_at += 1.0
        return self.receive(encode(Batch(ts=self.sent_at, rank=0, events=list(events))))

    def receive(self, payload: bytes) -> list[Observation]:
        """Apply a message."""
        return self.ingestor.apply(self.source, self.ingestor.decode(payload))

    def settle(self) -> None:
        """All checks are done."""
        while self.ingestor.checker.step():
            pass

    def tokens(
        self, text: bytes, salt: str | None = None, lora: str | None = None, medium: str = "GPU"
    ) -> int:
        """Tokens matched; asked with one letter more so that the last block is not held back."""
        number = self.index.publisher(self.source)
        hit = self.index.match((lora, salt), text + b"?").of(number)
        return hit.tokens if medium == "GPU" else hit.lower.get(medium, 0)

    @property
    def counters(self) -> PublisherStats:
        """Return the counters of the current publisher."""
        return self.ingestor.stats(self.source)

    @property
    def stats(self) -> tuple[int, int, int]:
        """(credited, uncredited, revoked)"""
        return self.counters.credited, self.counters.uncredited, self.counters.revoked


def stored(
    names: list[int],
    parent: int | None,
    ids: Sequence[int],
    session: str | None = "s",
    *,
    medium: str = "GPU",
    size: int = SIZE,
    group: int | None = None,
    kind: str | None = None,
    window: int | None = None,
    lora: str | None = None,
    salt: str | None = None,
    opaque_from: int | None = None,
    media: Media = (),
) -> Stored:
    """A stored event of blocks of ``SIZE`` tokens."""
    return Stored(
        hashes=names,
        parent=parent,
        token_ids=list(ids),
        block_size=size,
        medium=medium,
        lora=lora,
        group=group,
        kind=kind,
        window=window,
        salt=salt,
        opaque_from=opaque_from,
        media=media,
        session=session,
    )


def prompted(*, check: bool = True, chunks: Chunks | None = None) -> Learning:
    """One request's prompt was stored: blocks 1 and 2."""
    engine = Learning(check=check, chunks=chunks)
    engine.send(stored([1, 2], None, PROMPT))
    return engine
