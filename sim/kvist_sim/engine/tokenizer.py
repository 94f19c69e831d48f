"""Text of the engine: prompts to token ids and back, and the text that it generates.

The picker's renderer makes the prompt, the real tokenizer its tokens. Prompts of chats share long prefixes,
and splitting them at special tokens cannot change the result (a special token is cut out before anything
else happens). So the pieces between special tokens are remembered.

Generated text is words of the corpus, in the order of the corpus. A *unit* is a space and what follows up to
the next space. Tokenizers of today split before a space, so that the tokens of the units, joined, are the
tokens of the text: what is generated is canonical, and the next turn of a chat, which sends it back as text,
finds it in the cache.
"""

import codecs
import json
import random
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Final

from kvist_epp.errors import BadRequest
from kvist_epp.prompt.model import Model
from kvist_epp.prompt.model_files import model_folder
from kvist_epp.prompt.request import Request

_UNIT: Final = re.compile(r" [^\s]+")
_PROSE: Final = re.compile(r"[A-Z][^\n|{}]{120,}")


class Writer:
    """Generator of texts from ``corpus``; ``encode`` is the tokenizer's, without added tokens."""

    def __init__(self, corpus: str, encode: Callable[[str], list[int]], *, noncanonical: float = 0.0) -> None:
        self._encode = lru_cache(maxsize=100_000)(encode)
        self._noncanonical = noncanonical
        self._after: dict[str, list[str]] = {}
        for paragraph in _PROSE.findall(corpus):
            self._learn(_UNIT.findall(" " + paragraph))
        self._starts = [unit for unit in self._after if unit[1].isupper()]

    def _learn(self, units: list[str]) -> None:
        for unit, following in pairwise(units):
            self._after.setdefault(unit, []).append(following)

    def tokens(self, seed: str, length: int | None, *, leading_space: bool) -> Iterator[int]:
        """Yield token ids of one text: ``length`` of them, or without end.

        Equal arguments give equal text.
        """
        draw = random.Random(seed)
        left = length
        for unit in self._units(draw, leading_space=leading_space):
            ids = self._spelled(unit, draw)
            if left is not None and left <= len(ids):
                yield from ids[:left]
                return
            left = left and left - len(ids)
            yield from ids

    def _units(self, draw: random.Random, *, leading_space: bool) -> Iterator[str]:
        unit = draw.choice(self._starts)
        yield unit if leading_space else unit[1:]
        while True:
            unit = draw.choice(self._after.get(unit) or self._starts)
            yield unit

    def _spelled(self, unit: str, draw: random.Random) -> list[int]:
        if self._noncanonical and draw.random() < self._noncanonical and len(unit) > 2:
            middle = draw.randrange(1, len(unit))
            return self._encode(unit[:middle]) + self._encode(unit[middle:])
        return self._encode(unit)


def output_length(seed: str, mean: float, minimum: int) -> int:
    """Return the tokens until the model would stop: exponential, at least ``minimum`` and 1."""
    return max(minimum, 1 + int(random.Random(seed + "/length").expovariate(1 / mean)))


REMEMBERED: Final = 20_000
"""Number of cached pieces of text, a few hundred bytes each."""


class Prompts:
    """Tokenizer and template of one model. Raises errors.ModelFilesError when they cannot be loaded."""

    def __init__(self, source: str) -> None:
        home = model_folder(source)
        self._model = Model.load(str(home))
        self._pieces = self._model.pieces
        self._special = _special(home)
        self._encode = lru_cache(maxsize=REMEMBERED)(self._model.encode)
        self.encode = self._model.encode
        self.end = _end(home, self._model)
        """Token that ends an answer."""
        self.longest = _longest(home)
        """Context length of the model; None without ``config.json``."""

    def ids(self, request: Request) -> list[list[int]]:
        """Return token ids of each prompt. Raises BadRequest for a body without a prompt."""
        if request.prompts and not isinstance(request.prompts[0], str):
            return [self._known(list(prompt)) for prompt in request.prompts if not isinstance(prompt, str)]
        rendered = self._model.prompts(request)
        if not rendered:
            raise BadRequest("the prompt of this request cannot be rendered")
        return [self.text_ids(prompt.decode("utf-8", "replace")) for prompt in rendered]

    def _known(self, ids: list[int]) -> list[int]:
        wrong = [token for token in ids if not 0 <= token < len(self._pieces)]
        if wrong:
            raise BadRequest(f"Token id {wrong[0]} is out of vocabulary")
        return ids

    def text_ids(self, text: str) -> list[int]:
        """Return token ids of a rendered prompt: special tokens recognised, none added."""
        if self._special is None:
            return list(self._encode(text))
        ids: list[int] = []
        for piece in self._special.split(text):
            if piece:
                ids += self._encode(piece)
        return ids

    def text(self, ids: list[int]) -> str:
        """Return the text of token ids; invalid UTF-8 becomes U+FFFD. Raises BadRequest for an unknown id."""
        return b"".join([self._pieces[token] for token in self._known(ids)]).decode("utf-8", "replace")

    def stream(self) -> "TextStream":
        """Return a decoder for one output."""
        return TextStream(self._pieces)


class TextStream:
    """Incremental decoder: a character that is spread over tokens comes with the last of them."""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, ids: list[int]) -> str:
        """Return the text that is now certain."""
        return self._decode(b"".join([self._pieces[token] for token in ids]))


def _special(home: Path) -> re.Pattern[str] | None:
    """Splits a text so that each special token is a piece; None when splitting might change the tokens.

    It does not when nothing is put before or stripped off a piece: byte-level BPE without normaliser, special
    tokens without stripping.
    """
    file = home / "tokenizer.json"
    if not file.is_file():
        return None
    document = json.loads(file.read_text(encoding="utf-8"))
    special = [token for token in document.get("added_tokens") or [] if token.get("special")]
    stripped = any(token.get("lstrip") or token.get("rstrip") for token in document.get("added_tokens") or [])
    plain = document.get("normalizer") is None and '"add_prefix_space":true' not in file.read_text().replace(
        " ", ""
    )
    if not special or stripped or not plain or document["model"].get("type") != "BPE":
        return None
    texts = sorted((token["content"] for token in special), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, texts))})")


def _end(home: Path, model: Model) -> int | None:
    """Return the token that ends an answer, from ``tokenizer_config.json``."""
    file = home / "tokenizer_config.json"
    if not file.is_file():
        return None
    named = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    ids = model.encode(text) if isinstance(text, str) else []
    return ids[0] if len(ids) == 1 else None


def _longest(home: Path) -> int | None:
    file = home / "config.json"
    found = (
        json.loads(file.read_text(encoding="utf-8")).get("max_position_embeddings")
        if file.is_file()
        else None
    )
    return found if isinstance(found, int) else None


def local(source: str) -> bool:
    """Return whether ``source`` is a folder with tokenizer files."""
    return (Path(source) / "tokenizer.json").is_file()
