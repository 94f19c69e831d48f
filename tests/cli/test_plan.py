"""``kvist plan`` and ``kvist compare`` from outside: three outputs, three exit codes, clear errors."""

import io
import json
from pathlib import Path

import pytest
import yaml
from tests.operator.pools import DENSE, resource

from kvist.__main__ import main
from kvist_epp import __version__
from kvist_operator.models.shape import ModelFiles
from kvist_operator.models.source import from_model_files
from kvist_operator.node_labels import node_kinds
from kvist_operator.plan import make_plan
from kvist_operator.reconcile.model_cache import pinned
from kvist_operator.spec import read_pool
from kvist_operator.status import plan_status
from kvist_operator.status.known_model import model_status

POOL = """
apiVersion: v1
kind: ConfigMap
metadata: {name: other}
---
apiVersion: kvist.dev/v1alpha1
kind: InferencePool
metadata: {name: twig}
spec:
  model: {source: hf://Qwen/Qwen3-32B-FP8}
  accelerator: {product: NVIDIA-H100-80GB-HBM3}
"""


@pytest.fixture
def pool(tmp_path: Path) -> str:
    """A file with a pool that fits."""
    file = tmp_path / "pool.yaml"
    file.write_text(POOL)
    return str(file)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 100 columns, wherever the tests run."""
    monkeypatch.setenv("COLUMNS", "100")


def test_json_has_the_agreed_form(pool: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The keys other programs read."""
    code = main(["plan", "-f", pool, "-o", "json"])
    found = json.loads(capsys.readouterr().out)

    assert code == 0
    assert found["verdict"] == "fits"
    assert found["accelerator"].keys() >= {"product", "per_replica", "nodes"}
    assert found["parallelism"].keys() == {"tensor", "pipeline", "data", "context", "expert"}
    assert found["memory"].keys() >= {
        "per_gpu_gib",
        "weights_gib",
        "activations_gib",
        "graphs_gib",
        "kv_gib",
        "kv_tokens",
        "kv_bytes_per_token",
        "max_concurrency",
    }
    assert found["args"][:2] == ["serve", "Qwen/Qwen3-32B-FP8"]
    assert all(choice.keys() == {"field", "value", "reason", "source"} for choice in found["choices"])


