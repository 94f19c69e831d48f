"""Promises of overlays of pods: fields are those of Kubernetes, misspellings are found, patches pass, and an
overlay applies to the pods of its component."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator import pod_fields
from tests.operator.manifested import CASES, one, rendered, resource

from kvist_operator.errors import SpecError
from kvist_operator.manifests.object_names import CONFIG, PLAN
from kvist_operator.manifests.overlays import overlaid
from kvist_operator.spec import read_pool
from kvist_operator.spec.consistency import warnings
from kvist_operator.spec.pod_template import ENGINES, FILE, PICKERS, problems


def test_the_table_of_fields_is_that_of_kubernetes() -> None:
    """The file is what the generator writes."""
    assert pod_fields.FILE.name == FILE
    assert pod_fields.FILE.read_text() == pod_fields.text()


@pytest.mark.parametrize("case", CASES)
def test_every_rendered_pod_is_a_pod(case: str) -> None:
    """The pods of the operator itself have no problem, so the table is complete for them."""
    templates = [made["spec"]["template"] for made in rendered(case).objects if made["kind"] == "Deployment"]

    assert [list(problems(template)) for template in templates] == [[] for _ in templates]


@pytest.mark.parametrize(
    "spec",
    [
        {"nodeSelector": None},
        {"containers": [{"name": "engine", "env": [{"name": "A", "$patch": "delete"}]}]},
        {"containers": [{"name": "sidecar", "image": "a:1", "resources": {"limits": {"cpu": 1}}}]},
        {"volumes": [{"name": "a", "emptyDir": {"sizeLimit": "1Gi"}}]},
        {"tolerations": [{"$patch": "replace"}]},
        {"containers": [{"name": "proxy", "$patch": "delete"}]},
        {"containers": [{"name": "engine", "livenessProbe": {"httpGet": {"port": "http"}}}]},
        {"securityContext": {"runAsUser": 1000, "sysctls": []}},
    ],
)
def test_patches_pass(spec: dict[str, Any]) -> None:
    """Nulls, directives of a strategic merge, sidecars and valid values have no problem."""
    assert list(problems({"spec": spec})) == []


@pytest.mark.parametrize(
    ("spec", "path", "said"),
    [
        ({"containers": [{"name": "engine", "envv": []}]}, "containers[0].envv", "did you mean env?"),
        ({"containers": {"name": "engine"}}, "containers", "is an object, not a list"),
        ({"containers": ["engine"]}, "containers[0]", "is a string, not an object"),
        ({"hostNetwork": "yes"}, "hostNetwork", "is a string, not a boolean"),
        ({"containers": [None]}, "containers[0]", "is null: leave this item"),
        ({"priority": "high"}, "priority", "is a string, not a whole number"),
        ({"priority": True}, "priority", "is a boolean, not a whole number"),
        ({"initContainers": [{"name": "a"}]}, "initContainers[0].image", "is missing"),
        ({"containers": [{"$patch": None}]}, "containers[0].$patch", "write replace, delete or merge"),
        ({"containers": [{"$patch": "delete"}]}, "containers[0].name", "is missing"),
        ({"containers": [{"$patch": "merge", "image": "a"}]}, "containers[0].name", "is missing"),
        ({"nodeSelector": {"$patch": "replase"}}, "nodeSelector.$patch", "is 'replase': write replace"),
        ({"volumes": [{"name": "a", "hostpath": {}}]}, "volumes[0].hostpath", "did you mean hostPath?"),
    ],
)
def test_a_mistake_has_its_path(spec: dict[str, Any], path: str, said: str) -> None:
    """The first problem names the field down to the item of a list."""
    [first, *_] = problems({"spec": spec})

    assert first.path == f"{ENGINES.path}.spec.{path}"
    assert said in first.text
    assert first.certain


def test_a_field_that_resembles_none_is_no_error() -> None:
    """A newer Kubernetes may have it: it is a remark, and the pool is read."""
    found = resource("minimal")
    found["spec"]["podTemplate"] = {"spec": {"quantumLink": 1}}

    [remark] = warnings(read_pool(found))

    assert remark.startswith("spec.podTemplate.spec.quantumLink: is not a field of pods")


NAMES = st.sampled_from(
    ["spec", "containers", "name", "env", "resources", "limits", "$patch", "odd", "volumes"]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(NAMES, below, max_size=4),
    max_leaves=20,
)


@given(st.fixed_dictionaries({}, optional={"spec": st.dictionaries(NAMES, ANYTHING, max_size=4)}))
def test_any_overlay_is_judged(template: dict[str, Any]) -> None:
    """Whatever a user writes has problems or none, each with its path; nothing else is raised."""
    for problem in problems(template, PICKERS):
        assert problem.path.startswith(PICKERS.path)
        assert problem.text


OVERLAY: dict[str, Any] = {
    "metadata": {"labels": {"sidecar.istio.io/inject": "false"}, "annotations": {"team": "search"}},
    "spec": {
        "nodeSelector": {"node-pool": "system"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "priorityClassName": "serving",
        "imagePullSecrets": [{"name": "mirror"}],
        "affinity": {"podAntiAffinity": {}},
        "terminationGracePeriodSeconds": 900,
        "containers": [{"name": "agent", "image": "agent:1"}],
    },
}
PLACED = ("nodeSelector", "tolerations", "priorityClassName", "imagePullSecrets", "affinity")


def templates(case: str, **spec: Any) -> dict[str, Any]:
    """Return the pod templates of a pool by the names of their workloads."""
    found = rendered(case, **spec)
    return {
        o["metadata"]["name"]: o["spec"]["template"] for o in found.objects if "template" in o.get("spec", {})
    }


def names(template: dict[str, Any]) -> list[str]:
    """Return the names of the containers of a pod."""
    return [container["name"] for container in template["spec"]["containers"]]


@pytest.mark.parametrize(
    ("section", "own", "given"),
    [("picker", "twig-epp", {}), ("gateway", "twig-envoy", {"mode": "Envoy"})],
)
def test_an_overlay_changes_the_pods_of_its_component(section: str, own: str, given: dict[str, str]) -> None:
    """Labels, placement, the time to end and further containers are in the component's pods only."""
    gateway = {"gateway": {"mode": "Envoy"}}
    plain = templates("minimal", **gateway)
    found = templates("minimal", **gateway | {section: {**given, "podTemplate": OVERLAY}})

    assert {name for name in found if found[name] != plain[name]} == {own}
    made, before = found[own], plain[own]
    assert made["metadata"]["labels"] == before["metadata"]["labels"] | OVERLAY["metadata"]["labels"]
    assert made["metadata"]["annotations"].items() >= OVERLAY["metadata"]["annotations"].items()
    assert {key: made["spec"][key] for key in PLACED} == {key: OVERLAY["spec"][key] for key in PLACED}
    assert made["spec"]["terminationGracePeriodSeconds"] == 900
    assert names(made) == [*names(before), "agent"]
    apart = {"args"} if section == "picker" else set()  # they drain for as long as the pod has
    first, old = (each["spec"]["containers"][0] for each in (made, before))
    assert {key for key in first if first[key] != old[key]} == apart


