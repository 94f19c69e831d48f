"""``python -m kvist_sim.bench.templates``: what chat templates cost for agents.

An agent calls one or two of 30 tools in each turn and sends all messages so far; no two agents have the same
calls. Measured are chats of some eight messages with tools that come for the first time and again, and chats
of 40, 120 and 300 messages: rendered as a whole, and as the next turn of a conversation that has grown.
Medians of CPU time in microseconds, of ``Template`` alone: the body is parsed before. A prompt is wrong if it
is not the one that the template writes as a whole.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any, Final

import msgspec
from jinja2 import TemplateError
from rich.console import Group, RenderableType
from rich.table import Table

from kvist_epp.app.process import freeze_startup_objects
from kvist_epp.prompt.chat import UnrenderableError
from kvist_epp.prompt.checkpoints import MIN_MESSAGES
from kvist_epp.prompt.request_types import Chat
from kvist_epp.prompt.template import Template
from kvist_epp.prompt.tools import template_tools
from kvist_sim import model
from kvist_sim.bench.harness.proof import FAILED, WIDTH, console, publish, stamped

TOOLS: Final = 30
FEW: Final = 8
SIZES: Final = (40, 120, 300)
"""Messages of the chats."""
ROUNDS: Final = 50
GROWTH: Final = 40
"""Messages between two turns of a conversation that grows."""
BODY_BYTES: Final = 10_000_000
"""Size of the request as far as the bounds on work go."""
SPECIALS: Final = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of CPU; None: the template works too long or refuses the chat."""

    messages: int
    whole_us: float | None
    next_us: float | None


@dataclass(frozen=True, slots=True)
class TemplateFigures:
    """The costs of one template."""

    name: str
    new_tools: Cost
    """A few messages; as a whole: with tools that were never seen, next: with the same tools again."""
    turns: Sequence[Cost]
    wrong: int
    """Prompts that were not those of the template."""


@dataclass(frozen=True, slots=True)
class TemplatesReport:
    """Figures of all templates."""

    rows: Sequence[TemplateFigures]

    def broken(self) -> list[str]:
        """Return the templates with wrong prompts, in words."""
        return [f"{row.name}: {row.wrong} wrong prompts" for row in self.rows if row.wrong]


def tools() -> list[dict[str, Any]]:
    """Return 30 tools with nested parameters, as the template sees them; new objects each time."""
    text = {"type": "string", "description": "The absolute path of the file that is to be changed"}
    edit = {"type": "object", "properties": {"old": text, "new": text}, "required": ["old"]}
    properties = {
        "path": text,
        "mode": {"type": "string", "enum": ["insert", "replace"], "description": "What to do"},
        "count": {"type": "integer", "description": "How often"},
        "edits": {"type": "array", "items": edit, "description": "The changes"},
    }
    parameters = {"type": "object", "properties": properties, "required": ["path", "mode"]}
    described = "Changes a file. Read the file before; the change fails if the text is not in it."
    return template_tools(
        [
            {
                "type": "function",
                "function": {"name": f"edit_{number}", "description": described, "parameters": parameters},
            }
            for number in range(TOOLS)
        ]
    )


