"""The bench of chat templates: small, but the whole of it."""

import json
from pathlib import Path

import pytest
from tests.models.folders import TEMPLATES

from kvist_epp.prompt.template import Template
from kvist_sim.bench import templates
from kvist_sim.bench.templates import Cost, TemplateFigures, TemplatesReport, conversation, main


def test_a_row_for_each_template(tmp_path: Path) -> None:
    """New tools, and chats as a whole and as the next turn, are measured, and the section is written."""
    file, page, refusing = tmp_path / "found.json", tmp_path / "benchmarks.md", tmp_path / "refusing.jinja"
    page.write_text("# Page\n<!-- templates -->\nstale\n<!-- /templates -->\n")
    refusing.write_text("{{ raise_exception('no') }}")

    files = [str(TEMPLATES / "chatml.jinja"), str(refusing)]
    written = ["--json", str(file), "--write-docs", str(page)]
    code = main([*files, "--messages", "30", "60", "--rounds", "2", *written])

    chatml, refused = json.loads(file.read_text())["rows"]
    assert code == 0
    assert [cost["messages"] for cost in chatml["turns"]] == [30, 60]
    costs = [chatml["new_tools"], *chatml["turns"]]
    assert all(cost["whole_us"] > 0 and cost["next_us"] > 0 for cost in costs)
    assert refused["turns"] == [{"messages": count, "whole_us": None, "next_us": None} for count in (30, 60)]
    assert "stale" not in page.read_text()
    assert "refused" in page.read_text()


def test_a_wrong_prompt_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command fails if a prompt is not the one that the template writes."""
    monkeypatch.setattr(Template, "complete", lambda _self, _chat: "another")
    assert main(["--messages", "30", "--rounds", "1"]) == 1
    row = TemplateFigures("x", Cost(8, 1.0, 1.0), [], 2)
    assert TemplatesReport([row]).broken() == ["x: 2 wrong prompts"]


def test_files_are_named_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A template is named by its folder if several files have one name; a file that is no template is
    named."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "chat_template.jinja").write_text("{{ messages[0].content }}")
    files = [str(tmp_path / name / "chat_template.jinja") for name in ("one", "two")]
    assert main([*files, "--messages", "30", "--rounds", "1"]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert "one/chat_template" in shown
    assert "two/chat_template" in shown

    broken = tmp_path / "broken.jinja"
    broken.write_text("{% if %}")
    for file in (broken, tmp_path / "absent.jinja"):
        with pytest.raises(SystemExit):
            main([str(file)])
        assert f"{file} is no chat template: " in capsys.readouterr().err


def test_agents_differ() -> None:
    """No two conversations have the same calls, and each can be repeated."""
    assert conversation(30, 1) == conversation(30, 1) != conversation(30, 2)
    assert len(conversation(30, 1)) in (30, 31, 32)
    assert templates.tools() == templates.tools()
    assert templates.tools() is not templates.tools()