@pytest.mark.parametrize(
    ("begin", "spec"),
    [
        ("twig-download", {"model": {"source": "hf://Qwen/Qwen3-8B", "cache": {"claim": "models"}}}),
        ("twig-kv-cleaner", {"offload": {"cpu": "8Gi", "shared": {"claim": "blocks", "size": "100Gi"}}}),
    ],
)
def test_other_pods_of_the_pickers_image_are_placed_as_pickers_are(begin: str, spec: dict[str, Any]) -> None:
    """Downloads and the cleaner have labels, placement and pull secrets of pickers, not their containers."""
    for picker in ({}, {"mode": "Off"}):
        found = templates("minimal", **spec, picker={**picker, "podTemplate": OVERLAY})
        [made] = [template for name, template in found.items() if name.startswith(begin)]

        assert made["metadata"]["labels"].items() >= OVERLAY["metadata"]["labels"].items()
        assert {key: made["spec"][key] for key in PLACED} == {key: OVERLAY["spec"][key] for key in PLACED}
        assert len(names(made)) == 1
        assert made["spec"].get("terminationGracePeriodSeconds") is None


def test_servers_of_lmcache_have_the_engines_pull_secrets() -> None:
    """The server of each node is placed as engines are, with their secrets for a private registry, and left
    out of a mesh with them; other labels are about engines, nulls and directives are no fields."""
    spec = {key: OVERLAY["spec"][key] for key in ("nodeSelector", "tolerations", "imagePullSecrets")}
    gone = {"nodeSelector": {**spec["nodeSelector"], "c": None, "$patch": "replace"}}
    offload = {"lmcache": {"memory": "64Gi", "image": "lmcache:1"}}
    labels = {**OVERLAY["metadata"]["labels"], "app": "chat", "kvist.dev/kv-storage-namespace": "mine"}
    overlay = {"metadata": {"labels": labels}, "spec": spec | gone}
    found = rendered("minimal", offload=offload, podTemplate=overlay)
    [server] = [made for made in found.objects if made["kind"] == "DaemonSet"]

    assert server["spec"]["template"]["spec"].items() >= spec.items()
    made = server["spec"]["template"]["metadata"]["labels"]
    selected = server["spec"]["selector"]["matchLabels"]
    assert made.items() >= (OVERLAY["metadata"]["labels"] | selected).items()
    assert "app" not in made


