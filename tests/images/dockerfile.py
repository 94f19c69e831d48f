"""Reads a Dockerfile: only what ours use, and fails for the rest. Pure."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_VARIABLE: Final = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True)
class Copy:
    """Files into the image."""

    sources: tuple[str, ...]
    target: str
    stage: str = ""
    """Where from; empty: the context."""


@dataclass(frozen=True)
class Run:
    """A command of a shell."""

    command: str


@dataclass
class Stage:
    """From one FROM to the next."""

    base: str
    name: str
    steps: list[Copy | Run] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()


def read(path: Path, arguments: Mapping[str, str] | None = None, *, path_variable: str = "") -> list[Stage]:
    """The stages; ``arguments``: of ``--build-arg``. ``path_variable``: PATH of the base image."""
    known: dict[str, str] = {}
    stages: list[Stage] = []
    for word, rest in _instructions(path.read_text()):
        if word == "ARG":
            name, _, default = rest.partition("=")
            known[name] = (arguments or {}).get(name, default or known.get(name, ""))
        elif word == "FROM":
            base, _, name = _filled(rest, known).partition(" AS ")
            stages.append(Stage(base, name, environment={"PATH": path_variable}))
        else:
            _step(stages[-1], word, rest, known)
    return stages


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    found = [line.split(maxsplit=1) for line in joined]
    return [(word, rest) for word, rest in found]


def _filled(text: str, known: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: known[match[1]], text)


def _step(stage: Stage, word: str, rest: str, known: Mapping[str, str]) -> None:
    match word:
        case "RUN":
            stage.steps.append(Run(rest))
        case "COPY":
            stage.steps.append(_copy(rest))
        case "ENV":
            stage.environment |= _pairs(rest, stage.environment)
        case "LABEL":
            stage.labels |= _pairs(rest, known)
        case "USER":
            stage.user = rest
        case "EXPOSE":
            stage.ports = tuple(int(port) for port in rest.split())
        case "ENTRYPOINT":
            stage.entrypoint = tuple(json.loads(rest))
        case _:
            raise ValueError(f"{word}: this reader does not know it")


def _copy(rest: str) -> Copy:
    words = rest.split()
    stage = words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else ""
    return Copy(tuple(words[:-1]), words[-1], stage)


def _pairs(rest: str, known: Mapping[str, str]) -> dict[str, str]:
    found = re.findall(r'([\w.]+)=("[^"]*"|\S+)', rest)
    return {name: _filled(value.strip('"'), known) for name, value in found}
