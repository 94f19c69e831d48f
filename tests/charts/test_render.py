"""Promises of the chart's objects, whatever the values."""

import warnings
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.charts.generate import CHART, CRD, PRESET_CRD
from tests.charts.helm import NAMESPACE, VALUES, Helm, HelmError, Json, of_kind, one, settings

from kvist_operator.cluster.kinds import Right, everywhere, namespaced, single_rights
from kvist_operator.manifests.object_names import PICKER_IMAGE
from kvist_operator.manifests.policy import ANYWHERE
from kvist_operator.process.settings import OperatorSettings
from kvist_operator.spec import read_pool

VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
OWN = ("monitoring.coreos.com/", "apiextensions.k8s.io/")
"""The CRD is taken by a real API server (test_install.py), PodMonitors by their shape."""
NO_CRD = settings(crds__enabled=False)


def rendered(helm: Helm, values: Path, **more: Any) -> list[Json]:
    """Return the objects for a file of values."""
    return helm.template("--values", str(values), **more)


@pytest.mark.parametrize("values", VALUES, ids=lambda file: file.stem)
def test_helm_has_nothing_to_say(helm: Helm, values: Path) -> None:
    """`helm lint --strict` passes over every value file."""
    assert "0 chart(s) failed" in helm.run("lint", "--strict", str(CHART), "--values", str(values))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", VALUES, ids=lambda file: file.stem)
def test_objects_are_valid_for_every_kubernetes(helm4: Helm, values: Path, version: str) -> None:
    """By the schemas of 1.30 to 1.37, unknown fields refused."""
    made = rendered(helm4, values, kubernetes=version)
    assert len(made) >= 10
    for each in made:
        if not each["apiVersion"].startswith(OWN):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("values", VALUES, ids=lambda file: file.stem)
def test_both_helms_make_the_same(values: Path, tmp_path: Path) -> None:
    """Object by object."""
    made = [rendered(Helm(major, tmp_path / str(major)), values) for major in (3, 4)]
    assert keyed(made[0]) == keyed(made[1])