@pytest.mark.parametrize(
    ("section", "overlay", "said"),
    [
        (
            "picker",
            {"spec": {"containers": [{"name": "picker", "args": []}]}},
            "containers[picker].args: is set",
        ),
        ("picker", {"spec": {"containers": [{"name": "picker", "env": []}]}}, "use spec.picker.env"),
        ("picker", {"spec": {"containers": [{"name": "picker", "image": "a"}]}}, "use spec.picker.image"),
        (
            "picker",
            {"spec": {"containers": [{"name": "picker", "resources": {}}]}},
            "use spec.picker.resources",
        ),
        ("picker", {"spec": {"containers": [{"name": "epp"}]}}, "that of the pickers is called picker"),
        ("picker", {"spec": {"containers": [{"name": "pickers"}]}}, "did you mean picker?"),
        ("picker", {"spec": {"tolerationz": []}}, "did you mean tolerations?"),
        ("picker", {"spec": {"restartPolicy": "Never"}}, "restartPolicy: is set by the operator"),
        ("picker", {"nodeSelector": {}}, "spec.picker.podTemplate.nodeSelector: unknown field"),
        ("picker", {"metadata": {"labels": {"kvist.dev/pool": "a"}}}, "labels.kvist.dev/pool: is set"),
        ("gateway", {"metadata": {"labels": {"app.kubernetes.io/instance": "a"}}}, "instance: is set"),
        ("gateway", {"metadata": {"labels": {"app.kubernetes.io/component": "a"}}}, "component: is set"),
        ("gateway", {"spec": {"containers": [{"name": "envoy", "image": "a"}]}}, "value envoy.image"),
        (
            "gateway",
            {"spec": {"containers": [{"name": "envoy", "args": []}]}},
            "args: is set by the operator",
        ),
        (
            "gateway",
            {"spec": {"hostNetwork": "yes"}},
            "spec.gateway.podTemplate.spec.hostNetwork: is a string",
        ),
    ],
)
def test_what_the_operator_sets_is_refused(section: str, overlay: dict[str, Any], said: str) -> None:
    """A field that the operator sets, or that no pod has, is refused with its path and a remedy."""
    found = resource("minimal")
    found["spec"][section] = {"podTemplate": overlay}

    with pytest.raises(SpecError) as error:
        read_pool(found)
    assert str(error.value).startswith(f"spec.{section}.podTemplate")
    assert said in str(error.value)


@given(st.fixed_dictionaries({}, optional={"spec": st.dictionaries(NAMES, ANYTHING, max_size=4)}))
def test_any_overlay_without_a_problem_is_merged_or_refused(template: dict[str, Any]) -> None:
    """Whatever passes the comparison with the fields of pods gives a pod of the component, or a SpecError."""
    base = {
        "metadata": {"labels": {}},
        "spec": {"containers": [{"name": "picker", "image": "a"}], "volumes": [{"name": "tmp"}]},
    }
    if any(problem.certain for problem in problems(template, PICKERS)):
        return
    with contextlib.suppress(SpecError):
        assert "picker" in names(overlaid(base, PICKERS, template))


def test_a_new_probe_with_two_ways_is_refused() -> None:
    """A probe that the operator does not have is judged, too."""
    base = {"metadata": {}, "spec": {"containers": [{"name": "picker", "image": "a"}]}}
    probe = {"exec": {"command": ["a"]}, "grpc": {"port": 1}}

    with pytest.raises(SpecError, match="has exec and grpc, and a probe has one"):
        overlaid(base, PICKERS, {"spec": {"containers": [{"name": "picker", "livenessProbe": probe}]}})


