"""``kvist why``: one page with problems, remedies and reasons, from objects as operators write them."""

import io
import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.pool_objects import NOW, REFUSED, WELL, pool, unready
from tests.operator.broken import Broken, gallery, told
from tests.operator.manifested import resource

from kvist.__main__ import main
from kvist.pool_why import explanation, page
from kvist_operator.errors import SpecError
from kvist_operator.plan import PlanVerdict
from kvist_operator.status.reasons import REASONS

LATER = datetime(2026, 11, 21, 14, 30, tzinfo=UTC)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 100 columns, wherever the tests run."""
    monkeypatch.setenv("COLUMNS", "100")


def text(found: dict[str, Any]) -> str:
    """Return the page of an object, two and a half hours after its status was written."""
    return page(explanation(found), LATER)


def plain(found: str) -> str:
    """Return a page without line breaks and indents."""
    return " ".join(found.split())


def test_a_pool_without_a_problem_has_nothing_to_do() -> None:
    """The page of a healthy pool says so, and has its plan's reasons with their sources."""
    shown = text(pool("agents", replace(WELL, kv_tokens=147_000)))

    assert shown.startswith("pool forest/twig: ready (AsAsked)\n")
    assert "what to do\n  nothing: the pool is as its spec describes it, and there is no advice" in shown
    assert "tokens planned for each replica, 147,000 reported (99 %): as planned" in plain(shown)
    assert re.search(r"Available +True +2 h +Serving +everything works", shown)
    assert "maxModelLen                    32768: default; the model allows 40960 [sizing rule]" in shown


@pytest.mark.parametrize("broken", gallery(), ids=lambda broken: str(broken.name))
def test_every_broken_pod_has_its_remedy_on_the_page(broken: Broken) -> None:
    """For each recorded fault the page has the reason, the message, what it means and what to do, once."""
    found = resource("agents")
    found["status"] = {"conditions": list(told(broken).values())}
    shown = text(found)
    known = REASONS[broken.reason]

    assert f"1. {broken.reason} (Ready" in shown
    assert plain(broken.message)[:300] in plain(shown)
    assert f"it means {known.meaning}".replace("`", "") in plain(shown)
    assert f"to do {known.remedy}".replace("`", "") in plain(shown)
    assert shown.count("it means") == len(problems(found))


def problems(found: dict[str, Any]) -> set[str]:
    """Return the reasons of conditions with something to do."""
    reasons = {str(each["reason"]) for each in found["status"]["conditions"]}
    return {reason for reason in reasons if REASONS[reason].remedy != "nothing"}


def test_what_was_not_taken_is_listed() -> None:
    """Smaller sizes, a spec that is refused while the last good plan runs, and changes that wait."""
    found = pool("agents", WELL)
    found["status"]["pendingPlan"] = {"changes": ["--max-num-seqs: 256 → 128"]}
    found["status"]["conditions"] = [
        {**each, **REFUSED} if each["type"] == "Accepted" else each for each in found["status"]["conditions"]
    ]
    kinds = [(each["kind"], each["text"]) for each in explanation(found)["not_taken"]]

    assert kinds[0] == ("size", found["status"]["plan"]["neighbours"][0])
    assert ("refused", REFUSED["message"]) in kinds
    assert kinds[-1] == ("pending", "--max-num-seqs: 256 → 128")
    assert "change that waits for approval or its window: --max-num-seqs: 256 → 128" in text(found)


def test_a_refused_plan_names_the_nearest_that_fits() -> None:
    """The page of a pool that does not fit has the shortfall in its message, and the nearest size."""
    found = pool("minimal", WELL, refused=True)
    shown = text(found)

    assert found["status"]["plan"]["verdict"] == PlanVerdict.REFUSED
    assert "1. DoesNotFit (Ready, Accepted): " in shown
    assert f"nearest that fits: {found['status']['plan']['nearest']}" in plain(shown)


@pytest.mark.parametrize(
    ("reported", "said"),
    [
        (None, "not reported yet"),
        (100_000, "(13 %): less than planned; advice has the likely cause"),
        (2_000_000, "(251 %): more than planned"),
    ],
)
def test_planned_and_reported_cache_are_compared(reported: int | None, said: str) -> None:
    """The comparison uses the bounds of the operator's advice."""
    assert said in plain(text(pool("minimal", replace(WELL, kv_tokens=reported))))


def test_a_spec_that_the_operator_has_not_seen_is_named() -> None:
    """A status of an older generation is no answer about the new spec."""
    found = pool("minimal", WELL)
    found["metadata"]["generation"] = 4

    assert "the operator has not processed the latest change of the spec yet" in plain(text(found))


