"""Promises of the command line: what the plan writes, which flags belong to it, and how it is spelled."""

import pytest
from tests.operator.sweep import argument_lists

from kvist_operator.engine_flags import (
    AFFECTS_MEMORY,
    GONE,
    MERGED,
    OWNED,
    SECRETS,
    SHARED,
    YIELDING,
    EngineArgs,
)
from kvist_operator.engine_version import EngineVersion, engine_version
from kvist_operator.extra_args import read_extra
from kvist_operator.flag_table import (
    FILE,
    LATEST,
    VERSIONS,
    dotted,
    flags,
    nearest_version,
    options,
    short_options,
    versions_with,
)


def test_no_flag_has_two_owners() -> None:
    """A flag belongs always to the plan, in some plans, or yields to the user: one of them."""
    groups = [set(OWNED), set(SHARED), set(YIELDING), {MERGED}, set(SECRETS), set(GONE)]

    assert sum(map(len, groups)) == len(set().union(*groups))
    assert AFFECTS_MEMORY & set(OWNED) == set()


@pytest.mark.parametrize("version", VERSIONS, ids=dotted)
def test_the_tables_name_flags_that_exist(version: tuple[int, int]) -> None:
    """Flags of the plan are flags of every known version; those that are gone are flags of none."""
    by_plan = {field.replace("_", "-") for field in EngineArgs.__dataclass_fields__} - {"extra"}
    known = set(flags(version))

    assert by_plan - known == set()
    assert {*OWNED, *SHARED, *YIELDING, MERGED, *SECRETS} - known == set()
    assert {f"--{name}" for name in GONE} & set(options(version)) == set()


def test_flags_that_change_memory_exist() -> None:
    """Each is a flag of some known version, so that the list has no misspelling."""
    assert {name for name in AFFECTS_MEMORY if not versions_with(f"--{name}")} == set()


def test_the_table_differs_between_versions() -> None:
    """The table knows what came, what went and what changed."""
    assert versions_with("--watchdog-config") == [(0, 33)]
    assert versions_with("--enable-mamba-fine-grained-prefix-cache") == [(0, 30)]
    assert "CUTLASS_MSA" in flags((0, 30))["attention-backend"].choices
    assert "all" in flags((0, 31))["mamba-cache-mode"].choices
    assert "all" not in flags((0, 32))["mamba-cache-mode"].choices
    assert "--disable-prefix-caching" in options(LATEST)
    assert "--disable-prefix-caching" not in options((0, 32))
    assert short_options()["tp"] == "tensor-parallel-size"
    assert FILE == "engine_flags.json"


@pytest.mark.parametrize(
    ("version", "nearest"),
    [
        ((0, 29), (0, 30)),
        ((0, 4), (0, 30)),
        ((0, 32), (0, 32)),
        ((0, 99), LATEST),
        ((1, 0), LATEST),
        (None, LATEST),
    ],
)
def test_every_version_has_a_nearest_one(version: tuple[int, int] | None, nearest: tuple[int, int]) -> None:
    """Older versions get the oldest known flags, newer and unknown ones the newest."""
    assert nearest_version(version) == nearest


@pytest.mark.parametrize("version", VERSIONS, ids=dotted)
def test_every_plan_is_spelled_as_every_version_declares(
    version: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each word of every plan of the catalogue on each eighth accelerator is a flag of the version, letter by
    letter, or one of as many values of the kind that it takes."""
    monkeypatch.setattr("kvist_operator.extra_args.OWNED", {})
    monkeypatch.setattr("kvist_operator.extra_args.BY_VALUE", {})
    lists = argument_lists(8)
    named = {each.spelled: each.flag for line in lists for each in read_extra(line[1:], _exactly(version))}

    assert len(lists) > 150
    assert len(named) > 30
    assert set(named) <= set(options(version))


def _exactly(version: tuple[int, int]) -> EngineVersion:
    return engine_version("vllm/vllm-openai:latest", dotted(version))


def test_the_command_says_only_what_was_decided() -> None:
    """Arguments that are None or off are left out; prefix caching that is off is spelled out."""
    args = EngineArgs(
        model="m", tensor_parallel_size=2, enable_prefix_caching=False, gpu_memory_utilization=0.9
    )

    assert args.names() == {"tensor-parallel-size", "enable-prefix-caching", "gpu-memory-utilization"}
    assert args.to_argv() == [
        "serve",
        "m",
        "--tensor-parallel-size",
        "2",
        "--gpu-memory-utilization",
        "0.9",
        "--no-enable-prefix-caching",
    ]


def test_objects_are_compact_json() -> None:
    """Objects are compact JSON in one word, so that no shell is needed."""
    args = EngineArgs(model="m", hf_overrides={"a": {"b": 1}})

    assert args.to_argv()[-1] == '{"a":{"b":1}}'
