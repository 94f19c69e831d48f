"""The files of examples/ are accepted by the CRD's schema, planner, renderer, and every Kubernetes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvist.__main__ import main
from kvist_epp.settings.settings import Settings
from tests import docs
from tests.examples import EXAMPLES, NAMES, documents, gpu_of, manifests, name_of, pools
from tests.shapes import VERSIONS, faults

Json = dict[str, Any]
EACH_POOL = pytest.mark.parametrize("path", pools(), ids=name_of)


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, output and complaints of `kvist`."""
    code = main(list(words))
    said = capsys.readouterr()
    return code, said.out, said.err


def rendered(path: Path, capsys: pytest.CaptureFixture[str]) -> list[Json]:
    """Every object of an example's pool."""
    claims = ["--claim", "models=ReadWriteMany"]
    code, out, _ = command(capsys, "render", "-f", str(path), *gpu_of(path), *claims)
    assert code == 0
    return list(yaml.safe_load_all(out))


def test_there_are_those_that_the_index_names() -> None:
    """Each folder has a README that says what happens and how to try it, and the index links it."""
    index = (EXAMPLES / "README.md").read_text()
    assert sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir()) == list(NAMES)
    for name in NAMES:
        text = (EXAMPLES / name / "README.md").read_text()
        assert "\n## What happens\n" in text, name
        assert "\n## Try it\n" in text, name
        assert f"]({name}/README.md)" in index


@pytest.mark.parametrize("path", manifests(), ids=name_of)
def test_every_object_has_the_shape_of_its_kind(path: Path) -> None:
    """By our CRD, the schemas of Kubernetes 1.30 to 1.37, or what others' kinds are known to have."""
    found = documents(path)
    assert found
    assert [fault for made in found for version in VERSIONS for fault in faults(made, version)] == []


