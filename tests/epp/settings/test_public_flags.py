"""Tests that every flag, variable and option of revision 4ff51b7 is still accepted, with the same default.

``flags_4ff51b7.json`` was generated from that revision: ``{program: {flag: [variable, default]}}``, and for
``kvist`` the options of each command (null for a command that passes its arguments on).
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kvist.commands import COMMANDS
from kvist_epp.settings import settings as picker
from kvist_epp.settings.arguments import format_value
from kvist_operator.process import settings as operator

KNOWN: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "flags_4ff51b7.json").read_text(encoding="utf-8")
)
PROGRAMS: dict[str, Any] = {"kvist-epp": picker, "kvist-operator": operator}
SETTINGS: dict[str, Any] = {"kvist-epp": picker.Settings, "kvist-operator": operator.OperatorSettings}

CHANGED = {"--max-endpoints": "0", "--stream-idle-timeout": "3600.0"}
"""Defaults that were found to be wrong since: most gateways take no list, and some need the stream for as
long as an engine computes (decision 60)."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_flag_and_variable_is_still_accepted(name: str) -> None:
    """Each old flag and variable sets exactly one field, whose default is unchanged but for ``CHANGED``."""
    module = PROGRAMS[name]
    settings = SETTINGS[name]
    fields = dataclasses.fields(settings)
    by_flag = {f.metadata[key]: f for key in ("old_flag", "flag") for f in fields}
    for flag, (variable, old_default) in KNOWN[name].items():
        default = CHANGED.get(flag, old_default)
        assert flag in by_flag
        assert format_value(by_flag[flag].default) == default
        assert settings.from_args([f"{flag}={default}"]) == settings()
        assert module.PROGRAM.variable(flag) == variable
        if isinstance(by_flag[flag].default, int | float):
            with pytest.raises(Exception, match=variable):
                settings.from_args([], {variable: "no number"})


def test_no_two_fields_have_the_same_flag() -> None:
    """A flag, with its old name, belongs to one field."""
    for settings in SETTINGS.values():
        fields = dataclasses.fields(settings)
        names = [f.metadata[key] for key in ("flag", "old_flag") for f in fields if f.metadata[key]]
        assert len(set(names)) == len(names)


def test_every_option_of_the_command_line_is_still_accepted() -> None:
    """Each command and option of ``kvist`` still exists."""
    found: dict[str, set[str] | None] = {}
    for command in COMMANDS:
        parser = argparse.ArgumentParser(add_help=False)
        if command.options is not None:
            command.options(parser)
        names = {name for a in parser._actions for name in (a.option_strings or [a.dest])}
        found[" ".join(command.words)] = None if command.options is None else names
    for words, options in KNOWN["kvist"].items():
        assert words in found
        assert (options is None) == (found[words] is None)
        assert set(options or ()) <= (found[words] or set())