def keyed(objects: list[Json]) -> dict[tuple[str, str, str], Json]:
    """By kind, namespace and name, each once."""
    found = {(o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"]): o for o in objects}
    assert len(found) == len(objects)
    return found


def test_an_older_kubernetes_is_refused(helm: Helm) -> None:
    """With both versions named; a vendor's suffix is no older version."""
    with pytest.raises(HelmError, match=r"requires kubeVersion: >=1\.30\.0-0"):
        helm.template(kubernetes="1.29.9")
    assert helm.template(kubernetes="1.30.0-gke.100")


def pods(objects: list[Json]) -> list[tuple[Json, Json]]:
    """Metadata and spec of every pod, of the test's too."""
    found = [
        (o["spec"]["template"]["metadata"], o["spec"]["template"]["spec"])
        for o in of_kind(objects, "Deployment")
    ]
    return found + [(o["metadata"], o["spec"]) for o in of_kind(objects, "Pod")]


@pytest.mark.parametrize("values", VALUES, ids=lambda file: file.stem)
def test_every_pod_is_restricted(helm4: Helm, values: Path) -> None:
    """Pod Security *restricted* field by field, a root that is read only, no variables of Services."""
    found = pods(rendered(helm4, values))
    filters = (yaml.safe_load(values.read_text()) or {}).get("modelHeader", {}).get("enabled", False)
    assert len(found) == 2 + filters
    for _, pod in found:
        [container] = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"].get("runAsUser", 1) > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        security = container["securityContext"]
        assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert {key for volume in pod["volumes"] for key in volume} <= {
            "name",
            "emptyDir",
            "configMap",
            "secret",
        }
        assert pod["enableServiceLinks"] is False
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("values", VALUES, ids=lambda file: file.stem)
def test_the_operator_understands_its_flags(helm4: Helm, values: Path) -> None:
    """The flags are those of kvist_operator.process.settings, and agree with the values."""
    chart, told = (
        yaml.safe_load((CHART / "values.yaml").read_text()),
        yaml.safe_load(values.read_text()) or {},
    )
    made = rendered(helm4, values)
    [container] = one(made, "Deployment")["spec"]["template"]["spec"]["containers"]
    found = OperatorSettings.from_args(container["args"])
    assert container["command"] == ["kvist-operator"]
    assert list(found.watched) == told.get("watchNamespaces", [])
    assert found.envoy_image == {**chart, **told}["envoy"]["image"]
    assert found.metrics_port == container["ports"][0]["containerPort"]
    assert one(made, "Service")["spec"]["ports"][0]["port"] == found.metrics_port


def test_images_are_of_the_chart_s_version(helm4: Helm) -> None:
    """Without a registry the images are those that `kvist render` names; a registry comes before both, a
    digest in place of the tag."""
    [operator], [picker] = images(helm4), pickers(helm4)
    assert operator == PICKER_IMAGE.replace("kvist-epp", "kvist-operator")
    assert picker == PICKER_IMAGE
    values = settings(registry="registry.example.com/kvist/", image__digest=f"sha256:{'0' * 64}")
    assert images(helm4, *values) == [f"registry.example.com/kvist/kvist-operator@sha256:{'0' * 64}"]
    assert pickers(helm4, *values) == [f"registry.example.com/kvist/{PICKER_IMAGE}"]


def images(helm: Helm, *words: str) -> list[str]:
    """Return the images of all pods, each once."""
    return sorted({c["image"] for _, pod in pods(helm.template(*words)) for c in pod["containers"]})


def pickers(helm: Helm, *words: str) -> list[str]:
    """Return the image that the operator uses for pickers."""
    [container] = one(helm.template(*words), "Deployment")["spec"]["template"]["spec"]["containers"]
    return [OperatorSettings.from_args(container["args"]).picker_image]


def rights(made: Json) -> list[Right]:
    """Return the rights of a role."""
    return single_rights(made["rules"])


def test_the_roles_give_what_the_operator_asks_for(helm4: Helm) -> None:
    """Rule by rule those of cluster.rights: everywhere in a ClusterRole, or in a Role of each namespace."""
    account = {"kind": "ServiceAccount", "name": "kvist-operator", "namespace": NAMESPACE}
    made = helm4.template()
    [role] = [r for r in of_kind(made, "ClusterRole") if r["metadata"]["name"] == "kvist-operator"]
    assert rights(role) == single_rights(everywhere())
    [binding] = of_kind(made, "ClusterRoleBinding")
    assert (binding["roleRef"]["name"], binding["subjects"]) == ("kvist-operator", [account])

    made = helm4.template(*settings(watchNamespaces=["a", "b"]))
    roles = [r for r in of_kind(made, "Role") if r["metadata"]["name"] == "kvist-operator"]
    bindings = [r for r in of_kind(made, "RoleBinding") if r["metadata"]["name"] == "kvist-operator"]
    assert [r["metadata"]["namespace"] for r in roles] == ["a", "b"]
    assert [rights(r) for r in roles] == [single_rights(namespaced())] * 2
    assert [(b["metadata"]["namespace"], b["subjects"]) for b in bindings] == [
        ("a", [account]),
        ("b", [account]),
    ]


def test_a_namespaced_release_has_nothing_of_the_cluster_s(helm4: Helm) -> None:
    """With some namespaces and without the CRD every object is in a namespace."""
    made = helm4.template(*settings(watchNamespaces=["a"], crds__enabled=False))
    assert [o["kind"] for o in made if "namespace" not in o["metadata"]] == []


def test_the_crds_are_the_repository_s_and_kept(helm4: Helm) -> None:
    """With one annotation more: helm never deletes them. Without CRDs there are none."""
    found = of_kind(helm4.template(), "CustomResourceDefinition")
    assert [each["metadata"].pop("annotations") for each in found] == 2 * [
        {"helm.sh/resource-policy": "keep"}
    ]
    real = [yaml.safe_load(file.read_text()) for file in (CRD, PRESET_CRD)]
    assert sorted(found, key=str) == sorted(real, key=str)
    assert of_kind(helm4.template(*NO_CRD), "CustomResourceDefinition") == []


def test_selectors_find_the_operator_alone(helm4: Helm) -> None:
    """Deployment, Service, PodMonitor and NetworkPolicy mean its pod, not the test's, at a port it opens."""
    made = helm4.template(*settings(metrics__podMonitor="Enabled"))
    (labels, pod), (test, _) = ((meta["labels"], spec) for meta, spec in pods(made))
    opened = {port["name"] for port in pod["containers"][0]["ports"]} | {9095}
    for kind, path in (("Service", ()), ("Deployment", ("matchLabels",)), ("PodMonitor", ("matchLabels",))):
        selector = one(made, kind)["spec"]["selector"]
        for key in path:
            selector = selector[key]
        assert selector.items() <= labels.items(), kind
        assert not selector.items() <= test.items(), kind
    [scraped] = one(made, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert scraped["honorLabels"], "series of pools name the pool's namespace, not the operator's"
    policy = one(made, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["policyTypes"] == ["Ingress"]
    [rule] = policy["ingress"]
    assert {port["port"] for port in rule["ports"]} <= opened
    assert rule.get("from", ANYWHERE) == ANYWHERE


def test_a_narrow_policy_still_lets_the_test_in(helm4: Helm) -> None:
    """Restricting the clients that may scrape does not break `helm test`."""
    peers = [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]
    made = helm4.template(*settings(networkPolicy__from=peers))
    [rule] = one(made, "NetworkPolicy")["spec"]["ingress"]
    [labels] = [o["metadata"]["labels"] for o in of_kind(made, "Pod")]
    assert rule["from"][:1] == peers
    assert rule["from"][1]["podSelector"]["matchLabels"].items() <= labels.items()


def test_a_podmonitor_needs_its_api(helm4: Helm) -> None:
    """Auto makes one where the cluster has the API; Enabled and Disabled do not look."""
    api = ("--api-versions", "monitoring.coreos.com/v1/PodMonitor")
    found = {
        (mode, bool(words)): len(
            of_kind(helm4.template(*settings(metrics__podMonitor=mode), *words), "PodMonitor")
        )
        for mode in ("Auto", "Enabled", "Disabled")
        for words in ((), api)
    }
    assert found == {
        ("Auto", False): 0,
        ("Auto", True): 1,
        ("Enabled", False): 1,
        ("Enabled", True): 1,
        ("Disabled", False): 0,
        ("Disabled", True): 0,
    }


def test_openshift_assigns_the_users(helm4: Helm) -> None:
    """On OpenShift no pod of the chart names a user or a group, which the cluster would refuse, except one
    that the values ask for."""
    api = ("--api-versions", "security.openshift.io/v1")
    on = settings(modelHeader__enabled=True)

    def contexts(*words: str) -> list[Json]:
        made = helm4.template(*on, *words)
        pods = [o["spec"]["template"]["spec"] for o in of_kind(made, "Deployment")]
        pods += [o["spec"] for o in of_kind(made, "Pod")]
        return [pod["securityContext"] for pod in pods]

    plain = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    users = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), 65532)
    assert contexts(*api) == [plain] * 3
    assert contexts() == [{**plain, **users}] * 3
    chosen = settings(podSecurityContext__runAsUser=1000)
    assert contexts(*api, *chosen) == [{**plain, "runAsUser": 1000}] * 3


def test_long_names_fit(helm4: Helm) -> None:
    """Also of a release with the longest name that helm takes."""
    made = helm4.template(release="r" * 53)
    assert max(len(o["metadata"]["name"]) for o in made if o["kind"] != "CustomResourceDefinition") <= 63
    assert max(len(str(value)) for o in made for value in o["metadata"].get("labels", {}).values()) <= 63


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"regisrty": "x"}, "'regisrty'"),
        ({"metrics": {"prot": 1}}, "'prot'"),
        ({"watchNamespaces": "serving"}, "watchNamespaces"),
        ({"watchNamespaces": ["Serving"]}, "watchNamespaces"),
        ({"metrics": {"podMonitor": "yes"}}, "podMonitor"),
        ({"image": {"digest": "sha256:12"}}, "digest"),
        ({"log": {"level": "loud"}}, "level"),
        ({"extraArgs": ["workers=2"]}, "extraArgs"),
        ({"extraArgs": ["--metrics-port=1"]}, "--metrics-port is set by the value metrics.port"),
        ({"extraArgs": ["--metrics-host=127.0.0.1"]}, "--metrics-host"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_by_its_name(helm: Helm, values: Json, said: str) -> None:
    """Before anything is made."""
    with pytest.raises(HelmError) as refused:
        helm.template(*settings(**values))
    assert said in str(refused.value)


@pytest.mark.parametrize("values", [{}, {"watchNamespaces": ["serving"]}], ids=["everywhere", "namespaced"])
def test_the_notes_name_the_next_command(helm4: Helm, values: Json) -> None:
    """The notes say how to test the release and create a valid pool, and what is missing."""
    words = ("--dry-run=client", "--namespace", NAMESPACE, *settings(**values))
    notes = helm4.run("install", "kvist", str(CHART), *words).partition("NOTES:")[2]
    assert f"helm test kvist --namespace {NAMESPACE}" in notes
    [text] = [part for part in notes.split("EOF") if "kind: InferencePool" in part]
    made = yaml.safe_load(text.partition("\n")[2])
    made["metadata"] |= {"namespace": "serving", "uid": "1"}
    pool = read_pool(made)
    assert pool.gateway.mode == "Envoy"
    assert bool(made["spec"].get("accelerator")) is bool(values)
    assert "WARNING: `registry` is empty" in notes
