"""Chat traffic as a public service sees it: long shared system prompts, chats that grow turn by turn.

Everything follows from the seed, down to the last byte and the arrival times, so that two routing
policies can be given exactly the same traffic. What the assistant said in earlier turns is scripted
too, not taken from the answers: otherwise the second run would depend on the first.
"""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

_VOCABULARY: Final = """
the of and to in is that for it with as on be at by this from or an are not but which have has will
can all one more when there if out so up said what about into than them only other new some time these
two may then do first any now such like our over even most after also made many before must through
back years where much your way well down should because each just those people how too little state
good very make world still see men work long get here between both life being under never day same
another know while last might us great old year off come since against go came right used take three
river forest leaf branch twig root trunk stone water wind summer winter island harbour mountain valley
answer question customer invoice contract delivery account order policy refund warranty support ticket
engine memory cache block prefix token request server router cluster network latency throughput queue
function module variable class object method interface compile deploy rollback release version branch
patient doctor treatment dose symptom diagnosis hospital insurance claim clause section paragraph table
teacher student lesson example exercise history science language grammar sentence meaning translation
recipe flour butter sugar kitchen oven minute degree spoon onion garlic pepper bread cheese tomato
train station platform journey ticket passenger luggage arrival departure delay bridge tunnel road
"""

WORDS: Final = tuple(_VOCABULARY.split())
"""Common English words and some of typical trades: plain text that a vocabulary trained on English splits
into about two tokens a word."""

SENTENCE_WORDS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Parameters of the traffic; sizes in words."""

    groups: int
    """System prompts in use, one per application or tenant."""
    system_words: int
    """Length of each system prompt."""
    zipf: float = 0.6
    """Popularity of group k is proportional to 1 / k ** zipf; 0 = all alike."""
    user_words: tuple[int, int] = (20, 120)
    """Shortest and longest user message."""
    assistant_words: tuple[int, int] = (40, 120)
    """Shortest and longest scripted answer in the history."""
    turns: int = 4
    """Turns of a chat before it ends."""
    continue_share: float = 0.5
    """Share of requests that are the next turn of an open chat, when there is one."""
    max_tokens: int = 40
    """Tokens generated per answer."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request and when it is sent."""

    at: float
    """Seconds after the load began."""
    group: int
    turn: int
    """Zero-based turn of its chat."""
    body: bytes
    """JSON of a chat completion."""


@dataclass(slots=True)
class _Chat:
    group: int
    messages: list[dict[str, str]]
    turn: int = 0


def text(rng: random.Random, words: int) -> str:
    """Sentences of our own word list; ``words`` words in all."""
    chosen = rng.choices(WORDS, k=words)
    sentences = (
        " ".join(chosen[at : at + SENTENCE_WORDS]).capitalize() for at in range(0, words, SENTENCE_WORDS)
    )
    return ". ".join(sentences) + "."


def arrivals(shape: Shape, *, rate: float, seed: int, model: str) -> Iterator[Arrival]:
    """Endless Poisson arrivals, ``rate`` per second."""
    rng = random.Random(seed)
    at = 0.0
    for group, turn, body in _requests(shape, rng, model):
        at += rng.expovariate(rate)
        yield Arrival(at, group, turn, body)


def warm_up(shape: Shape, *, rate: float, seed: int, model: str) -> Iterator[Arrival]:
    """Yield one request of each group, evenly spaced: the first use of a prompt, which no cache can spare."""
    rng = random.Random(seed + 1)
    systems = _systems(shape, random.Random(seed))
    for number, group in enumerate(rng.sample(range(shape.groups), shape.groups)):
        chat = _begin(shape, rng, group, systems)
        yield Arrival(number / rate, group, 0, _body(shape, chat, model))


def _requests(shape: Shape, rng: random.Random, model: str) -> Iterator[tuple[int, int, bytes]]:
    systems = _systems(shape, rng)
    weights = list(itertools.accumulate(1 / (k + 1) ** shape.zipf for k in range(shape.groups)))
    waiting: list[_Chat] = []
    while True:
        if waiting and rng.random() < shape.continue_share:
            chat = waiting.pop(rng.randrange(len(waiting)))
            _continue(shape, rng, chat)
        else:
            group = rng.choices(range(shape.groups), cum_weights=weights)[0]
            chat = _begin(shape, rng, group, systems)
        yield chat.group, chat.turn, _body(shape, chat, model)
        if chat.turn + 1 < shape.turns:
            waiting.append(chat)


def _systems(shape: Shape, rng: random.Random) -> list[str]:
    return [text(rng, shape.system_words) for _ in range(shape.groups)]


def _begin(shape: Shape, rng: random.Random, group: int, systems: Sequence[str]) -> _Chat:
    question = text(rng, rng.randint(*shape.user_words))
    messages = [{"role": "system", "content": systems[group]}, {"role": "user", "content": question}]
    return _Chat(group, messages)


def _continue(shape: Shape, rng: random.Random, chat: _Chat) -> None:
    answer, question = (text(rng, rng.randint(*span)) for span in (shape.assistant_words, shape.user_words))
    chat.messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    chat.turn += 1


def _body(shape: Shape, chat: _Chat, model: str) -> bytes:
    request: dict[str, Any] = {
        "model": model,
        "messages": chat.messages,
        "max_tokens": shape.max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(request, separators=(",", ":")).encode()