def everywhere(overlay: dict[str, Any]) -> dict[str, Any]:
    """Return a spec whose overlays are all this one."""
    return {
        "podTemplate": overlay,
        "picker": {"podTemplate": overlay},
        "gateway": {"mode": "Envoy", "podTemplate": overlay},
    }


@pytest.mark.parametrize("section", ["", ".picker", ".gateway"])
@pytest.mark.parametrize(
    ("overlay", "field"),
    [
        ({"metadata": {"labels": None}}, "metadata.labels"),
        ({"metadata": {"labels": {"$patch": "replace", "a": "b"}}}, "metadata.labels"),
        ({"metadata": {"$patch": "replace"}}, "metadata.labels"),
        ({"spec": {"containers": None}}, "spec.containers"),
        ({"spec": {"$patch": "replace"}}, "spec.containers"),
        ({"spec": {"containers": [{"$patch": "replace"}, {"name": "a", "image": "a"}]}}, "spec.containers"),
        ({"spec": {"volumes": [{"$patch": "replace"}]}}, "spec.volumes"),
        ({"spec": {"volumes": [{"emptyDir": {}}]}}, "spec.volumes"),
    ],
)
def test_an_overlay_that_leaves_no_pod_of_its_component_is_refused(
    section: str, overlay: dict[str, Any], field: str
) -> None:
    """An overlay that takes labels, the container or a mounted volume away is refused by the operator."""
    full = everywhere(overlay)
    given = {"podTemplate": overlay} if not section else {section[1:]: full[section[1:]]}

    with pytest.raises(SpecError, match=rf"^spec{section}\.podTemplate\.{field}: "):
        rendered("minimal", **given)


@pytest.mark.parametrize("gone", [None, {"$patch": "replace"}, {PLAN: "a", CONFIG: "a"}])
def test_the_annotations_that_roll_pods_stay(gone: dict[str, str] | None) -> None:
    """Engines have the hash of their plan, Envoys that of their configuration, whatever an overlay says;
    a label that the operator does not set is the user's."""
    full = everywhere({"metadata": {"annotations": gone}})
    for section in ("podTemplate", "gateway"):
        with pytest.raises(SpecError, match=r"podTemplate.metadata.annotations: changes kvist.dev/"):
            rendered("minimal", **{section: full[section]})
    label = {"kvist.dev/role": "prefill"}
    found = templates("minimal", podTemplate={"metadata": {"labels": label}})["twig"]
    assert found["metadata"]["labels"].items() >= label.items()


@pytest.mark.parametrize(
    ("section", "own", "way"),
    [("", "engine", "httpGet"), (".picker", "picker", "grpc"), (".gateway", "envoy", "httpGet")],
)
def test_a_probe_of_another_kind_replaces_the_old_one(section: str, own: str, way: str) -> None:
    """A second way to probe is refused with the field to write; with it the probe is the new one."""

    def given(**more: Any) -> dict[str, Any]:
        probe = {"tcpSocket": {"port": 1}, **more}
        full = everywhere({"spec": {"containers": [{"name": own, "readinessProbe": probe}]}})
        return {"podTemplate": full["podTemplate"]} if not section else {section[1:]: full[section[1:]]}

    with pytest.raises(SpecError, match=rf"containers\[{own}\].readinessProbe: .* write {way}: null"):
        rendered("minimal", **given())
    found = templates("minimal", **given(**{way: None})).values()
    probes = [c.get("readinessProbe") or {} for each in found for c in each["spec"]["containers"]]
    assert [probe["tcpSocket"] for probe in probes if "tcpSocket" in probe] == [{"port": 1}]


@pytest.mark.parametrize(
    ("grace", "drains"), [(900, ["--drain-timeout=885.0"]), (5, ["--drain-timeout=1.0"]), (45, [])]
)
def test_pickers_drain_for_as_long_as_their_pods_have(grace: int, drains: list[str]) -> None:
    """A picker ends by itself before the time is over that an overlay gives it; 45 s are the default."""
    overlay = {"spec": {"terminationGracePeriodSeconds": grace}}
    found = templates("minimal", picker={"podTemplate": overlay})["twig-epp"]["spec"]

    assert found["terminationGracePeriodSeconds"] == grace
    assert [each for each in found["containers"][0]["args"] if "drain-timeout" in each] == drains


