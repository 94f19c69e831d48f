"""Chats that the picker cannot render, to real engines that can: their plain text is matched."""

import json
import shutil
from pathlib import Path

import pytest
from tests.engine.mix import Mix
from tests.engine.pool import Outcome, Pool
from tests.engine.test_main_path import error, report

pytestmark = pytest.mark.timeout(900)
REQUESTS = 120


class PoolWithoutTemplate(Pool):
    """``Pool``, of whose model's files the picker has no chat template."""

    def _build_model(self) -> Path:
        model = super()._build_model()
        plain = self._folder / "plain"
        shutil.copytree(model, plain)
        path = plain / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        del settings["chat_template"]
        path.write_text(json.dumps(settings))
        self._picker_flags = (f"--model={plain}",)
        return model


async def test_chats_that_are_not_rendered_go_where_their_prefix_is(tmp_path: Path) -> None:
    """120 mixed requests one at a time: what engines have of chats is expected within a fifth, that of
    completions within 3 %, and what chats hit does not cost the index its trust."""
    async with PoolWithoutTemplate(tmp_path) as pool:
        mix, chats, completions = Mix(1, "m"), list[Outcome](), list[Outcome]()
        for _ in range(REQUESTS):
            turn = mix.next()
            outcome = await pool.ask(turn)
            (chats if "messages" in turn.body else completions).append(outcome)
        report("chats by their plain text", chats)
        report("completions beside them", completions)
        approximate = (await pool.page("/debug/fleet"))["approximate"]

    assert sum(one.cached for one in chats) > 5_000
    assert error(chats) <= 0.2
    assert error(completions) <= 0.03
    assert approximate == {}
