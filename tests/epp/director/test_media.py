"""Chats with pictures end to end, without sockets: picks, the engines' events, and what they teach."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.epp.parts import BLOCK, CHAT, Parts, Truths, ask, make
from tests.models import folders

from kvist_epp.engines.vllm.kv_events import Batch, Stored
from kvist_epp.extproc.pick_request import PickResult
from kvist_epp.index.media_marks import MARK_SIZE, TOKEN, UNKNOWN
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.names import SESSION_HEADER
from kvist_epp.prompt.model import Model
from kvist_epp.prompt.request import parse

QUESTION = "What is to be seen in this picture, and what does it say of the place where it was taken? " * 3
SIZES = {"cat": 300, "dog": 700}
"""Tokens of pictures."""


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """A model that sees pictures, and has seen none."""
    return Model.load(str(folders.write_vision(tmp_path)))


class Engine:
    """An engine with a cache without end, which sends its events to the picker."""

    def __init__(self, parts: Parts, number: int, folder: str) -> None:
        self._files = Model.load(folder)
        self._key = f"t/e{number}"
        self._parts = parts
        self._ingestor = Ingestor(
            parts.director.index,
            self._files,
            on_prefill_started=lambda publisher, endpoint, session: (
                parts.director.progress.on_prefill_started(publisher, endpoint, session, parts.clock())
            ),
        )
        self._ingestor.add_publisher(f"{self._key}/0", self._key)
        self._cached: set[int] = set()

    def serve(self, body: dict[str, Any], session: str) -> int:
        """Compute a prompt; return how many tokens of it were cached."""
        [prompt] = self._files.prompts(parse(CHAT, json.dumps(body).encode()))
        names = [
            part["image_url"]["url"]
            for m in body["messages"]
            for part in m["content"]
            if len(part) > 1 and "image_url" in part
        ]
        ids: list[int] = []
        media: list[tuple[int, str]] = []
        pad = self._files.vocabulary.encode("<|image_pad|>")
        first, *others = prompt.split(UNKNOWN)
        ids += self._files.encode(first.decode())
        for name, text in zip(names, others, strict=True):
            before, _, behind = text[MARK_SIZE - len(UNKNOWN) :].partition(TOKEN)
            ids += self._files.encode(before.decode())
            media.append((len(ids), name))
            ids += pad * SIZES[name] + self._files.encode(behind.decode())
        hashes = [
            hash((tuple(ids[: end * BLOCK]), tuple(one for one in media if one[0] < end * BLOCK)))
            & (1 << 64) - 1
            for end in range(1, len(ids) // BLOCK + 1)
        ]
        known = next((at for at, one in enumerate(hashes) if one not in self._cached), len(hashes))
        self._cached.update(hashes)
        event = Stored(
            hashes=hashes[known:],
            parent=hashes[known - 1] if known else None,
            token_ids=ids[known * BLOCK : len(hashes) * BLOCK],
            block_size=BLOCK,
            media=tuple((at - known * BLOCK, name) for at, name in media if at >= known * BLOCK),
            session=session,
        )
        for seen in self._ingestor.apply(
            f"{self._key}/0", Batch(ts=0.0, events=[event] if event.hashes else [])
        ):
            self._parts.director.progress.on_observation(seen, self._parts.clock())
        return known * BLOCK


def turns(*pictures: str) -> dict[str, Any]:
    """A chat with a turn for each picture."""
    messages: list[dict[str, Any]] = []
    for name in pictures:
        content = [{"type": "image_url", "image_url": {"url": name}}, {"type": "text", "text": QUESTION}]
        answer = [{"type": "text", "text": "That is an animal."}]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"model": "m", "messages": messages[:-1]}


def test_the_next_turn_goes_where_the_picture_was_computed(model: Model) -> None:
    """A picture at the front is unknown once; then prompts with it are predicted as engines have them, and
    another picture at its place is another prompt."""
    parts = make(2, model=model)
    truths = Truths(parts.director)
    engines = [Engine(parts, number, model.name) for number in range(2)]

    def send(session: str, *pictures: str, to: int | None = None) -> tuple[int, int, int, int]:
        body = turns(*pictures)
        subset = None if to is None else (parts.endpoints[to].hostport,)
        picked = parts.decide(ask(body, headers={SESSION_HEADER: session}, subset=subset))
        assert isinstance(picked, PickResult)
        number = [one.hostport for one in parts.endpoints].index(picked.endpoints[0])
        cached = engines[number].serve(body, session)
        [(request, truth)] = [(one, tokens) for one, tokens in truths.said if one.session == session]
        assert truth == cached
        return number, cached, request.indexed_tokens, int(request.unindexed)

    assert send("a", "dog", to=0) == (0, 0, 0, 1)
    assert send("b", "cat", to=1) == (1, 0, 0, 1)
    parts.end("a", "b")

    place, cached, predicted, unknown = send("c", "dog", "dog")
    assert (place, cached, unknown) == (0, predicted, 0)
    assert cached > 700
    place, cached, predicted, unknown = send("d", "cat", "dog")
    assert (place, cached, unknown) == (1, predicted, 0)
    assert cached > 300
    parts.end("c", "d")
    assert parts.director.table.prompt_bytes == 0
