"""Engines with drafts, whose hashes cover tokens behind each block: the index knows what they can use."""

from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.learning import Learning

SIZE = 3
pack = msgspec.msgpack.encode


class Engine:
    """Caches blocks as vLLM 0.33 does with EAGLE or MTP (``get_request_block_hasher``): the key of a block is
    all tokens up to ``further`` behind its end."""

    def __init__(self, further: int) -> None:
        self.further = further
        self.cached: dict[bytes, int] = {}
        """Hash of each block, by its key."""
        self.names = 0

    def keys(self, prompt: bytes) -> list[bytes]:
        """The keys of a prompt's blocks."""
        return [prompt[: end + self.further] for end in range(SIZE, len(prompt) - self.further + 1, SIZE)]

    def hit(self, prompt: bytes) -> int:
        """The tokens of a prompt that are cached; one at least is computed."""
        keys = [key for key in self.keys(prompt) if len(key) - self.further < len(prompt)]
        known = next((at for at, key in enumerate(keys) if key not in self.cached), len(keys))
        return SIZE * known

    def run(self, prompt: bytes) -> list[object]:
        """Compute a prompt; the event of the blocks that are new."""
        keys = self.keys(prompt)
        new = [key for key in keys if key not in self.cached]
        if not new:
            return []
        first = len(keys) - len(new)
        parent = self.cached[keys[first - 1]] if first else None
        for key in new:
            self.names += 1
            self.cached[key] = self.names
        tokens = prompt[first * SIZE : len(keys) * SIZE]
        behind = [list(key[len(key) - self.further :]) for key in new]
        event = {
            "type": "BlockStored",
            "block_hashes": [self.cached[key] for key in new],
            "parent_block_hash": parent,
            "token_ids": list(tokens),
            "block_size": SIZE,
            "lora_id": None,
            "lookahead_token_ids": behind,
        }
        return [event]

    def evict(self, key: bytes) -> list[object]:
        """Evict a block and those behind it; their events."""
        gone = [one for one in self.cached if one.startswith(key)]
        hashes = [self.cached.pop(one) for one in gone]
        return [{"type": "BlockRemoved", "block_hashes": [name]} for name in hashes[::-1]]


prompts = st.lists(st.sampled_from(b"ab"), min_size=1, max_size=20).map(bytes)


def send(index: Learning, events: Sequence[object]) -> None:
    """The events reach the index, and what they say is checked."""
    if events:
        index.receive(pack([1.0, list(events), 0]))
    index.settle()


@given(st.integers(1, SIZE), st.lists(st.tuples(prompts, st.booleans()), max_size=12))
def test_hits_are_those_of_an_engine_whose_hashes_look_ahead(
    further: int, requests: list[tuple[bytes, bool]]
) -> None:
    """Whatever prompts share and where they part, also right behind a block, the index knows the hit; blocks
    that were evicted are gone, also where others have the same tokens."""
    engine, index = Engine(further), Learning()
    number = index.index.publisher(index.source)
    for prompt, evicts in requests:
        # a token more, as the index never counts the last one: see Index.match
        assert index.index.match((None, None), prompt + b"c").of(number).tokens == engine.hit(prompt + b"c")
        send(index, engine.run(prompt))
        if evicts and engine.cached:
            send(index, engine.evict(min(engine.cached)))


def test_prompts_that_part_behind_a_block_do_not_share_it() -> None:
    """A block is used only before the token that its hash covers, and an engine may have it several times."""
    engine, index = Engine(1), Learning()
    send(index, engine.run(b"aaabbbccc"))
    assert [index.tokens(text) for text in (b"aaabbbc", b"aaabbbx", b"aaax")] == [6, 3, 0]
    send(index, engine.run(b"aaaxyz"))
    assert [index.tokens(text) for text in (b"aaabbbc", b"aaax")] == [6, 3]
    send(index, engine.evict(b"aaax"))
    assert [index.tokens(text) for text in (b"aaabbbc", b"aaax")] == [6, 0]
