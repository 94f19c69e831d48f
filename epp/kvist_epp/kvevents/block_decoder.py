"""The bytes of blocks, of which events give the token ids. Pure."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from kvist_epp.engines.vllm.event_decoder import EventDecoder
from kvist_epp.engines.vllm.kv_events import Stored
from kvist_epp.index.media_marks import item_mark


class BlockDecoder:
    """Decodes token ids to the bytes of their blocks.

    ``pieces``: bytes of each token id, b"" where the id does not exist.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces: list[bytes | None] = [piece or None for piece in pieces]
        """None makes ``join`` fail, so that an id that does not exist is noticed at no cost to the others."""
        self.events = EventDecoder(pieces)

    def ids(self, event: Stored) -> list[list[int]]:
        """Return the token ids of each block of an event."""
        read = event.pieces is None or len(event.token_ids) > 0
        ids = event.token_ids if read else self.events.ids(event.pieces or ())
        size = event.block_size
        blocks = [ids[at : at + size] for at in range(0, len(ids), size)]
        if event.head:
            blocks[0] = (event.head if read else self.events.ids(event.head)) + blocks[0]
        return blocks

    def texts(self, event: Stored) -> tuple[list[bytes], bool]:
        """Return the bytes of each block of an event up to the first opaque one, and whether all ids are
        known. A mark precedes the first token of each medium."""
        size, opaque_from = event.block_size, event.opaque_from
        if event.pieces is None:
            ids = event.token_ids
            found = self.decode(ids if opaque_from is None else ids[: opaque_from * size], size)
        else:
            pieces = iter(event.pieces if opaque_from is None else event.pieces[: opaque_from * size])
            found = list(map(b"".join, zip(*[pieces] * size, strict=False))), True
        if event.media:
            self._mark_media(found[0], event)
        if event.head and found[0]:
            head = self._head(event)
            if head is None:
                return [], False
            found[0][0] = head + found[0][0]
        return found

    def _head(self, event: Stored) -> bytes | None:
        """Return the bytes of the tokens that precede an event's first block; None if one does not exist."""
        if event.pieces is not None:
            return b"".join(event.head)
        known, _ = self.decode(event.head, len(event.head))
        return known[0] if known else None

    def _mark_media(self, texts: list[bytes], event: Stored) -> None:
        """Write the texts of the blocks in which media begin again, with their marks."""
        size, marks = event.block_size, dict[int, list[tuple[int, str]]]()
        for at, identifier in event.media:
            marks.setdefault(at // size, []).append((at % size, identifier))
        for block in [block for block in marks if block < len(texts)]:
            first = block * size
            pieces: list[bytes] = (
                [self.pieces[token] or b"" for token in event.token_ids[first : first + size]]
                if event.pieces is None
                else event.pieces[first : first + size]
            )
            for at, identifier in sorted(marks[block], reverse=True):
                pieces.insert(at, item_mark(identifier))
            texts[block] = b"".join(pieces)

    def decode(self, ids: Sequence[int], block_size: int) -> tuple[list[bytes], bool]:
        """Return the bytes of each block up to the first unknown id, and whether all ids are known."""
        try:
            if len(ids) > 1:  # itemgetter is the fastest way to look up many
                tokens: Any = iter(itemgetter(*ids)(self.pieces))
            else:
                tokens = iter([self.pieces[token] for token in ids])
            return list(map(b"".join, zip(*[tokens] * block_size, strict=False))), True
        except (IndexError, TypeError):
            known, pieces = len(self.pieces), self.pieces
            unknown = next(at for at, token in enumerate(ids) if token >= known or pieces[token] is None)
            return self.decode(ids[: unknown - unknown % block_size], block_size)[0], False