@EACH_POOL
def test_every_pool_is_planned_as_fitting(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`kvist plan` has a verified plan for every pool."""
    code, out, said = command(capsys, "plan", "-f", str(path), *gpu_of(path), "-o", "json")
    assert (code, said) == (0, "")
    assert json.loads(out)["verdict"] == "fits"


@EACH_POOL
def test_every_rendered_object_is_valid_for_every_kubernetes(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output of `kvist render` is valid for 1.30 to 1.37, other projects' kinds by their shape."""
    made = rendered(path, capsys)
    assert len(made) > 10
    assert [fault for each in made for version in VERSIONS for fault in faults(each, version)] == []


@EACH_POOL
def test_every_pool_has_precise_pickers(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No pool lacks a requirement of precise picks, and the picker accepts its arguments."""
    code, out, said = command(
        capsys, "render", "-f", str(path), *gpu_of(path), "--claim", "models=ReadWriteMany"
    )
    [args] = [
        container["args"]
        for made in yaml.safe_load_all(out)
        if made["kind"] == "Deployment" and made["metadata"]["name"].endswith("-epp")
        for container in made["spec"]["template"]["spec"]["containers"]
    ]
    assert (code, "NoTokenizer" in said, "ApiMissing" in said) == (0, False, False)
    assert Settings.from_args(args).check().model


def test_the_envoy_of_the_third_is_the_operator_s() -> None:
    """The configuration equals that of pools with an Envoy of their own, which real Envoys run in tests."""
    assert yaml.safe_load(docs.EDGE.read_text()) == docs.edge()


def test_the_envoy_of_the_fifth_is_the_operator_s() -> None:
    """The configuration is that of both pools' own Envoys, joined as in the tests of several pools;
    files are mounted where they are read, and the Services select the pools' engines."""
    assert yaml.safe_load(docs.MODELS.read_text()) == docs.two_models()
    text = docs.MODELS.read_text()
    made = documents(EXAMPLES / "05-two-models" / "edge.yaml")
    [pod] = [one["spec"]["template"]["spec"] for one in made if one["kind"] == "Deployment"]
    folders = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert set(re.findall(r"/etc/kvist/ca/\w+", text)) == {f for f in folders if f.startswith("/etc/kvist")}
    named = {one["metadata"]["name"] for one in made if one["kind"] == "Service"}
    assert set(re.findall(r"(\w+-engines)\.default\.svc", text)) == named - {"models"}


def only(name: str, kind: str) -> Json:
    """The one object of a kind in an example."""
    [found] = [
        made
        for path in manifests()
        if name_of(path).startswith(name)
        for made in documents(path)
        if made["kind"] == kind
    ]
    return found


@pytest.mark.parametrize("kind", ["HorizontalPodAutoscaler", "ScaledObject"])
def test_autoscalers_scale_the_pool(kind: str) -> None:
    """By the pool's own scale subresource: the operator would set a Deployment back."""
    [pool] = documents(EXAMPLES / "08-autoscaling" / "pool.yaml")
    target = only("08-autoscaling", kind)["spec"]["scaleTargetRef"]
    assert target == {
        "apiVersion": pool["apiVersion"],
        "kind": pool["kind"],
        "name": pool["metadata"]["name"],
    }
    assert "replicas" not in pool["spec"]


def test_autoscalers_go_by_metrics_that_pickers_have(capsys: pytest.CaptureFixture[str]) -> None:
    """Both ask for series that the picker exports, with the label that the pool's PodMonitors add."""
    from kvist_epp.telemetry.metrics import PickerMetrics

    page, _ = PickerMetrics(version="x").snapshot().format("")
    text = (EXAMPLES / "08-autoscaling" / "hpa" / "adapter-rules.yaml").read_text()
    rules = {rule["name"]["as"] for rule in yaml.safe_load(text)["rules"]["external"]}
    hpa = only("08-autoscaling", "HorizontalPodAutoscaler")["spec"]["metrics"]
    asked = {metric["external"]["metric"]["name"] for metric in hpa}
    queries = [t["metadata"]["query"] for t in only("08-autoscaling", "ScaledObject")["spec"]["triggers"]]

    assert asked == rules
    for name in asked:
        assert f"# TYPE {name} ".encode() in page
        assert any(f'{name}{{pool="elastic"}}' in query for query in queries)
    monitors = [
        made
        for made in rendered(EXAMPLES / "08-autoscaling" / "pool.yaml", capsys)
        if made["kind"] == "PodMonitor"
    ]
    for monitor in monitors:
        [labels] = [e["relabelings"] for e in monitor["spec"]["podMetricsEndpoints"]]
        assert {"targetLabel": "pool", "replacement": "elastic", "action": "replace"} in labels


def test_the_routes_of_the_fifth_lead_to_its_pools() -> None:
    """Each header's value and backend is one pool, and nothing else is there besides the route."""
    folder = EXAMPLES / "05-two-models"
    names = {documents(folder / f"{name}.yaml")[0]["metadata"]["name"] for name in ("small", "large")}
    [route] = documents(folder / "inference-extension" / "route.yaml")
    *named, rest = route["spec"]["rules"]
    led = {rule["matches"][0]["headers"][0]["value"]: rule["backendRefs"][0]["name"] for rule in named}
    assert led == {name: name for name in names}
    assert rest["backendRefs"][0]["name"] in names


def test_nothing_of_the_tenth_comes_from_outside(capsys: pytest.CaptureFixture[str]) -> None:
    """Images are the registry's inside, model and tokenizer the claim's."""
    folder = EXAMPLES / "10-airgapped"
    values = yaml.safe_load((folder / "helm" / "airgapped-values.yaml").read_text())
    made = rendered(folder / "pool.yaml", capsys)
    [engine] = [o for o in made if (o["kind"], o["metadata"]["name"]) == ("Deployment", "inside")]
    [picker] = [o for o in made if (o["kind"], o["metadata"]["name"]) == ("Deployment", "inside-epp")]
    registry = values["registry"].partition("/")[0]

    assert values["envoy"]["image"].startswith(f"{registry}/")
    [container] = engine["spec"]["template"]["spec"]["containers"]
    assert container["image"].startswith(f"{registry}/")
    for each in (engine, picker):
        text = json.dumps(each)
        assert "hf://" not in text
        assert '"claimName": "models"' in text
