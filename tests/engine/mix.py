"""A seeded mix of requests: growing chats, shared system prompts, completions, token ids, tools, salts."""

import random
from dataclasses import dataclass, field
from typing import Any

SENTENCES = (
    "The invoice of the second quarter lists forty items, three of which were returned.",
    "Water boils at a lower temperature on the mountain than in the harbour.",
    "def area(width, height):\n    return width * height\n",
    "Please answer briefly and name your sources where you have them.",
    "Der Zug nach Göteborg fährt um 7:45 Uhr von Gleis 3 ab.",
    "Les données sont triées, puis écrites dans la base.",
    "今天天气很好,我们去公园散步吧。",
    "東京の夏はとても暑いです。",
    "Ответ зависит от того, что лежит в кэше.",
    "naïve café — “quoted” … 🧑‍🚀🚀 ok",
    "  indented\n\n\n   twice\t and tabbed ",
    "x = [i ** 2 for i in range(100) if i % 3 == 0]  # squares",
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

CHAT, COMPLETION, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


@dataclass(slots=True)
class Turn:
    """One request to send."""

    path: str
    body: dict[str, Any]
    conversation: list[dict[str, Any]] | None = None
    """Where the answer's message goes."""


@dataclass
class Mix:
    """Gives one request after the other; equal seeds give equal mixes for equal answers."""

    seed: int
    model: str
    conversations: int = 5
    rng: random.Random = field(init=False)
    _chats: list[list[dict[str, Any]]] = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._chats = [self._opening() for _ in range(self.conversations)]
        self._systems = [self.text(900) for _ in range(4)]
        self._documents = [self.text(1200) for _ in range(4)]

    def text(self, size: int) -> str:
        """About ``size`` characters of several scripts."""
        parts: list[str] = []
        while sum(map(len, parts)) < size:
            parts.append(self.rng.choice(SENTENCES))
        return " ".join(parts)

    def next(self) -> Turn:
        """The next request."""
        kinds = (self._growing, self._shared, self._document, self._ids, self._tools, self._salted)
        kind = self.rng.choices(kinds, weights=(40, 22, 16, 8, 8, 6))[0]
        turn = kind()
        turn.body |= {"model": self.model, "max_tokens": self.rng.randint(1, 60), "ignore_eos": True}
        turn.body |= {"temperature": 1.0, "seed": self.rng.randrange(1 << 30)}
        return turn

    def _opening(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.text(self.rng.randint(20, 300))}]

    def _growing(self) -> Turn:
        number = self.rng.randrange(len(self._chats))
        if len(self._chats[number]) > 12:
            self._chats[number] = self._opening()
        chat = self._chats[number]
        chat.append({"role": "user", "content": self.text(self.rng.randint(10, 120))})
        return Turn(CHAT, {"messages": list(chat)}, chat)

    def _shared(self) -> Turn:
        messages = [
            {"role": "system", "content": self.rng.choice(self._systems)},
            {"role": "user", "content": self.text(self.rng.randint(10, 200))},
        ]
        return Turn(CHAT, {"messages": messages})

    def _document(self) -> Turn:
        return Turn(COMPLETION, {"prompt": self.rng.choice(self._documents) + self.text(60)})

    def _ids(self) -> Turn:
        head = [7 + 3 * i % 500 for i in range(self.rng.choice((64, 160)))]
        return Turn(COMPLETION, {"prompt": head + [self.rng.randrange(1000) for _ in range(40)]})

    def _tools(self) -> Turn:
        messages = [{"role": "user", "content": self.text(self.rng.choice((30, 150)))}]
        return Turn(CHAT, {"messages": messages, "tools": [WEATHER], "tool_choice": "none"})

    def _salted(self) -> Turn:
        salt = self.rng.choice(("tenant-a", "tenant-b"))
        return Turn(COMPLETION, {"prompt": self._documents[0], "cache_salt": salt})