def test_a_reason_of_a_gateway_is_explained_as_such() -> None:
    """Reasons that no table has are those of the gateway's controller."""
    found = pool("minimal", WELL)
    found["status"]["conditions"].append(
        {"type": "GatewayAttached", "status": "False", "reason": "NoMatchingParent", "message": "no listener"}
    )

    assert "NoMatchingParent (GatewayAttached): no listener" in text(found)
    assert "read the message of the condition" in text(found)


@pytest.mark.parametrize("columns", ["80", "100", "140"])
def test_the_page_fits_the_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is longer than the terminal, or than 100 characters."""
    monkeypatch.setenv("COLUMNS", columns)
    lines = text(pool("agents", unready())).splitlines()

    assert max(len(line) for line in lines if "/" not in line) <= min(100, int(columns))


def written(tmp_path: Path, *found: dict[str, Any]) -> str:
    """Return a file with these objects, as ``kubectl get -o yaml`` writes them."""
    file = tmp_path / "pools.yaml"
    file.write_text(yaml.safe_dump_all(found))
    return str(file)


def test_a_saved_object_needs_no_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``-f`` takes a file or stdin, and JSON has the parts of the page."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    file = written(tmp_path, pool("agents", unready()))
    assert main(["why", "-f", file]) == 0
    assert capsys.readouterr().out.startswith("pool forest/twig: not ready (ImagePull)\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path(file).read_bytes())))
    assert main(["why", "-f", "-", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert found["problems"][0].keys() >= {"reason", "types", "message", "meaning", "remedy", "since"}
    assert found["cache"].keys() == {"planned_tokens", "reported_tokens", "reported_share", "verdict"}
    assert found["plan"]["choices"][0].keys() == {"field", "value", "reason", "source"}
    assert found["plan"]["memory"]["kv_tokens"] == found["cache"]["planned_tokens"]


def test_one_of_several_pools_of_a_file_is_chosen_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a name all are shown; a name that is not there is an error with exit code 2."""
    other = pool("minimal", WELL)
    other["metadata"]["name"] = "oak"
    file = written(tmp_path, pool("agents", WELL), other)

    assert main(["why", "-f", file, "-o", "json"]) == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == ["twig", "oak"]
    assert main(["why", "oak", "-f", file, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "oak"
    assert main(["why", "elm", "-f", file]) == 2
    assert capsys.readouterr().err == f"kvist: --filename {file}: has no pool elm\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("kind: Pod\nmetadata: {name: a}\n", "is not an InferencePool of kvist.dev, but Pod"),
        (yaml.safe_dump(resource("minimal")), "has no status, which the operator writes: save the pool with"),
        ("a: [", "cannot be read"),
        ("", "has no YAML object"),
    ],
)
def test_a_file_that_cannot_be_explained_is_an_error_in_one_line(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the option and the remedy, and the exit code is 2."""
    file = tmp_path / "pool.yaml"
    file.write_text(content)
    assert main(["why", "-f", str(file)]) == 2
    shown = capsys.readouterr()

    assert shown.out == ""
    assert shown.err.startswith(f"kvist: --filename {file}: ")
    assert said in shown.err


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
MINIMAL = pool("minimal", WELL)
FIELDS = ("conditions", "plan", "advice", "reportedKvTokens", "pendingPlan", "model", "readyReplicas", "url")


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES), VALUES)
def test_any_status_can_be_shown(status: dict[str, Any], spec: Any) -> None:
    """An object that someone has edited, or that another release wrote, is shown as far as it can be read."""
    found = {"metadata": {"name": "twig"}, "spec": spec, "status": status}

    assert page(explanation(found), NOW).startswith("pool default/twig: ")


@given(st.sampled_from(("memory", "accelerator", "parallelism", "choices", "neighbours", "verdict")), VALUES)
def test_any_plan_can_be_shown(field: str, value: Any) -> None:
    """A plan with a field of an unexpected type is shown without it."""
    status = {**MINIMAL["status"], "plan": {**MINIMAL["status"]["plan"], field: value}}
    found = {**MINIMAL, "status": status}

    assert page(explanation(found), NOW).startswith("pool forest/twig: ")


def test_the_error_of_a_spec_is_its_problem() -> None:
    """A spec that is invalid has its field and remedy on the page."""
    found = pool("minimal", WELL, error=SpecError("spec.engine.maxModelLen", "is below 128: raise it"))

    assert "1. InvalidSpec (Ready, Accepted): spec.engine.maxModelLen: is below 128: raise it" in text(found)
