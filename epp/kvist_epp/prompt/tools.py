"""Tools as vLLM passes them to a chat template. Agents send the same ones each turn: they are parsed once."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvist_epp.prompt.chat import UnrenderableError

MAX_BYTES: Final = 4_000_000
"""Bound on the sets of tools that are kept, as sent. What is made of them takes some twenty times as much."""
_SET_BYTES: Final = 4_096
"""What a set counts for besides: that of the smallest takes a kilobyte."""
_GROWTH: Final = 8
"""Characters of texts that are kept for each byte of tools."""
_TEXT_CHARACTERS: Final = 200
"""What a text counts for besides."""
_SIZE: Final = 65_536
"""Of tools whose size is not known."""


class ToolTexts:
    """Keeps what was written about the tools of one list, by what decides it, as far as there is room."""

    def __init__(self, room: int) -> None:
        """``room``: characters of the texts, and of what a text counts for besides."""
        self._texts: dict[tuple[Any, ...], str] = {}
        self._room = room
        self.digest: int | None = None
        """Of the list."""
        self.sorted: list[dict[str, Any]] | None = None
        """The tools of the list with sorted fields, if a model needs them."""

    @property
    def room(self) -> int:
        """Return how many characters may still be kept."""
        return self._room

    def get(self, key: tuple[Any, ...]) -> str | None:
        """Return a text that was kept."""
        return self._texts.get(key)

    def keep(self, key: tuple[Any, ...], text: str) -> str:
        """Keep a text if there is room, and return it."""
        size = _TEXT_CHARACTERS + len(text)
        if size <= self._room:
            self._room -= size
            self._texts[key] = text
        return text

    def __len__(self) -> int:
        return len(self._texts)


class Tool(dict[str, Any]):
    """A tool as a template sees it, with the texts of its list."""

    __slots__ = ("texts",)

    def __init__(self, fields: dict[str, Any], texts: ToolTexts) -> None:
        super().__init__(fields)
        self.texts = texts


def template_tools(tools: list[dict[str, Any]], size: int = _SIZE) -> list[dict[str, Any]]:
    """Return the tools as a template sees them: known fields, absent descriptions and parameters as null.

    ``size`` is that of the tools as sent, in bytes: eight times as many characters are kept of what is made
    of them.

    Raises:
        UnrenderableError: a tool that is not a function, or an empty list, which the engine rejects.
    """
    if not tools:
        raise UnrenderableError("tools")
    texts = ToolTexts(_GROWTH * (_SET_BYTES + size))
    return [Tool(_tool(tool), texts) for tool in tools]


def with_sorted_fields(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools whose objects have their fields in alphabetical order, which are made once for a list."""
    first = tools[0]
    if type(first) is not Tool:
        return [_sorted_fields(tool) for tool in tools]
    if first.texts.sorted is None:
        texts = ToolTexts(first.texts.room)
        first.texts.sorted = [Tool(_sorted_fields(tool), texts) for tool in tools]
    return first.texts.sorted


def declaration_room(size: int) -> int:
    """Return how many characters code may write to declare the tools of a request of ``size`` bytes.

    Schemas of many levels are indented by the square of them.
    """
    return 4 * size + 100_000


def kept_text(tools: list[dict[str, Any]], key: tuple[Any, ...], write: Callable[[], str]) -> str:
    """Return what ``write`` makes of a list of tools, which is kept with them under this key."""
    first = tools[0]
    if type(first) is not Tool:
        return write()
    kept = first.texts.get(key)
    return first.texts.keep(key, write()) if kept is None else kept


def digest_of(tools: list[dict[str, Any]], made: Callable[[Any], int]) -> int:
    """Return the digest of a list of tools, which is made once."""
    first = tools[0] if tools else None
    if type(first) is not Tool:
        return made(tools)
    if first.texts.digest is None:
        first.texts.digest = made(tools)
    return first.texts.digest


Seen = Callable[[list[dict[str, Any]], int], list[dict[str, Any]]]


class KeptTools:
    """Sets of tools by the bytes that were sent; the least recently used give way."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[bytes, Seen], list[dict[str, Any]]] = OrderedDict()
        self._bytes = 0

    def parse(self, raw: msgspec.Raw, seen: Seen = template_tools) -> list[dict[str, Any]] | None:
        """Return the tools of a body as ``seen`` shows them to a template; None if they are absent or null.

        ``seen`` is a function of a module: it decides with the bytes whether tools are the same.

        Raises:
            UnrenderableError: as ``seen`` does.
            msgspec.DecodeError: not a list of objects.
        """
        data = bytes(raw)
        key = data, seen
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            return kept
        sent = sent_tools(data)
        if sent is None:
            return None
        made = seen(sent, len(data))
        if _SET_BYTES + len(data) > self._max_bytes // 8:
            return made  # one large set does not take the place of all others
        self._kept[key] = made
        self._bytes += _SET_BYTES + len(data)
        while self._bytes > self._max_bytes:
            (gone, _), _ = self._kept.popitem(last=False)
            self._bytes -= _SET_BYTES + len(gone)
        return made


def sent_tools(data: bytes | msgspec.Raw) -> list[dict[str, Any]] | None:
    """Return the tools of a body as they were sent; None if they are absent or null.

    Raises:
        msgspec.DecodeError: not a list of objects.
    """
    return _decoder.decode(data) if data else None


parse_tools: Final = KeptTools().parse
_decoder: Final = msgspec.json.Decoder(list[dict[str, Any]] | None)


def _sorted_fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sorted_fields(value[name]) for name in sorted(value)}
    return [_sorted_fields(one) for one in value] if isinstance(value, list) else value


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if type(function) is not dict or tool.get("type", "function") != "function":
        raise UnrenderableError("tool")
    seen = {name: function.get(name) for name in ("name", "description", "parameters")}
    defer = tool.get("defer_loading")
    inner = function.get("defer_loading")
    optional = {"strict": function.get("strict"), "defer_loading": defer if inner is None else inner}
    seen.update((name, value) for name, value in optional.items() if value is not None)
    whole = {"type": "function", "function": seen}
    return whole if defer is None else {**whole, "defer_loading": defer}