def test_yaml_has_the_same_facts(pool: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The YAML output has the same content as the JSON output."""
    main(["plan", "-f", pool, "-o", "json"])
    as_json = json.loads(capsys.readouterr().out)
    main(["plan", "-f", pool, "-o", "yaml"])

    assert yaml.safe_load(capsys.readouterr().out) == as_json


def test_the_table_shows_bar_command_and_reasons(pool: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every character of the bar is one eightieth of the card."""
    main(["plan", "-f", pool])
    lines = capsys.readouterr().out.splitlines()
    bar = next(line for line in lines if line.startswith("["))

    assert lines[0] == "fits: 1 × H100-80GB; fp8 KV cache: accuracy not measured for this model"
    assert len(bar) == 82
    assert bar.count("█") == round(80 * 31.97 / 79.11)
    assert any(line.startswith("vllm serve Qwen/Qwen3-32B-FP8") for line in lines)
    assert any("kvCacheDtype" in line and "fp8" in line for line in lines)


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_table_fits_the_terminal_and_keeps_labels_with_their_numbers(
    pool: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The legend of the bar breaks between its entries only, and no line of it is too long."""
    monkeypatch.setenv("COLUMNS", str(columns))
    main(["plan", "-f", pool])
    lines = capsys.readouterr().out.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("[")) + 1
    legend = lines[first : next(at for at, line in enumerate(lines) if "KV cache of a replica" in line)]

    assert max(len(line) for line in lines[first - 1 : first + len(legend)]) <= min(columns, 100)
    assert all(line[-1].isdigit() for line in legend)


ANY = POOL.replace("  accelerator: {product: NVIDIA-H100-80GB-HBM3}\n", "").replace("32B-FP8", "32B")
NODES = {
    "kind": "List",
    "items": [
        {"metadata": {"labels": {"nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/gpu.count": "1"}}},
        {
            "metadata": {"labels": {"nvidia.com/gpu.product": "NVIDIA-L40S"}},
            "status": {"allocatable": {"nvidia.com/gpu": "4"}},
        },
        {"metadata": {"name": "cpu-only"}},
    ],
}


def test_neighbours_and_prices_are_lines_of_the_table(pool: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has the price of the plan and the cheaper neighbour with its own, and JSON has both."""
    Path(pool).write_text(ANY)
    argv = ["plan", "-f", pool, "--price", "H100-80GB=2.5", "--price", "L40S=9"]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    main([*argv, "-o", "json"])
    found = json.loads(capsys.readouterr().out)

    assert "price of a replica: 5.00 per hour (2 × 2.5)" in lines
    [cheaper] = [line for line in lines if line.startswith("cheaper: 1 × H100-80GB holds ")]
    assert cheaper.endswith("of 8 sequences of 32,768 tokens, for 2.50 per hour")
    assert found["price_per_hour"] == 5
    assert found["neighbours"][0]["text"] == cheaper.removeprefix("cheaper: ")
    assert found["neighbours"][0].keys() >= {
        "accelerator",
        "gpus",
        "sequences",
        "wished",
        "tokens",
        "cheaper",
    }


def test_nodes_are_read_as_kubectl_prints_them(
    pool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--nodes`` takes JSON and YAML from a file or from stdin, for plan, compare and render."""
    Path(pool).write_text(ANY)
    for text in (json.dumps(NODES), yaml.safe_dump(NODES)):
        file = tmp_path / "nodes"
        file.write_text(text)
        assert main(["plan", "-f", pool, "--nodes", str(file), "-o", "json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["accelerator"]["name"] == "L40S"
        assert {"field": "perNode", "value": 4}.items() <= found["choices"][3].items()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert main(["render", "-f", pool, "--nodes", "-"]) == 0
        assert "values:\n                - NVIDIA-L40S" in capsys.readouterr().out
    assert main(["compare", "-f", pool, "--nodes", str(file), "--with", "engine.maxNumSeqs=64"]) == 0


def test_a_file_of_prices_is_read(pool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--prices FILE`` has the same effect as ``--price``, which wins where both have the name."""
    Path(pool).write_text(ANY)
    file = tmp_path / "prices.yaml"
    file.write_text("H100-80GB: 2.5\nH200: 3\n")
    main(["plan", "-f", pool, "--prices", str(file), "--price", "H200=9", "-o", "json"])

    assert json.loads(capsys.readouterr().out)["accelerator"]["name"] == "H100-80GB"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--price", "H100"], "--price H100: write it like H100-80GB=2.99"),
        (["--price", "H100=free"], "--price H100: 'free' is not a price"),
        (["--price", "H100=-1"], "write a positive number"),
        (["--price", "H1000=1"], "--price: 'H1000' is not known"),
        (["--prices", "/nowhere"], "--prices /nowhere: cannot be read"),
        (["--nodes", "/nowhere"], "--nodes /nowhere: cannot be read"),
        (["--nodes", "FILE"], "has no node with labels of accelerators"),
        (["--prices", "FILE"], "--prices kind: 'InferencePool' is not a price"),
    ],
)
def test_bad_prices_and_nodes_are_errors_with_a_remedy(
    pool: str, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr that names the option, and exit code 2."""
    one = POOL.split("---")[1]
    Path(pool).write_text(one.replace("apiVersion: kvist.dev/v1alpha1\n", "") if "FILE" in more else POOL)
    given = [pool if word == "FILE" else word for word in more]
    file = Path(pool).with_name("good.yaml")
    file.write_text(POOL)

    assert main(["plan", "-f", str(file), *given]) == 2
    assert said in capsys.readouterr().err


def test_another_accelerator_can_be_asked_for(pool: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``--gpu`` wins over the file."""
    main(["plan", "-f", pool, "--gpu", "L40S", "-o", "json"])

    assert json.loads(capsys.readouterr().out)["accelerator"]["product"] == "NVIDIA-L40S"


def test_a_refusal_ends_with_three(pool: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal has exit code 3 and says what is lacking and which configuration would fit."""
    Path(pool).write_text(
        POOL.replace("H100-80GB-HBM3}", "H100-80GB-HBM3, count: 1}").replace(
            "Qwen3-32B-FP8", "Qwen3-235B-A22B"
        )
    )
    code = main(["plan", "-f", pool])
    shown = capsys.readouterr().out

    assert code == 3
    assert shown.startswith("refused: ")
    assert "GiB on each" in shown
    assert "would fit" in shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            POOL.replace("accelerator", "acelerator"),
            "spec.acelerator: unknown field; did you mean accelerator?",
        ),
        (POOL.replace("HBM3", "HBM9"), "spec.accelerator.product: 'NVIDIA-H100-80GB-HBM9' is not known"),
        ("", "has no YAML object"),
        ("a: [", "cannot be read"),
        ("kind: Pod", "is not an InferencePool of kvist.dev"),
    ],
)
def test_what_cannot_be_read_ends_with_two(
    pool: str, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr, nothing on stdout."""
    Path(pool).write_text(text)
    code = main(["plan", "-f", pool])
    shown = capsys.readouterr()

    assert (code, shown.out) == (2, "")
    assert said in shown.err


def test_an_absent_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file is an error that names it, not a traceback."""
    assert main(["plan", "-f", "/nowhere/pool.yaml"]) == 2
    assert "/nowhere/pool.yaml" in capsys.readouterr().err


def test_two_plans_stand_side_by_side(pool: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A comparison shows only the fields that differ, with both values."""
    code = main(["compare", "-f", pool, "--with", "engine.kvCacheDtype=Model"])
    shown = capsys.readouterr().out

    assert code == 0
    assert "engine.kvCacheDtype=Model" in shown.splitlines()[0]
    assert "choice.kvCacheDtype" in shown
    assert "memory.weights_gib" not in shown or "accelerator.per_replica" in shown


def test_a_comparison_is_json_too(pool: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Both plans whole, and the differences."""
    main(["compare", "-f", pool, "--with", "engine.maxNumSeqs=64", "-o", "json"])
    found = json.loads(capsys.readouterr().out)

    assert found.keys() == {"before", "after", "differences"}
    assert {"field": "choice.maxNumSeqs", "before": 256, "after": 64} in found["differences"]


SECOND = """
---
apiVersion: kvist.dev/v1alpha1
kind: InferencePool
metadata: {name: oak, namespace: forest}
spec:
  model: {source: hf://Qwen/Qwen3-8B}
  accelerator: {product: L40S}
"""


def test_the_running_plan_is_compared_with_that_of_this_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``kubectl get kvp NAME -o yaml`` has the plan, the accelerator and the facts of the model, so that
    neither cluster nor hub is asked. Figures that the older operator did not write are no differences,
    nor is the commit of the model, which operators pin."""
    config = {**DENSE, "max_position_embeddings": 16_384}
    *_, resource = yaml.safe_load_all(POOL)
    resource["spec"] = {"model": {"source": "hf://acme/unknown"}}
    facts = from_model_files(ModelFiles(repository="acme/unknown", revision="1", config=json.dumps(config)))
    pool = read_pool(resource)
    nodes = node_kinds([{"nvidia.com/gpu.product": "NVIDIA-L4"}])
    running = plan_status(make_plan(pinned(pool, facts), facts, nodes=nodes))
    assert "--revision" in running["args"]
    del running["memory"]["encoderGib"]
    at = running["args"].index("--max-num-batched-tokens") + 1
    running["args"][at] = "1024"
    resource["status"] = {"plan": running, "model": model_status(pool, facts, None)}
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(resource))

    assert main(["compare", "-f", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].split() == ["running", "kvist", __version__]
    assert [line.split() for line in said.splitlines()[2:]] == [["--max-num-batched-tokens", "1024", "2048"]]


def test_a_pool_without_status_needs_a_change_to_compare(
    pool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names both ways of use."""
    assert main(["compare", "-f", pool]) == 2
    assert "kubectl get kvp NAME -o yaml | kvist compare -f -" in capsys.readouterr().err


PRESET = """---
apiVersion: kvist.dev/v1alpha1
kind: InferencePoolPreset
metadata: {name: standard}
spec: {engine: {maxModelLen: 12288}}
"""


def test_a_preset_is_in_the_file_of_the_pool_or_in_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plan, compare and render use it, and say how to add it where it is missing."""
    own, other, both = (tmp_path / name for name in ("pool.yaml", "preset.yaml", "both.yaml"))
    text = POOL.replace("spec:\n", "spec:\n  presetRef: {name: standard}\n", 1)
    own.write_text(text)
    other.write_text(PRESET)
    both.write_text(text + PRESET)

    for words in (["-f", str(both)], ["-f", str(own), "--preset", str(other)]):
        assert main(["plan", *words]) == 0
        assert "--max-model-len 12288" in capsys.readouterr().out
    assert main(["render", "-f", str(both)]) == 0
    assert "'12288'" in capsys.readouterr().out
    assert main(["compare", "-f", str(both), "--with", "engine.maxModelLen=4096", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for plan, length in (("before", "12288"), ("after", "4096")):
        words = found[plan]["args"]
        assert words[words.index("--max-model-len") + 1] == length
    assert main(["plan", "-f", str(own)]) == 2
    assert "spec.presetRef: standard is not in the file: add it with --preset FILE" in capsys.readouterr().err
    assert main(["plan", "-f", str(own), "--preset", str(own)]) == 2
    assert f"--preset {own}: has no InferencePoolPreset" in capsys.readouterr().err


def several(tmp_path: Path, *more: str) -> str:
    """A file with two pools, another object, and more documents."""
    file = tmp_path / "several.yaml"
    file.write_text(POOL + SECOND + "".join(more))
    return str(file)


def test_every_pool_of_a_file_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two pools have two plans under their names; another object is named as left out."""
    code = main(["plan", "-f", several(tmp_path)])
    said = capsys.readouterr()

    assert code == 0
    assert "pool default/twig\nfits: " in said.out
    assert "pool forest/oak\nfits: " in said.out
    assert (
        said.err == "kvist: document 1 (ConfigMap other) is no InferencePool of kvist.dev and is left out\n"
    )


def test_several_plans_are_a_list_of_json_and_documents_of_yaml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each entry has the name of its pool and the keys of a plan."""
    file = several(tmp_path)
    main(["plan", "-f", file, "-o", "json"])
    whole = json.loads(capsys.readouterr().out)
    main(["plan", "-f", file, "-o", "yaml"])
    documents = list(yaml.safe_load_all(capsys.readouterr().out))

    assert [each["pool"] for each in whole] == ["default/twig", "forest/oak"]
    assert whole[1]["verdict"] == "fits"
    assert documents == whole


def test_one_bad_pool_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the document, the other plans are printed, and the code is 2."""
    bad = "---\napiVersion: kvist.dev/v1alpha1\nkind: InferencePool\nmetadata: {name: elm}\nspec: {}\n"
    code = main(["plan", "-f", several(tmp_path, bad)])
    said = capsys.readouterr()

    assert code == 2
    assert "pool forest/oak" in said.out
    assert "kvist: document 4 (InferencePool elm): spec.model.source: is missing" in said.err


def test_a_comparison_takes_one_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several pools are refused with their places."""
    code = main(["compare", "-f", several(tmp_path), "--with", "engine.maxModelLen=4096"])

    assert code == 2
    assert "document 2 (InferencePool twig), document 3 (InferencePool oak)" in capsys.readouterr().err


def test_a_list_of_pools_is_read_like_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output of ``kubectl get -o yaml`` is a list, whose items are planned."""
    pools = [each for each in yaml.safe_load_all(POOL + SECOND) if each["kind"] == "InferencePool"]
    file = tmp_path / "list.yaml"
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": pools}))

    assert main(["plan", "-f", str(file), "-o", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


def test_a_document_that_is_no_object_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A text between two pools is not dropped."""
    assert main(["plan", "-f", several(tmp_path, "---\nplain text\n")]) == 2
    assert "document 4 is no object: write apiVersion" in capsys.readouterr().err


def test_warnings_have_lines_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A field without effect is a warning in the table and in JSON, and the verdict stays."""
    file = tmp_path / "pool.yaml"
    file.write_text(SECOND.replace("product: L40S", "product: L40S, memory: 48Gi"))
    main(["plan", "-f", str(file)])
    shown = capsys.readouterr().out
    main(["plan", "-f", str(file), "-o", "json"])
    whole = json.loads(capsys.readouterr().out)

    assert shown.startswith("fits: ")
    assert "\nwarning: spec.accelerator.memory has no effect" in shown
    assert [each[:34] for each in whole["warnings"]] == ["spec.accelerator.memory has no eff"]


def test_a_plan_for_embeddings_promises_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Text and JSON have the tokens and prompts of a step, and no KV cache for an encoder."""
    file = tmp_path / "pool.yaml"
    file.write_text(json.dumps(resource("hf://BAAI/bge-m3")))
    assert main(["plan", "-f", str(file), "--gpu", "L4"]) == 0
    text = capsys.readouterr().out
    assert main(["plan", "-f", str(file), "--gpu", "L4", "-o", "json"]) == 0
    written = json.loads(capsys.readouterr().out)

    assert "up to 8,192 tokens of 256 prompts, each up to 8,192 tokens; there is no KV cache" in text
    assert "◆" not in text
    assert (written["task"], written["batch"]) == ("Embed", {"tokens": 8192, "sequences": 256})
    assert (written["memory"]["kv_tokens"], written["memory"]["kv_gib_per_sequence"]) == (0, 0)