def conversation(size: int, number: int) -> list[dict[str, Any]]:
    """Return messages of an agent as a client sends them, ids and arguments of its own in each call."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent that works on a repository."},
        {"role": "user", "content": f"Mend the test of issue {number}."},
    ]
    draw = random.Random(number)
    while len(messages) < size:
        calls = []
        for _ in range(draw.choice((1, 1, 2))):
            at = len(messages)
            arguments = json.dumps({"path": f"/src/{draw.random()}.py", "mode": "insert", "count": at})
            function = {"name": f"edit_{draw.randrange(TOOLS)}", "arguments": arguments}
            calls.append({"id": f"{draw.randrange(10**9):09}", "type": "function", "function": function})
        content = draw.choice((None, "I look at the file."))
        messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        found = "a line of the file\n" * 10
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": found} for call in calls]
    decoded: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(messages))
    return decoded


def measure(name: str, source: str, sizes: Sequence[int], rounds: int) -> TemplateFigures:
    """Measure one template. Raises jinja2.TemplateError if the source is none."""
    template = Template(source, SPECIALS)
    seen = tools()
    wrong = 0
    known = []
    for number in range(rounds):
        chat = conversation(FEW, number)
        known.append((_timed(template, Chat(chat, tools()))[0], _timed(template, Chat(chat, seen))[0]))
    turns = []
    for size in sizes:
        times = []
        for number in range(rounds):
            messages = conversation(size, number)
            last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
            for count in (*range(MIN_MESSAGES, last, GROWTH), last):
                _timed(template, Chat(messages[:count], seen))
            following, prompt = _timed(template, Chat(messages, seen))
            whole, expected = _timed(template, Chat(messages, seen), whole=True)
            wrong += expected is not None and prompt != expected
            times.append((whole, following))
        turns.append(Cost(size, *_medians(times)))
    return TemplateFigures(name, Cost(FEW, *_medians(known)), turns, wrong)


def _timed(template: Template, chat: Chat, *, whole: bool = False) -> tuple[float | None, str | None]:
    began = process_time()
    try:
        prompt = template.complete(chat) if whole else template.render(chat, BODY_BYTES)
    except UnrenderableError:
        return None, None
    return (process_time() - began) * 1e6, prompt


def _medians(times: Sequence[tuple[float | None, float | None]]) -> Iterator[float | None]:
    for column in zip(*times, strict=True):
        measured = [time for time in column if time is not None]
        yield statistics.median(measured) if measured else None


def table(report: TemplatesReport) -> RenderableType:
    """Return the figures."""
    shown = Table(box=None)
    shown.add_column("template", overflow="fold")
    sizes = [cost.messages for cost in report.rows[0].turns]
    for title in (f"{FEW}, new tools", "again", *(f"{size}: whole\nnext" for size in sizes)):
        for part in title.split("\n"):
            shown.add_column(part, justify="right")
    for row in report.rows:
        costs = (row.new_tools, *row.turns)
        shown.add_row(row.name, *(_shown(time) for cost in costs for time in (cost.whole_us, cost.next_us)))
    return Group(
        f"us of CPU for an agent's chat with {TOOLS} tools, by the number of messages: as a whole, and as",
        "the next turn of a conversation; refused: the template fails, or takes more than a render may",
        "",
        shown,
    )


def _shown(time: float | None) -> str:
    return "refused" if time is None else f"{time:,.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what is asked for; non-zero when a prompt was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m kvist_sim.bench.templates",
        description=__doc__,
        epilog="example: python -m kvist_sim.bench.templates ~/models/*/chat_template.jinja",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="templates (default: the simulator's)")
    parser.add_argument("--messages", type=int, nargs="+", default=SIZES, metavar="N")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; -: to stdout")
    parser.add_argument("--write-docs", metavar="FILE", help="write the table into docs/benchmarks.md")
    options = parser.parse_args(argv)
    sources = _sources(parser, [Path(file) for file in options.files])
    found = [measure(name, source, options.messages, options.rounds) for name, source in sources]
    report = TemplatesReport(found)
    rows = {"rows": [asdict(row) for row in report.rows]}
    publish("templates", stamped(rows, report), table(report), options, width=WIDTH)
    for broken in report.broken():
        console().print(f"error: {broken}", style="red", markup=False)
    return FAILED if report.broken() else 0


def _sources(parser: argparse.ArgumentParser, files: Sequence[Path]) -> list[tuple[str, str]]:
    """Return names and texts of templates; a file that is none ends the command."""
    if not files:
        return [("simulator", _own())]
    stems = [file.stem for file in files]
    found = []
    for file in files:
        name = file.stem if stems.count(file.stem) == 1 else f"{file.parent.name}/{file.stem}"
        try:
            source = file.read_text(encoding="utf-8")
            Template(source, SPECIALS)
        except (OSError, UnicodeDecodeError, TemplateError) as error:
            parser.error(f"{file} is no chat template: {error}")
        found.append((name, source))
    return found


def _own() -> str:
    settings = json.loads((model.folder() / "tokenizer_config.json").read_text())
    return str(settings["chat_template"])


if __name__ == "__main__":
    freeze_startup_objects()  # the collector as in the picker's own process
    sys.exit(main())
