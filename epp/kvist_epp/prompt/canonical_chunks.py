"""A cheap check of generated tokens: whether a tokenizer makes the same ones of their text. Pure.

Tokens are divided into chunks where the tokenizer cuts every text (``text_cuts``). What is on one side of a
cut does not change the tokens on the other, so that tokens are canonical if those of each chunk are. A chunk
is tokenised once, in 8 us, and remembered; a block of 16 tokens has some twelve, looked up in 7 us. To
tokenise a block with the text around it takes 60.

Example: the text ``" the answer (42), or"`` has the chunks ``" the"``, ``" answer"``, ``" (42"``, ``"),"``
and ``" or"``.

At a joint a chunk ends behind one token, and the next chunk begins with it.

The answer "no" means that it is not known: a block ends inside a character, or has no cut for a long time.
"""

from array import array
from collections.abc import Callable, Sequence
from operator import and_
from typing import Final

from kvist_epp.prompt.text_cuts import TextCuts

MOST_CHUNKS: Final = 131_072
"""Chunks that are remembered before those not seen since are forgotten; twice as many take 24 MB."""
MOST_TOKENS: Final = 16
"""Tokens of a chunk; so far before a block its first chunk is looked for, too."""
MOST_BYTES: Final = 512
"""Text that is tokenised at once, which takes 0.3 ms."""
FEW_CHUNKS: Final = 4
"""So many new chunks of a block are tokenised each by itself. With more, the whole block is, in one call."""

_BLANK, _WORD, _LINE, _PART, _JOINT = 1, 2, 4, 8, 16
"""Kinds of cuts: those of ``TextCuts``, in its order."""
_WIDTH: Final = array("I").itemsize


class _Kinds(dict[int, int]):
    """Kinds of cuts at one side of each token, found out when a token is first seen."""

    def __init__(self, pieces: Sequence[bytes], find: Callable[[bytes], int]) -> None:
        self._pieces = pieces
        self._find = find

    def __missing__(self, token: int) -> int:
        kinds = self[token] = self._find(self._pieces[token])
        return kinds


