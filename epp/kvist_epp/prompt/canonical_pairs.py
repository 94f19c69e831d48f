"""A cheap check of generated tokens: which neighbouring tokens a tokenizer makes of their text. Pure.

A sequence of tokens is what byte pair encoding makes of its text if each two neighbours are what it makes of
theirs, since a merge that was left out shows where its two sides meet. (Source: corollary III in the README
of the crate ``bpe``, github.com/github/rust-gems.) So each pair of tokens is tokenised once, in 4 us; to
tokenise a block of 16 tokens with the text around it takes 60.

Example: the tokens ``" hel"``, ``"lo"``, ``","`` have the pairs ``" hello"`` and ``"lo,"``. A tokenizer
that makes one token of the first never makes these three of a text.

Texts are cut before each blank that follows another character, and what is on one side does not change the
tokens on the other: a token behind a cut is looked at by itself. That keeps the pairs few.

A remembered pair, or token by itself, or run of white space is one number, its key: `_key` packs the tokens.

The answer "no" means that it is not known: a pair lacks the text before it, which may divide it in another
way ("(foo" by itself and "(foo" behind a full stop). It is "no" for parts of a character, too.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product
from typing import Final

MOST_KEYS: Final = 131_072
"""Pairs that are remembered before those not seen since are forgotten; twice as many take 17 MB."""
_PREFIX_BYTES: Final = 3
"""Bytes of a doubtful text by which it is looked for."""


class CanonicalPairs:
    """The pairs of one tokenizer: a byte pair encoding that puts nothing before a text, and of which no
    token has a blank behind another character.

    ``pieces``: bytes of each token id. ``added``: texts of the added tokens by id. These are found in a text
    before anything is merged, so that nothing is said of other tokens that spell the beginning of one.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        encode: Callable[[str], list[int]],
        added: Mapping[int, str],
        *,
        most: int = MOST_KEYS,
    ) -> None:
        self._pieces = pieces
        self._encode = encode
        self._most = most
        self._size = len(pieces)
        self._canonical: set[int] = set()
        self._before: set[int] = set()
        """Those remembered before the last ``most``."""
        self._begins_blank = bytes(piece[:1] == b" " for piece in pieces)
        self._ends_solid = bytes(map(_ends_solid, pieces))
        self._is_blank = bytes(piece.isspace() for piece in pieces)
        self._added = frozenset(added)
        # A contraction that is several tokens is cut from what follows it, which no pair shows.
        contractions = (text for text in _contractions() if len(encode(text)) > 1)
        self._doubtful = [text.encode() for text in (*added.values(), *contractions) if text]
        prefixes = {re.escape(text[:_PREFIX_BYTES]) for text in self._doubtful}
        self._prefix = re.compile(b"|".join(prefixes) or b"(?!)")
        self._longest = max(map(len, self._doubtful), default=1)

    def __len__(self) -> int:
        """Return the number of pairs that are remembered."""
        return len(self._canonical) + len(self._before)

    def canonical(self, ids: Sequence[int], text: bytes, *, behind: bytes, last: int | None) -> bool:
        """Return whether tokens, which spell ``text``, are known to be canonical behind a canonical text.

        ``behind``: the end of that text. ``last``: its last token, None if that is not known.
        """
        if self._is_doubtful(ids, text, behind):
            return False
        if last is not None:
            ids = [last, *ids]
        else:
            begun = self._joined(ids, behind)
            if begun is None:
                return False
            ids = ids[begun:]
            if ids and not self._is_canonical(ids[0]):
                return False
        solid, blank, size = self._ends_solid, self._begins_blank, self._size
        keys = [
            right if solid[left] and blank[right] else (left + 1) * size + right
            for left, right in pairwise(ids)
        ]
        return self._canonical.issuperset(keys) or self._each(ids, keys)

    def _joined(self, ids: Sequence[int], behind: bytes) -> int | None:
        """Return how many tokens precede the first cut, if they are canonical behind a text; None: not known.

        The text is tokenised from its last cut on.
        """
        solid, blank = self._ends_solid, self._begins_blank
        begun = 0
        ends_solid = _ends_solid(behind)
        while begun < len(ids) and not (ends_solid and blank[ids[begun]]):
            ends_solid = bool(solid[ids[begun]])
            begun += 1
        if not begun:
            return 0
        cut = behind.rfind(b" ")
        while cut > 0 and not _ends_solid(behind[:cut]):
            cut = behind.rfind(b" ", 0, cut)
        if cut <= 0:
            return None
        begin = b"".join([self._pieces[token] for token in ids[:begun]])
        try:
            word, whole = behind[cut:].decode(), (behind[cut:] + begin).decode()
        except UnicodeDecodeError:
            return None
        return begun if self._encode(whole) == [*self._encode(word), *ids[:begun]] else None

    def _is_doubtful(self, ids: Sequence[int], text: bytes, behind: bytes) -> bool:
        """Return whether other tokens than added ones spell the beginning of an added one."""
        behind = behind[-self._longest :]
        if not self._prefix.search(behind + text):
            return False
        if not self._added.isdisjoint(ids):
            text = b"".join([b"\0" if token in self._added else self._pieces[token] for token in ids])
        if self._prefix.search(behind[1 - _PREFIX_BYTES :] + text):
            return True
        begun = (behind[found.start() :] for found in self._prefix.finditer(behind))
        return any(one != rest and one.startswith(rest) for rest in begun for one in self._doubtful)

    def _each(self, ids: Sequence[int], keys: Sequence[int]) -> bool:
        """Return whether each pair of neighbours, of which ``keys`` are the keys, is canonical.

        White space is divided by whether something follows it, so that a run of such tokens is looked at
        together with the token behind it.
        """
        at = 0
        while at < len(keys):
            end = at
            while end < len(ids) and self._is_blank[ids[end]]:
                end += 1
            run = end > at + 1
            if not self._is_canonical(self._key(ids[at : end + 1]) if run else keys[at]):
                return False
            at = end if run else at + 1
        return True

    def _key(self, ids: Sequence[int]) -> int:
        """Return the number that stands for these tokens among those that are remembered."""
        key = -1
        for token in ids:
            key = (key + 1) * self._size + token
        return key

    def _is_canonical(self, key: int) -> bool:
        """Return whether the tokens of a key are what their text becomes."""
        if key in self._canonical:
            return True
        if key not in self._before:
            ids, rest = [key % self._size], key // self._size
            while rest:
                rest, token = divmod(rest - 1, self._size)
                ids.insert(0, token)
            try:
                text = b"".join([self._pieces[token] for token in ids]).decode()
            except UnicodeDecodeError:
                return False
            if self._encode(text) != ids:
                return False
        if len(self._canonical) >= self._most:
            self._before, self._canonical = self._canonical, set()
        self._canonical.add(key)
        return True


def _ends_solid(text: bytes) -> bool:
    """Return whether a text ends with a whole character that is no white space."""
    last = text[-4:].decode(errors="replace")[-1:]
    return not (last.isspace() or last in ("", "\ufffd"))


def _contractions() -> list[str]:
    """Return the endings that patterns of tokenizers cut off, in all cases."""
    endings = ("s", "t", "re", "ve", "m", "ll", "d")
    cases = (product(*zip(ending, ending.upper(), strict=True)) for ending in endings)
    return ["'" + "".join(letters) for spelled in cases for letters in spelled]
