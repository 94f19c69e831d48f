"""A plan as text for a terminal: verdict, memory as a bar, command, and the reason of every choice.

``kvist plan`` shows a plan that it has made, ``kvist why`` the one in a pool's status; the parts that both
show take plain values in the spelling of ``Plan.to_dict``.
"""

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kvist_operator.plan import Plan, PlanVerdict

NO_BREAK: Final = "\N{NO-BREAK SPACE}"
WIDTH: Final = 100
"""Longest line; a narrower terminal has shorter ones."""
BAR: Final = 80
"""Characters of the longest bar."""
PARTS: Final = (
    ("weights", "weights_gib", "█"),
    ("activations", "activations_gib", "▓"),
    ("graphs", "graphs_gib", "▒"),
    ("overhead", "overhead_gib", "░"),
    ("KV cache", "kv_gib", "◆"),
)
_SIZES: Final = (("TP", "tensor"), ("PP", "pipeline"), ("DP", "data"), ("DCP", "context"), ("EP", "expert"))


def print_text(text: str) -> None:
    """Print the result of a command. A reader that stops early (``| head``) is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def plan_page(plan: Plan) -> str:
    """Return the page of ``kvist plan``; of a pool with roles that of each role."""
    if plan.prefill is None:
        return _page(plan)
    parts = (("prefill", plan.prefill), ("decode", replace(plan, prefill=None)))
    return "\n\n".join(f"=== engines for {role} ===\n{_page(each)}" for role, each in parts)


def _page(plan: Plan) -> str:
    whole = plan.to_dict()
    name = plan.hardware.accelerator.name
    memory = [*bar(whole["memory"], name, caches=plan.memory.caches), _held(plan, whole["memory"])]
    return "\n".join([*_head(plan), "", *memory, "", *_command(plan), "", "why", *reasons(whole["choices"])])


def from_status(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan of a pool's status in the spelling of ``Plan.to_dict``; names in ``env`` stay."""
    if isinstance(prefill := plan.get("prefill"), Mapping):
        rest = {key: value for key, value in plan.items() if key != "prefill"}
        return {**from_status(rest), "prefill": from_status(prefill)}
    return {
        _snake(key): {_snake(k): v for k, v in value.items()}
        if isinstance(value, Mapping) and key != "env"
        else value
        for key, value in plan.items()
    }


def sizes(parallelism: Mapping[str, Any]) -> str:
    """Return the degrees of parallelism above 1, such as ``TP 4 × PP 2``; empty without any."""
    return " × ".join(
        f"{short} {degree}" for short, name in _SIZES if (degree := parallelism.get(name, 1)) > 1
    )


def _head(plan: Plan) -> list[str]:
    whole = plan.to_dict()
    gpus, spread = whole["accelerator"], sizes(whole["parallelism"])
    nodes = f" on {gpus['nodes']} nodes" if gpus["nodes"] > 1 else ""
    verdict = f"{plan.verdict}: {gpus['per_replica']} × {gpus['name']}{nodes}{', ' if spread else ''}{spread}"
    lines = [
        "; ".join((verdict, *plan.notes)),
        f"model: {plan.model}",
    ]
    lines += [f"unverified: {doubt}" for doubt in plan.doubts]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    if plan.verdict is PlanVerdict.REFUSED:
        lines.append(f"lacks {whole['shortfall_gib']} GiB on each GPU; {plan.nearest}")
        return lines
    price = plan.price_per_hour
    if price is not None:
        product = f" ({plan.layout.gpus} × {plan.hardware.price:g})" if plan.layout.gpus > 1 else ""
        lines.append(f"price of a replica: {price:.2f} per hour{product}")
    lines += [f"{'cheaper' if each.cheaper else 'dearer'}: {each}" for each in plan.neighbours]
    return lines


def bar(memory: Mapping[str, Any], accelerator: str, *, caches: bool) -> list[str]:
    """Return the memory of one accelerator as a bar with its legend. ``caches``: the model has a KV cache."""
    total = memory["per_gpu_gib"]
    length = min(BAR, width() - 2)
    drawn, sums = "", 0.0
    for _, key, mark in PARTS:
        sums += max(0.0, memory[key])
        drawn += mark * (min(length, round(length * sums / (total or sums or 1))) - len(drawn))
    parts = PARTS if caches else PARTS[:-1]
    legend = [f"{mark} {name} {memory[key]:.2f}" for name, key, mark in parts]
    legend.append(f"· free {total - memory['usable_gib'] + max(0.0, memory['unused_gib']):.2f}")
    unbroken = "  ".join(entry.replace(" ", NO_BREAK) for entry in legend)
    return [
        f"memory of each {accelerator}: {total:.2f} GiB",
        f"[{drawn:·<{length}}]",
        *(line.replace(NO_BREAK, " ") for line in textwrap.wrap(unbroken, width())),
    ]


def _held(plan: Plan, memory: Mapping[str, Any]) -> str:
    """Return what a replica holds at once: sequences in its KV cache, or the prompts of a step."""
    longest = f"{plan.settings.max_len:,} tokens"
    if plan.settings.pooling:
        step = f"{plan.settings.batched_tokens:,} tokens of {plan.settings.sequences:,} prompts"
        cache = "there is no KV cache"
        if plan.memory.caches:
            cache = "the KV cache has prompts only while they are computed"
        return f"a step of an engine: up to {step}, each up to {longest}; {cache}"
    sequences = f"{memory['max_concurrency']:g} sequences of {longest}"
    each = f"{memory['kv_gib_per_sequence']:.2f} GiB each"
    return f"KV cache of a replica: {memory['kv_tokens']:,} tokens, {sequences} ({each})"


def _command(plan: Plan) -> list[str]:
    if not plan.argv:
        return ["no command, because the plan is refused"]
    return command(plan.argv, plan.env)


def command(argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the command of an engine as a shell would take it, and its environment."""
    lines, line, most = [], "vllm", width()
    for word in argv:
        plain = all(c.isalnum() or c in "-_./=,:@" for c in word)
        quoted = word if plain else f"'{word}'"
        if word.startswith("--") and len(line) + len(quoted) > most - 4:
            lines.append(f"{line} \\")
            line = f"   {quoted}"
        else:
            line = f"{line} {quoted}"
    return [*lines, line, *(f"env {name}={value}" for name, value in env.items())]


def reasons(choices: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return each choice with its value, its reason and the source of that, in two columns."""
    found = list(choices)
    wide = max((len(choice["field"]) for choice in found), default=0)
    lines: list[str] = []
    for choice in found:
        text = f"{shown(choice['value'])}: {choice['reason']} [{choice['source']}]"
        wrapped = textwrap.wrap(text, width() - wide - 4, break_long_words=False)
        lines += [f"  {choice['field'] if not i else '':<{wide}}  {part}" for i, part in enumerate(wrapped)]
    return lines


def width() -> int:
    """Return the columns to write for: those of the terminal, from 60 to 100."""
    return max(60, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


def shown(value: Any) -> str:
    """Return a value of a choice as text."""
    return json.dumps(value) if isinstance(value, dict | bool) else str(value)


def _snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda found: f"_{found[0].lower()}", name)
