"""The guide for those who come from something else: its pools are planned, its flags are the translator's."""

import re
from dataclasses import fields
from typing import Any

import pytest
import yaml

from kvist_epp.compat.llmd import config, translated
from kvist_epp.compat.llmd.flags import FLAGS
from kvist_epp.settings.settings import Settings
from kvist_operator.plan import Plan, PlanVerdict
from tests.crd.cases import planned
from tests.docs import GUIDES
from tests.shapes import VERSIONS, faults

GUIDE = (GUIDES / "migrate.md").read_text()
DOCUMENTS: list[Any] = [
    yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
]
POOLS = [one for one in DOCUMENTS if one.get("apiVersion") == "kvist.dev/v1alpha1"]


def rows(part: str) -> dict[str, str]:
    """Return first and second cell of the tables of a section."""
    text = GUIDE.partition(f"\n## {part}")[2].partition("\n## ")[0]
    cells = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {first.strip(): second.strip() for first, second in cells}


def flags_of(plan: Plan) -> dict[str, str]:
    """Return each flag of a command line with the word after it."""
    words = list(plan.argv)
    return {word: words[at + 1] for at, word in enumerate(words[:-1]) if word.startswith("--")}


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool["metadata"]["name"])
def test_every_pool_is_taken_and_fits(pool: dict[str, Any]) -> None:
    """Every pool of the guide is valid by the CRD and fits by the plan."""
    assert faults(pool, VERSIONS[0]) == []
    assert planned(pool).verdict is PlanVerdict.FITS


def test_the_pool_runs_what_was_written_by_hand() -> None:
    """Every flag of the Deployment is in the plan's command line, with the same value."""
    [before] = [one["args"] for one in DOCUMENTS if "args" in one]
    found = planned(POOLS[0])
    made = flags_of(found)
    told = {word: before[at + 1] for at, word in enumerate(before[:-1]) if word.startswith("--")}
    told.pop("--enable-prefix-caching")
    assert before[1] == found.argv[1]
    assert "--enable-prefix-caching" in found.argv
    assert {flag: float(v) if v[0].isdigit() else v for flag, v in told.items()} == {
        flag: float(made[flag]) if made[flag][0].isdigit() else made[flag] for flag in told
    }


def test_the_other_pool_runs_what_production_stack_ran() -> None:
    """The fields of the VLLMRuntime are flags of the plan."""
    [runtime] = [one["spec"] for one in DOCUMENTS if one.get("kind") == "VLLMRuntime"]
    made = flags_of(planned(POOLS[1]))
    assert made["--max-model-len"] == str(runtime["model"]["maxModelLen"])
    assert made["--max-num-seqs"] == str(runtime["model"]["maxNumSeqs"])
    assert made["--gpu-memory-utilization"] == runtime["vllmConfig"]["gpuMemoryUtilization"]
    assert [f"--kv-cache-dtype={made['--kv-cache-dtype']}"] == runtime["vllmConfig"]["extraArgs"]


def test_every_flag_of_llm_d_has_its_place() -> None:
    """The guide lists every translated or reported flag, and the main ones that are the same."""
    told = {
        word.removeprefix("--")
        for cell in rows("From llm-d's router")
        for word in re.findall(r"`(--[a-z-]+|--v)`", cell)
    }
    ours = {field.metadata["flag"].removeprefix("--") for field in fields(Settings)}
    assert told - set(FLAGS) - ours == {"config-file", "config-text"}
    assert set(FLAGS) - told == set()


def test_flags_that_the_guide_calls_silent_give_no_note() -> None:
    """The translator accepts the flags of that row without a note."""
    [silent] = [cell for cell, text in rows("From llm-d's router").items() if "accepted silently" in text]
    words = [f"{flag}=1" for flag in re.findall(r"`(--[a-z-]+)`", silent)]
    assert len(words) == 8
    assert translated(words).notes == ()


def test_every_plugin_that_the_guide_names_is_known() -> None:
    """The reader of the configuration file knows every plugin that the guide names."""
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", " ".join(rows("From llm-d's router"))))
    known = {*config.COST, *config.OTHERWISE, *config.PICKERS, "file-discovery"}
    assert named - known == set()
    assert len(named) >= 6
