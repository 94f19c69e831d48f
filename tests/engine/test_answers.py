"""Answers of the tokens that a tokenizer makes of their text, as trained models write them, in real engines
that run no model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.engine.mix import CHAT, SENTENCES, Mix, Turn
from tests.engine.pool import BLOCK, Pool
from tests.engine.test_groups import PoolWithoutModel
from tests.engine.test_main_path import report
from tests.models import vocabularies

pytestmark = pytest.mark.timeout(900)
TURNS = 5


@dataclass
class Talks:
    """Four conversations in turn; each answer is followed by the next question at once."""

    mix: Mix = field(default_factory=lambda: Mix(1, "m"))
    chats: list[list[dict[str, Any]]] = field(default_factory=lambda: [[] for _ in range(4)])

    def turns(self) -> list[Turn]:
        """Return the next turn of each conversation."""
        found = []
        for number, chat in enumerate(self.chats):
            chat.append({"role": "user", "content": f"{number}: {self.mix.text(200)}"})
            body = {"model": "m", "messages": chat, "max_tokens": 150 + 7 * number + len(chat)}
            found.append(Turn(CHAT, body, chat))
        return found


async def test_the_next_turns_of_conversations_hit_their_answers(tmp_path: Path) -> None:
    """Prose, code and a table: every hit is predicted to the token, answers included."""
    table = "".join(f"\n| {number} |  {number * 37:,} |    {number / 7:.2f} |" for number in range(2))
    # Answers end in prose: cut inside a character or white space they would become other tokens.
    text = " ".join((*SENTENCES[9:], table, *SENTENCES[:4] * 4))
    answer = vocabularies.qwen().encode(text).ids
    async with PoolWithoutModel(tmp_path, ("full",), answer=answer) as pool:
        talks = Talks()
        outcomes = [await pool.ask(turn) for _ in range(TURNS) for turn in talks.turns()]
        report("conversations", outcomes)
        found = await credited(pool)

    assert [one.predicted for one in outcomes] == [one.cached for one in outcomes]
    assert sum(one.cached for one in outcomes[4:]) > 0.8 * sum(one.prompt_tokens for one in outcomes[:-4])
    assert found["uncredited"] == 0
    assert found["credited"] >= 4 * TURNS * 150 // BLOCK


async def credited(pool: Pool) -> dict[str, int]:
    """Return how many blocks from decode the picker has credited, and how many it has not."""
    rows = (await pool.page("/debug/index"))["publishers"].values()
    return {key: sum(row[key] for row in rows) for key in ("credited", "uncredited")}
