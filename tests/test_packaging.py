"""The packaging traps that have been seen failing, each guarded."""

import ast
import operator
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OUTER = ("common", "operator", "epp", "sim", "cli")
SOURCES = [path for outer in OUTER for path in (ROOT / outer).rglob("*.py") if "/pb/" not in str(path)]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_standard_operator_module_is_not_shadowed() -> None:
    """``import operator`` still means the standard library."""
    assert str(operator.__file__).startswith(sysconfig.get_path("stdlib"))


@pytest.mark.parametrize("outer", OUTER)
def test_outer_folders_are_no_packages(outer: str) -> None:
    """An ``__init__.py`` in an outer folder would shadow or enter the wheel."""
    assert not (ROOT / outer / "__init__.py").exists()


@pytest.mark.parametrize("outer", OUTER)
def test_outer_folders_hold_only_their_package(outer: str) -> None:
    """The editable install puts outer folders on the path, so no module may lie directly inside."""
    assert list((ROOT / outer).glob("*.py")) == []


def test_test_folders_are_no_packages() -> None:
    """``tests/operator/__init__.py`` would register itself as ``operator``."""
    inner = [path for path in (ROOT / "tests").rglob("__init__.py") if path.parent != ROOT / "tests"]
    assert inner == []


def test_no_module_is_named_like_the_standard_library() -> None:
    """A module named like one of the standard library breaks when a file is run by its path."""
    allowed = {"__init__", "__main__"}
    stems = {path.stem for path in SOURCES} - allowed
    assert stems & set(sys.stdlib_module_names) == set()


@pytest.mark.parametrize("script", sorted(set(PROJECT["project"]["scripts"]) - {"kubectl_complete-kvist"}))
def test_console_scripts_answer_help(script: str) -> None:
    """Each installed command starts and shows examples."""
    shown = subprocess.run(
        [Path(sys.executable).parent / script, "--help"], capture_output=True, text=True, check=True
    )
    assert "example" in shown.stdout


def test_the_completion_of_kubectl_is_installed() -> None:
    """kubectl finds the program that completes the words of its plugin, which answers in cobra's form."""
    program = Path(sys.executable).parent / "kubectl_complete-kvist"
    ended = subprocess.run([program, "po"], capture_output=True, text=True, check=True)
    assert ended.stdout == "pools\n:4\n"


def test_files_stay_small() -> None:
    """No file of ours is longer than 400 lines."""
    long = {
        str(path.relative_to(ROOT)): n for path in SOURCES if (n := len(path.read_text().splitlines())) > 400
    }
    assert long == {}


def test_functions_stay_small() -> None:
    """The median function of the source is under ten lines."""
    lengths = sorted(
        node.end_lineno - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    )
    assert lengths[len(lengths) // 2] < 10


def test_package_docstrings_name_their_modules() -> None:
    """A package docstring that lists modules lists each module of its folder, and no other."""
    wrong = {}
    for package in (path for path in SOURCES if path.name == "__init__.py"):
        listed = set(
            re.findall(
                r"^- ``(\w+)``:", ast.get_docstring(ast.parse(package.read_text())) or "", re.MULTILINE
            )
        )
        modules = {path.stem for path in package.parent.glob("[!_]*.py")}
        modules |= {path.parent.name for path in package.parent.glob("[!_]*/__init__.py")} - {"pb"}
        if listed and listed - {"pb"} != modules:
            wrong[str(package.relative_to(ROOT))] = sorted(listed - {"pb"} ^ modules)
    assert wrong == {}


def test_the_wheel_holds_the_packages_and_nothing_else(tmp_path: Path) -> None:
    """The built wheel has our packages, their data and no outer folder."""
    import zipfile

    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT],
        check=True,
        capture_output=True,
    )
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    ours = {"kvist", "kvist_epp", "kvist_kube", "kvist_operator", "kvist_sim"}
    assert tops == {*ours, f"kvist-{PROJECT['project']['version']}.dist-info"}
    assert {f"{package}/py.typed" for package in ours} <= set(names)
    assert "kvist_operator/models/catalogue.yaml" in names
