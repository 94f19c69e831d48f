"""``kvist render`` from outside: YAML on stdout, what is missing on stderr, exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.crd.cases import FOLDER

from kvist.__main__ import main


def pool(case: str) -> str:
    """Path of one of tests/crd."""
    [path] = FOLDER.glob(f"*/{case}.yaml")
    return str(path)


def test_the_objects_are_yaml_in_the_order_they_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    """The output is the same each time: accounts first, workloads before routes, and no Secret among them."""
    assert main(["render", "-f", pool("route")]) == 0
    first = capsys.readouterr()
    assert main(["render", "-f", pool("route")]) == 0
    again = capsys.readouterr()
    kinds = [document["kind"] for document in yaml.safe_load_all(first.out)]

    assert first.out == again.out
    assert kinds.index("ServiceAccount") < kinds.index("Deployment") < kinds.index("HTTPRoute")
    assert "Secret" not in kinds
    assert "Secret twig-epp-tls is created by the operator and not shown" in first.err
    assert "ownerReferences" not in first.out


def test_in_another_process_the_text_is_the_same() -> None:
    """Nothing depends on the seed of hashes."""
    argv = [sys.executable, "-m", "kvist", "render", "-f", pool("agents")]
    texts = [
        subprocess.run(argv, capture_output=True, check=True, env={"PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    ]

    assert texts[0] == texts[1]
    assert texts[0].startswith(b"---\n")


def test_a_cluster_without_an_api(capsys: pytest.CaptureFixture[str]) -> None:
    """``--without podmonitors`` leaves PodMonitors out; an unknown API is an error that lists all of them."""
    assert main(["render", "-f", pool("agents"), "--without", "podmonitors"]) == 0
    shown = capsys.readouterr()
    assert "PodMonitor" not in {d["kind"] for d in yaml.safe_load_all(shown.out)}
    assert "ApiMissing: podmonitors.monitoring.coreos.com is not installed" in shown.err

    assert main(["render", "-f", pool("agents"), "--without", "istio"]) == 2
    assert "--without: 'istio' is not one of leaderworkersets, httproutes" in capsys.readouterr().err


def test_the_access_modes_of_a_claim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shared claim is mounted in the picker; of one that is not known a note says what to do."""
    file = tmp_path / "pool.yaml"
    resource = yaml.safe_load(Path(pool("claim")).read_text())
    del resource["spec"]["picker"]
    file.write_text(yaml.safe_dump(resource))

    assert main(["render", "-f", str(file), "--claim", "models=ReadOnlyMany,ReadWriteOnce"]) == 0
    assert "--model=/model/llama/3.3-70b" in capsys.readouterr().out
    assert main(["render", "-f", str(file)]) == 0
    assert "NoTokenizer: the picker has no tokenizer" in capsys.readouterr().err
    assert main(["render", "-f", str(file), "--claim", "models"]) == 2
    assert "--claim: 'models' is not NAME=MODE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "more", "code", "said"),
    [
        ("too-large", [], 3, "kvist: refused: "),
        ("misspelt-field", [], 2, "kvist: spec.engine.maxModelLength: unknown field"),
        ("two-nodes", ["--without", "leaderworkersets"], 2, "kvist: a replica spans 2 nodes, which needs"),
    ],
)
def test_what_cannot_be_rendered(
    case: str, more: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing on stdout, the reason on stderr."""
    assert main(["render", "-f", pool(case), *more]) == code
    shown = capsys.readouterr()

    assert shown.out == ""
    assert shown.err.startswith(said)


def test_all_pools_of_a_file_are_rendered_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two pools become the objects of both; with an invalid one nothing is printed."""
    pool = (
        "---\napiVersion: kvist.dev/v1alpha1\nkind: InferencePool\nmetadata: {name: %s}\nspec:\n"
        "  model: {source: hf://Qwen/Qwen3-8B}\n  accelerator: {product: L40S%s}\n"
    )
    file = tmp_path / "pools.yaml"
    file.write_text(pool % ("elm", ", memory: 48Gi") + pool % ("oak", ""))
    assert main(["render", "-f", str(file)]) == 0
    said = capsys.readouterr()
    names = {made["metadata"]["name"] for made in yaml.safe_load_all(said.out)}
    assert {"elm", "oak"} <= names
    assert "kvist: warning: spec.accelerator.memory has no effect" in said.err

    file.write_text(pool % ("elm", "") + pool % ("oak", ", count: 0"))
    assert main(["render", "-f", str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "kvist: document 2 (InferencePool oak): spec.accelerator.count: " in said.err