def test_a_variable_for_the_drain_is_left_alone() -> None:
    """A variable that says how long pickers drain is overridden by no flag; null is Kubernetes' own time."""
    picker = {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 600}}}
    env = [{"name": "KVIST_EPP_DRAIN_TIMEOUT", "value": "120"}]
    plain = {"podTemplate": {"spec": {"terminationGracePeriodSeconds": None}}}
    for own, drains in (({**picker, "env": env}, []), (plain, ["--drain-timeout=15.0"])):
        args = templates("minimal", picker=own)["twig-epp"]["spec"]["containers"][0]["args"]
        assert [each for each in args if "drain-timeout" in each] == drains


def test_pickers_with_an_account_of_their_own_have_its_rights() -> None:
    """The role is bound to the ServiceAccount that the overlay names, and to that of pickers that are about
    to be replaced."""
    for account, bound in (("cloud", "cloud"), (None, "default")):
        found = rendered("minimal", picker={"podTemplate": {"spec": {"serviceAccountName": account}}})
        subjects = one(found, "RoleBinding", "twig-epp")["subjects"]
        assert [each["name"] for each in subjects] == ["twig-epp", bound]


def test_a_label_that_charts_set_for_all_pods_is_left_to_the_operator() -> None:
    """A pool whose overlay says who manages the pods is served, and the operator finds them."""
    for value in ("Helm", None):
        overlay = {"metadata": {"labels": {"app.kubernetes.io/managed-by": value, "a": "b"}}}
        labels = templates("minimal", podTemplate=overlay)["twig"]["metadata"]["labels"]
        assert labels["app.kubernetes.io/managed-by"] == "kvist-operator"
        assert labels["a"] == "b"


def test_pods_beside_the_pickers_keep_their_own_labels() -> None:
    """Without pickers nothing checks their overlay, and a download is found by its labels all the same."""
    model = {"source": "hf://Qwen/Qwen3-8B", "cache": {"claim": "models"}}
    overlay = {"metadata": {"labels": {"$patch": "replace", "a": "b"}}}
    found = templates("minimal", model=model, picker={"mode": "Off", "podTemplate": overlay})
    [download] = [each for name, each in found.items() if name.startswith("twig-download")]

    assert download["metadata"]["labels"].items() >= {"a": "b", "app.kubernetes.io/instance": "twig"}.items()


def test_a_volume_that_nobody_has_may_come_from_a_webhook() -> None:
    """A mount of such a volume is left to the cluster."""
    mount = {"name": "injected", "mountPath": "/x"}
    overlay = {"spec": {"containers": [{"name": "engine", "volumeMounts": [mount]}]}}

    [engine] = templates("minimal", podTemplate=overlay)["twig"]["spec"]["containers"]
    assert mount in engine["volumeMounts"]


def test_a_preset_may_have_an_overlay_for_pools_with_an_envoy() -> None:
    """A pool without one is not warned of what its preset has for others."""
    found = resource("minimal")
    found["spec"]["presetRef"] = {"name": "a"}
    overlay = {"gateway": {"podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}}}
    preset = {"metadata": {"name": "a"}, "spec": overlay}

    assert [each for each in warnings(read_pool(found, preset=preset)) if "podTemplate" in each] == []


@pytest.mark.parametrize(
    ("section", "spec", "ignored"),
    [
        ("gateway", {}, True),
        ("gateway", {"mode": "Route", "parentRefs": [{"name": "edge"}]}, True),
        ("gateway", {"mode": "Envoy"}, False),
        ("picker", {"mode": "Off"}, True),
        ("picker", {}, False),
    ],
)
def test_an_overlay_of_no_pods_is_named(section: str, spec: dict[str, Any], ignored: bool) -> None:
    """An overlay of pods that the pool does not have is a warning, with the reason."""
    found = resource("minimal")
    found["spec"][section] = {**spec, "podTemplate": {"metadata": {"labels": {"a": "b"}}}}

    said = [
        each for each in warnings(read_pool(found)) if each.startswith(f"spec.{section}.podTemplate has no")
    ]
    assert bool(said) == ignored