class CanonicalChunks:
    """The chunks of one tokenizer, of which ``cuts`` says where it cuts texts.

    ``pieces``: bytes of each token id.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        encode: Callable[[str], list[int]],
        cuts: TextCuts,
        *,
        most: int = MOST_CHUNKS,
    ) -> None:
        self._pieces = pieces
        self._encode = encode
        self.cuts = cuts
        white_space = filter(str.isspace, map(chr, range(0x3001)))
        self._unsure = frozenset(last.encode()[-1] for last in (*white_space, *cuts.crossed))
        """Last bytes of characters behind which a blank is no cut."""
        self._most = most
        self._canonical: set[bytes] = set()
        self._before: set[bytes] = set()
        """Those remembered before the last ``most``."""
        self._other: set[bytes] = set()
        """Chunks of which the tokenizer makes other tokens; at most ``most``."""
        self._ends = _Kinds(pieces, self._end)
        self._begins = _Kinds(pieces, self._begin)

    def __len__(self) -> int:
        """Return the number of canonical chunks that are remembered."""
        return len(self._canonical) + len(self._before)

    def canonical(self, ids: Sequence[int], *, behind: bytes, before: Sequence[int] = ()) -> bool:
        """Return whether tokens (one at least) are known to be canonical behind a canonical text.

        ``behind``: the end of that text. ``before``: its last tokens, empty if they are not known.
        """
        if before:
            begun = self._last_chunk(before, ids[0])
            return begun is not None and self._all_canonical([*begun, *ids])
        end = self._first_cut(ids, behind)
        return self._continues(behind, ids[:end]) and self._all_canonical(ids[end:])

    def _last_chunk(self, before: Sequence[int], following: int) -> Sequence[int] | None:
        """Return the tokens that are in one chunk with the following one; None if it begins too early."""
        ends, begins, recent = self._ends, self._begins, before[-MOST_TOKENS:]
        for at in range(len(recent) - 1, -1, -1):
            cut = ends[recent[at]] & begins[following]
            if cut:
                return recent[at if cut == _JOINT else at + 1 :]
            following = recent[at]
        return recent if begins[following] & _WORD else None

    def _first_cut(self, ids: Sequence[int], behind: bytes) -> int:
        """Return the number of tokens that continue the chunk at the end of a text."""
        end = self._end(behind)
        for at, token in enumerate(ids):
            if end & self._begins[token] & ~_JOINT:
                return at
            end = self._ends[token]
        return len(ids)

    def _continues(self, behind: bytes, ids: Sequence[int]) -> bool:
        """Return whether these tokens are canonical behind a text; False if that has no cut."""
        if not ids:
            return True
        cut = next((at for at in range(len(behind) - 1, 0, -1) if self.is_cut(behind, at)), None)
        if cut is None or len(ids) > MOST_TOKENS:
            return False
        begun = self._encoded(behind[cut:])
        return begun is not None and self._encoded(behind[cut:] + self._text(ids)) == [*begun, *ids]

    def is_cut(self, text: bytes, at: int) -> bool:
        """Return whether a text is cut at this byte; an added token must not begin behind a blank there."""
        return bool(self._end(text[max(at - 4, 0) : at]) & self._begin(text[at : at + 3]) & ~_JOINT)

    def _all_canonical(self, ids: Sequence[int]) -> bool:
        """Return whether all chunks of these tokens, which begin at a cut, are canonical."""
        if not ids:
            return True
        keys, begin, data = list[bytes](), 0, array("I", ids).tobytes()
        kinds = map(and_, map(self._ends.__getitem__, ids), map(self._begins.__getitem__, ids[1:]))
        for at, cut in enumerate(kinds, 1):
            if cut:
                keys.append(data[begin : at * _WIDTH])
                begin = (at - (cut == _JOINT)) * _WIDTH
        keys.append(data[begin:])
        if self._canonical.issuperset(keys):
            return True
        if not self._other.isdisjoint(keys):
            return False
        new = [key for key in keys if key not in self._canonical and key not in self._before]
        if len(new) > FEW_CHUNKS and self._is_encoded(ids):
            for key in keys:
                self._remember(key)
            return True
        return all(map(self._is_canonical, keys))

    def _is_canonical(self, key: bytes) -> bool:
        """Return whether the text of a chunk becomes its tokens."""
        if key in self._canonical:
            return True
        if len(key) > MOST_TOKENS * _WIDTH:
            return False
        if key not in self._before and not self._is_encoded(array("I", key).tolist()):
            if len(self._other) >= self._most:
                self._other.clear()
            self._other.add(key)
            return False
        self._remember(key)
        return True

    def _remember(self, key: bytes) -> None:
        if len(self._canonical) >= self._most:
            self._before, self._canonical = self._canonical, set()
        if len(key) <= MOST_TOKENS * _WIDTH:
            self._canonical.add(key)

    def _is_encoded(self, ids: Sequence[int]) -> bool:
        return self._encoded(self._text(ids)) == list(ids)

    def _text(self, ids: Sequence[int]) -> bytes:
        return b"".join([self._pieces[token] for token in ids])

    def _encoded(self, text: bytes) -> list[int] | None:
        """Return what becomes of a text; None if it is too long, or ends inside a character."""
        if len(text) > MOST_BYTES:
            return None
        try:
            return self._encode(text.decode())
        except UnicodeDecodeError:
            return None

    def _end(self, text: bytes) -> int:
        """Return the kinds of cuts that there may be behind a text, which may begin or end in a character."""
        last, joints = text[-1:], self.cuts.joints
        kinds = _WORD | (_BLANK if self._ends_solid(text) else 0)
        if last < b"\x80":
            return kinds | (_LINE if last == b"\n" else _PART if last.isalnum() else 0)
        joint = all(text[at : at + 3] in joints for at in range(0, len(text), 3))
        return kinds | (_JOINT if joint else 0)

    def _ends_solid(self, text: bytes) -> bool:
        """Return whether a blank behind a text is a cut."""
        if not text or text[-1] not in self._unsure:
            return bool(text)
        last = text[-4:].decode(errors="replace")[-1]
        return last != "\ufffd" and not last.isspace() and last not in self.cuts.crossed

    def _begin(self, text: bytes) -> int:
        """Return the kinds of cuts that there may be before a text."""
        cuts = self.cuts
        if text[:1] == b" ":
            return _BLANK | (_WORD if cuts.words.issuperset(text[1:2]) and len(text) > 1 else 0)
        if text[:3] in cuts.joints:
            return _JOINT | (_LINE if cuts.lines else 0)
        first = ord(text[:1] or b"\0")
        return (_LINE if first in cuts.lines else 0) | (_PART if first in cuts.parts else 0)
