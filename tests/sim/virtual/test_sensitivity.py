"""The page of the policy, and what halving and doubling a constant changes."""

import ast
import subprocess
import sys

import msgspec
import pytest

from kvist_epp.load.tpot_admission import LIGHT_TOKENS
from kvist_sim.virtual import sensitivity
from kvist_sim.virtual.sensitivity import Constant, Runs, Variant, constants, difference, page


def test_the_page_is_what_the_command_writes() -> None:
    """docs/policy.md has the constants, terms and results as they are now."""
    runs = msgspec.json.decode(sensitivity.RUNS.read_bytes(), type=Runs)
    assert sensitivity.PAGE.read_text() == page(runs), "run: python -m kvist_sim.virtual.sensitivity --write"


def test_every_constant_has_an_origin() -> None:
    """No number of the policy is without a docstring that says where it comes from."""
    assert [one.key for one in constants() if len(one.origin.split()) < 3] == []
    assert len({one.key for one in constants()}) == len(constants())


def test_a_constant_is_changed_where_it_is_defined() -> None:
    """In a process of its own each constant has the new value, and no other constant changes with it."""
    code = (
        "from kvist_sim.virtual.sensitivity import change, constants\n"
        "for one in constants():\n"
        "    change(one.key, 0.5)\n"
        "print([(one.key, one.value) for one in constants()])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    changed = dict(ast.literal_eval(out))
    assert changed == {one.key: pytest.approx(one.value / 2, abs=1) for one in constants()}


def test_a_constant_is_changed_wherever_it_is_imported() -> None:
    """LIGHT_TOKENS changes in its own module and in the one that imports it, and nowhere else."""
    code = (
        "from kvist_sim.virtual.sensitivity import change; change('tpot_admission.LIGHT_TOKENS', 2.0);"
        "from kvist_epp.load import endpoint_load as a, tpot_admission as b;"
        "print(a.LIGHT_TOKENS, b.LIGHT_TOKENS)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == [str(2 * LIGHT_TOKENS)] * 2


def test_a_difference_is_the_mean_over_cells_with_its_error() -> None:
    """Cells are paired with the baseline's; without results it says so."""
    assert difference({"a": 90.0, "b": 92.0}, {"a": 92.0, "b": 92.0}) == "-1.0 ± 1.0"
    assert difference({}, {"a": 92.0}) == "not measured"


def test_results_survive_the_file() -> None:
    """Results are read back from the file as they were written."""
    runs = Runs("machine", 8, 1500, "abc", {"chat": 99.0}, [Variant("cost.evicted", 0.5, {"chat": 98.0})])
    assert msgspec.json.decode(msgspec.json.encode(runs), type=Runs) == runs
    assert isinstance(constants()[0], Constant)
