"""Rendered objects are complete, valid, restricted and consistent with each other."""

import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.cluster.test_rights import rules_of_the_guide
from tests.crd.cases import planned
from tests.operator.connections import Client, reaches
from tests.operator.manifested import CASES, SITE, golden, one, path, rendered, resource, text

from kvist_epp.names import POOL_GROUP
from kvist_epp.settings.settings import Settings
from kvist_operator.errors import RenderError
from kvist_operator.manifests import Api, Site
from kvist_operator.manifests.pods import quantity
from kvist_operator.spec import read_pool
from kvist_operator.spec.fields import bytes_of

VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
FOREIGN = ("gateway.", "inference.", "monitoring.", "leaderworkerset.")
Json = dict[str, Any]


@pytest.mark.parametrize("case", CASES)
def test_the_objects_are_those_of_the_file(case: str) -> None:
    """The objects of each case equal its file: whole objects, or differences from a complete case."""
    assert golden(case, rendered(case)) == path(case).read_text()


@pytest.mark.parametrize("case", CASES)
def test_no_change_of_an_object_is_missed(case: str) -> None:
    """A changed label of any object, a missing object and another order change what is kept of a case."""
    kept, found = path(case).read_text(), rendered(case)
    for made in found.objects:
        made["metadata"]["labels"]["changed"] = "yes"
        assert golden(case, found) != kept
        del made["metadata"]["labels"]["changed"]
    assert golden(case, replace(found, objects=found.objects[:-1])) != kept
    assert golden(case, replace(found, objects=found.objects[::-1])) != kept
    assert golden(case, found) == kept


@pytest.mark.parametrize("version", VERSIONS)
def test_core_objects_are_valid_for_every_kubernetes(version: str) -> None:
    """Objects are valid by the schemas of Kubernetes 1.30 to 1.37, which reject unknown fields."""
    checked = 0
    for case in ("agents", "cpu", "image", "two-nodes"):
        for made in rendered(case).objects:
            if not made["apiVersion"].startswith(FOREIGN):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    kubernetes_validate.validate(without_new_fields(made, version), version, strict=True)
                checked += 1
    assert checked > 50


def without_new_fields(made: Json, version: str) -> Json:
    """Image volumes are as new as 1.31; that ``oci://`` needs 1.35 is said in the CRD."""
    if version != "1.30" or made["kind"] != "Deployment":
        return made
    made = copy.deepcopy(made)
    pod = made["spec"]["template"]["spec"]
    pod["volumes"] = [volume for volume in pod["volumes"] if "image" not in volume]
    return made


def pods(case: str) -> Iterator[tuple[str, Json]]:
    """Return name and pod template of each object that has one."""
    for made in rendered(case).objects:
        if made["kind"] in ("Deployment", "DaemonSet"):
            yield made["metadata"]["name"], made["spec"]["template"]
        if made["kind"] == "LeaderWorkerSet":
            group = made["spec"]["leaderWorkerTemplate"]
            yield f"{made['metadata']['name']} leader", group["leaderTemplate"]
            yield f"{made['metadata']['name']} worker", group["workerTemplate"]


EVERY = [(case, name) for case in CASES for name, _ in pods(case)]


@pytest.mark.parametrize(("case", "name"), EVERY)
def test_every_pod_is_restricted_and_complete(case: str, name: str) -> None:
    """Each pod satisfies Pod Security *restricted* and has no unused token or service variable."""
    pod = dict(pods(case))[name]["spec"]
    [container] = pod["containers"]

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    allowed = {"emptyDir", "persistentVolumeClaim", "image", "secret", "configMap"}
    assert {key for volume in pod["volumes"] for key in volume} - {"name"} <= allowed
    assert pod["automountServiceAccountToken"] is (name == "twig-epp")
    assert pod["enableServiceLinks"] is False
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert "memory" in container["resources"]["limits"]
    variables = container.get("env", ())
    assert len({entry["name"] for entry in variables}) == len(variables)


@pytest.mark.parametrize("case", CASES)
def test_names_fit_and_nothing_is_there_twice(case: str) -> None:
    """Names fit also for a pool with the longest name; every object has labels, namespace and one owner."""
    found = resource(case)
    found["metadata"]["name"] = "a" * 40
    from kvist_operator.manifests import render

    objects = render(read_pool(found), planned(found), SITE).objects
    keys = [(made["kind"], made["metadata"]["name"]) for made in objects]

    assert len(set(keys)) == len(keys)
    assert max(len(name) for _, name in keys) <= 63
    for made in objects:
        assert made["metadata"]["namespace"] == "forest"
        assert made["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "kvist-operator"
        assert [ref["controller"] for ref in made["metadata"]["ownerReferences"]] == [True]


@pytest.mark.parametrize("case", CASES)
def test_every_selector_finds_pods_and_every_port_has_a_name(case: str) -> None:
    """Services, budgets, policies and monitors select existing pods, at ports that these open."""
    made = rendered(case).objects
    all_pods = [template for _, template in pods(case)]
    for each in made:
        spec = each.get("spec", {})
        selector = spec.get("selector") or spec.get("podSelector") or {}
        labels = selector.get("matchLabels", selector)
        if each["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor", "InferencePool"):
            chosen = [template for template in all_pods if matches(template, labels)]
            assert chosen, each["metadata"]["name"]
            assert wanted(each) <= {p for t in chosen for p in opened(t)}, each["metadata"]["name"]
        if each["kind"] in ("Deployment", "DaemonSet"):
            assert matches(each["spec"]["template"], labels)


def matches(template: Json, labels: Mapping[str, str]) -> bool:
    """Return whether pods of a template have these labels."""
    return set(labels.items()) <= set(template["metadata"]["labels"].items())


def opened(template: Json) -> Iterator[int | str]:
    """Return the ports of a pod, by number and name."""
    for port in template["spec"]["containers"][0].get("ports", ()):
        yield port["containerPort"]
        yield port["name"]


def wanted(made: Json) -> set[int | str]:
    """Return the ports that an object refers to."""
    spec = made["spec"]
    match made["kind"]:
        case "Service":
            return {port["targetPort"] for port in spec["ports"]}
        case "NetworkPolicy":
            return {port["port"] for rule in spec["ingress"] for port in rule.get("ports", ())}
        case "PodMonitor":
            return {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]}
        case "InferencePool":
            return {port["number"] for port in spec["targetPorts"]}
    return set()


@pytest.mark.parametrize("case", CASES)
def test_the_engine_runs_what_was_planned(case: str) -> None:
    """Command, GPUs, shared memory, grace period and the label with the batch size are those of the plan."""
    plan = planned(resource(case))
    for name, template in pods(case):
        if not name.startswith("twig-"):
            pod, container = template["spec"], template["spec"]["containers"][0]
            follows = name == "twig worker"
            assert container["command"] + container["args"] == ["vllm", *plan.argv] + ["--headless"] * follows
            assert pod["terminationGracePeriodSeconds"] == plan.pod.grace_seconds
            [shm] = [v["emptyDir"] for v in pod["volumes"] if v["name"] == "shm"]
            assert bytes_of(shm["sizeLimit"], "") == plan.pod.shm_bytes
            row = plan.hardware.accelerator
            on_node = str(min(plan.layout.gpus, plan.hardware.per_node))
            assert container["resources"]["limits"].get(row.resource) == (
                None if row.vendor == "cpu" else on_node
            )
            assert template["metadata"]["annotations"]["kvist.dev/plan"] == plan.hash


def test_followers_of_a_group_get_no_requests() -> None:
    """The label by which pickers, gateways and budgets find engines is on leaders only; followers have no
    probes, because a headless vLLM answers none."""
    leader, worker = (dict(pods("two-nodes"))[f"twig {role}"] for role in ("leader", "worker"))

    assert leader["metadata"]["labels"]["kvist.dev/pool"] == "twig"
    assert "kvist.dev/pool" not in worker["metadata"]["labels"]
    assert not {"ports", "startupProbe", "lifecycle"} & worker["spec"]["containers"][0].keys()


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        ({}, {"maxSurge": 0, "maxUnavailable": 1}),
        ({"maxUnavailable": "25%"}, {"maxSurge": 0, "maxUnavailable": "25%"}),
        ({"strategy": "SurgeFirst", "maxUnavailable": 2}, {"maxSurge": 2, "maxUnavailable": 0}),
    ],
)
def test_pods_are_replaced_as_asked(rollout: Json, expected: Json) -> None:
    """ReplaceFirst needs no spare accelerator and SurgeFirst never lacks a pod; both stop at a pod that is
    not ready, and report it only after the time that a pod may take."""
    for case, way in (("minimal", "strategy"), ("two-nodes", "rolloutStrategy")):
        kind = "Deployment" if case == "minimal" else "LeaderWorkerSet"
        spec = one(rendered(case, rollout=rollout), kind, "twig")["spec"]
        strategy = spec[way]
        assert (strategy.get("rollingUpdate") or strategy["rollingUpdateConfiguration"]) == expected
    plan = planned(resource("minimal"))
    made = one(rendered("minimal", rollout=rollout), "Deployment", "twig")["spec"]
    assert made["progressDeadlineSeconds"] > plan.pod.startup_seconds + plan.pod.grace_seconds


def test_a_change_of_an_argument_changes_the_pods_and_a_change_of_replicas_does_not() -> None:
    """Pods are replaced if and only if their arguments or their image change."""

    def template(**spec: Any) -> Json:
        found: Json = one(rendered("minimal", **spec), "Deployment", "twig")["spec"]["template"]
        return found

    assert template() != template(engine={"maxNumSeqs": 128})
    assert template() == template(replicas=5)
    assert template() == template(picker={"replicas": 3}, gateway={"mode": "Envoy"})


@pytest.mark.parametrize("case", [case for case in CASES if case != "no-picker"])
def test_the_picker_starts_with_these_arguments(case: str) -> None:
    """The picker reads the command line back as the same settings, and it has no default values."""
    container = dict(pods(case))["twig-epp"]["spec"]["containers"][0]
    settings = Settings.from_args(container["args"]).check()

    assert (settings.pool_name, settings.pool_group) == ("twig", "kvist.dev")
    assert settings.replicas == "twig-epp-peers.forest.svc:9004"
    assert settings.cert_path == settings.replica_cert_path == "/etc/kvist/tls"
    assert settings.to_args() == container["args"]
    grace = dict(pods(case))["twig-epp"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > settings.drain_timeout


def test_the_picker_may_do_what_the_guide_says() -> None:
    """The Role is the one of docs/guides/kubernetes.md, which the cluster tests run the picker with."""
    made = one(rendered("minimal"), "Role", "twig-epp")["rules"]
    guide = rules_of_the_guide("twig")
    for rule in guide:
        rule["apiGroups"] = ["kvist.dev" if g == POOL_GROUP else g for g in rule["apiGroups"]]

    assert made == guide


HUB = {"source": "hf://Qwen/Qwen3-8B"}
IMAGE = CASES["image"]["spec"]["model"]
CLAIM = CASES["claim"]["spec"]["model"]


@pytest.mark.parametrize(
    ("model", "picker", "claims", "expected"),
    [
        (HUB, {}, {}, "hf://Qwen/Qwen3-8B"),
        (HUB | {"revision": "main", "shape": IMAGE["shape"]}, {}, {}, "hf://Qwen/Qwen3-8B@main"),
        (IMAGE, {}, {}, "/model"),
        (CLAIM, {}, {"models": {"ReadWriteMany"}}, "/model/llama/3.3-70b"),
        (CLAIM, {}, {"models": {"ReadWriteOnce"}}, "claim models (ReadWriteOnce) can be mounted by one node"),
        (CLAIM, {}, {}, "access modes of claim models are unknown; set spec.picker.tokenizer"),
        (
            CLAIM | {"source": "/weights"},
            {},
            {},
            "the picker's image does not contain /weights; set spec.picker.tokenizer",
        ),
        (CLAIM, {"tokenizer": "hf://a/b"}, {}, "hf://a/b"),
        (CLAIM, {"tokenizer": "oci://registry/tokenizer:1"}, {}, "/model"),
        (CLAIM, {"tokenizer": "pvc://small/qwen"}, {}, "/model/qwen"),
        (CLAIM, {"tokenizer": "/baked/in"}, {}, "/baked/in"),
        (HUB, {"mode": "Approximate"}, {}, ""),
    ],
)
def test_where_the_picker_finds_the_tokenizer(model: Json, picker: Json, claims: Json, expected: str) -> None:
    """The picker's tokenizer comes from the model's own source if that is readable, or from
    spec.picker.tokenizer; otherwise a note says why and what to do, and the picker relies on its routing
    history."""
    site = replace(SITE, claims={name: frozenset(modes) for name, modes in claims.items()})
    found = rendered("claim", site, model=model, picker=picker)
    pod = one(found, "Deployment", "twig-epp")["spec"]["template"]["spec"]
    settings = Settings.from_args(pod["containers"][0]["args"])
    notes = [note.message for note in found.notes if note.reason == "NoTokenizer"]

    if not expected.startswith(("hf://", "/")):
        assert (settings.model, settings.kv_events) == ("", False)
        assert (len(notes), expected in "".join(notes)) == (bool(expected), True)
        return
    assert (settings.model, settings.kv_events, notes) == (expected, True, [])
    mounted = any(mount["mountPath"] == "/model" for mount in pod["containers"][0]["volumeMounts"])
    assert mounted is expected.startswith("/model")


@pytest.mark.parametrize(
    ("model", "words", "expected"),
    [
        (HUB, ["--tokenizer", "Qwen/Qwen3-0.6B"], "hf://Qwen/Qwen3-0.6B"),
        (HUB, ["--tokenizer=a/b", "--tokenizer-revision", "v2"], "hf://a/b@v2"),
        (HUB, ["--tokenizer-revision=v2"], "hf://Qwen/Qwen3-8B@v2"),
        (CLAIM, ["--tokenizer", "/model/small"], "/model/small"),
        (HUB | {"revision": "v1", "shape": IMAGE["shape"]}, ["--tokenizer", "a/b/"], "hf://a/b@v1"),
        (HUB, ["--tokenizer-rev", "None", "--tokenizer", "None"], "hf://Qwen/Qwen3-8B"),
        (CLAIM, ["--tokenizer=/model"], "/model"),
        (HUB, ["--tokenizer", "/model/small"], "cannot read the engines' --tokenizer, /model/small"),
        (HUB, ["--tokenizer", "/etc/small"], "set spec.picker.tokenizer"),
    ],
)
def test_the_picker_has_the_tokenizer_that_the_engines_were_given(
    model: Json, words: list[str], expected: str
) -> None:
    """The engines' own tokenizer, as quantized models in one file need it, is the picker's; a folder that
    only they have is reported."""
    site = replace(SITE, claims={"models": frozenset({"ReadWriteMany"})})
    found = rendered("claim", site, model=model, picker={}, engine={"extraArgs": words})
    pod = one(found, "Deployment", "twig-epp")["spec"]["template"]["spec"]
    settings = Settings.from_args(pod["containers"][0]["args"])
    notes = "".join(note.message for note in found.notes if note.reason == "NoTokenizer")
    assert expected in (settings.model, expected if expected in notes else "")
    assert bool(notes) != bool(settings.model)


def test_the_hub_s_token_goes_where_it_is_needed_and_nowhere_else() -> None:
    """The hub's token is a reference to the user's Secret, in engines and pickers."""
    ref = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    having = {name for name, t in pods("agents") if ref in t["spec"]["containers"][0]["env"]}

    assert having == {"twig", "twig-epp"}


def test_ranks_behind_one_port_publish_on_ports_of_their_own() -> None:
    """Data-parallel ranks publish on separate ports; the picker knows how many, and may connect to each."""
    engine = {"tensorParallelSize": 1, "dataParallelSize": 8}
    found = rendered(
        "minimal",
        model={"source": "hf://deepseek-ai/DeepSeek-R1"},
        engine=engine,
        accelerator={"product": "H200"},
    )
    template = one(found, "Deployment", "twig")["spec"]["template"]
    picker = Client("forest", {"app.kubernetes.io/instance": "twig", "app.kubernetes.io/component": "picker"})

    assert template["metadata"]["annotations"]["kvist.dev/data-parallel-size"] == "8"
    engine_labels = template["metadata"]["labels"]
    reached = [reaches(found, picker, engine_labels, port) for port in (5557, 5564, 5565)]
    assert reached == [True, True, False]


def test_without_a_picker_engines_publish_nothing_and_no_page_is_requested() -> None:
    """There are no events, no picker and no rights; the gateway spreads requests evenly."""
    found = rendered("no-picker")
    kinds = {made["kind"] for made in found.objects}

    assert not kinds & {"Role", "RoleBinding", "Secret"}
    assert found.expects == ()
    template = one(found, "Deployment", "twig")["spec"]["template"]
    assert template["metadata"]["annotations"]["kvist.dev/kv-events"] == "false"
    route = rendered("no-picker", gateway=CASES["route"]["spec"]["gateway"])
    [rule] = one(route, "HTTPRoute", "twig")["spec"]["rules"]
    assert [ref["kind"] for ref in rule["backendRefs"]] == ["Service"]


@pytest.mark.parametrize("case", CASES)
def test_openshift_assigns_the_users(case: str) -> None:
    """On OpenShift no pod names a user, which the cluster would refuse, except where locked memory needs root
    or the pool asks for one; nothing else differs."""
    plain, open_shift = rendered(case), rendered(case, replace(SITE, assigns_users=True))
    for before, after in zip(plain.objects, open_shift.objects, strict=True):
        for old, new in zip(contexts(before), contexts(after), strict=True):
            locks = old.get("runAsUser") == 0
            gone = {"runAsGroup", "fsGroup"} | (set() if locks else {"runAsUser"})
            chosen = CASES[case]["spec"].get("podTemplate", {}).get("spec", {}).get("securityContext", {})
            assert new == {k: v for k, v in old.items() if k not in gone - {*chosen}}
            new.clear()
            old.clear()
        assert before == after


def contexts(made: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the security contexts of the pods of a workload."""
    spec = made.get("spec") or {}
    group = spec.get("leaderWorkerTemplate", {})
    templates = (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate"))
    return [each["spec"]["securityContext"] for each in templates if each]


@pytest.mark.parametrize(
    ("case", "gone", "kinds"),
    [
        ("route", Api.INFERENCE_POOL, {"InferencePool", "HTTPRoute"}),
        ("route", Api.HTTP_ROUTE, {"InferencePool", "HTTPRoute"}),
        ("envoy-gateway", Api.EXTENSION_POLICY, {"EnvoyExtensionPolicy", "HTTPRoute"}),
        ("agents", Api.POD_MONITOR, {"PodMonitor"}),
    ],
)
def test_a_missing_api_is_a_note_and_no_object(case: str, gone: Api, kinds: set[str]) -> None:
    """Objects that need a missing API are left out, the others are rendered, and a note names the API."""
    found = rendered(case, replace(SITE, apis=SITE.apis - {gone}))

    assert not kinds & {made["kind"] for made in found.objects}
    assert "Deployment" in {made["kind"] for made in found.objects}
    [note] = [note for note in found.notes if note.reason == "ApiMissing"]
    assert gone in note.message


def test_the_label_endpoint_is_the_picker_s_own() -> None:
    """Prometheus' operator adds a label of that name for the port, which would rename the metrics' own."""
    monitors = [made for made in rendered("agents").objects if made["kind"] == "PodMonitor"]
    assert len(monitors) == 3
    for monitor in monitors:
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        assert {"action": "labeldrop", "regex": "endpoint"} in endpoint["relabelings"]


def test_podmonitors_on_auto_are_not_missed() -> None:
    """A missing PodMonitor API is not reported if the setting is automatic."""
    found = rendered("minimal", replace(SITE, apis=SITE.apis - {Api.POD_MONITOR}))

    assert [note for note in found.notes if note.reason == "ApiMissing"] == []


def test_a_replica_over_nodes_needs_leaderworkersets() -> None:
    """A replica over several nodes without LeaderWorkerSets is an error with the remedy, not half a pool."""
    with pytest.raises(RenderError, match="a replica spans 2 nodes, which needs leaderworkersets"):
        rendered("two-nodes", replace(SITE, apis=SITE.apis - {Api.LEADER_WORKER_SET}))


def test_pods_go_to_the_accelerator_the_plan_is_for() -> None:
    """Pods are restricted to the node labels of the plan's accelerator; if no node has any, a note says
    so."""
    pod = one(rendered("minimal", accelerator={"product": "L4"}), "Deployment", "twig")["spec"]["template"][
        "spec"
    ]
    [term] = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    blind = rendered("minimal", Site())

    assert term["matchExpressions"] == [
        {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-L4"]}
    ]
    assert "affinity" not in one(blind, "Deployment", "twig")["spec"]["template"]["spec"]
    assert "NodesUnknown" in [note.reason for note in blind.notes]


def test_objects_share_nothing() -> None:
    """Changing one leaves the others, and the next rendering, as they are."""
    first = rendered("agents")
    before = text(rendered("agents"))
    for made in first.objects:
        made["metadata"]["labels"].clear()
        made.get("spec", {}).clear()

    assert text(rendered("agents")) == before
    assert all("&id" not in yaml.safe_dump(made) for made in rendered("agents").objects)


@pytest.mark.parametrize("number", [1, 1 << 20, (1 << 30) - 1, 1 << 30, 3 << 29, 68 << 30, 500 << 30])
def test_quantities_are_written_as_the_api_server_writes_them_back(number: int) -> None:
    """Never less than asked for, and less than a MiB more; 1024Mi is 1Gi."""
    written = bytes_of(quantity(number), "")

    assert 0 <= written - number < 1 << 20
    assert not quantity(number).endswith("Mi") or int(quantity(number)[:-2]) % 1024


def test_pickers_are_of_the_operator_s_own_version() -> None:
    """Unless the site or the pool names an image."""
    for site, picker, image in (
        (Site(), {}, f"kvist-epp:{metadata.version('kvist')}"),
        (SITE, {}, "kvist-epp:1.2.3"),
        (SITE, {"image": "mine:1"}, "mine:1"),
    ):
        pod = one(rendered("minimal", site, picker=picker), "Deployment", "twig-epp")["spec"]["template"][
            "spec"
        ]
        assert pod["containers"][0]["image"] == image


def _picker_args(case: str, **spec: Any) -> list[str]:
    container = one(rendered(case, **spec), "Deployment", "twig-epp")["spec"]["template"]["spec"]
    found: list[str] = container["containers"][0]["args"]
    return found


def test_the_picker_knows_how_many_gpus_a_request_uses() -> None:
    """--gpus-per-endpoint is tensor times pipeline parallelism of the plan; one GPU is the default."""
    engine = {"tensorParallelSize": 2, "pipelineParallelSize": 2}
    assert "--gpus-per-endpoint=4" in _picker_args("minimal", engine=engine)
    assert not [word for word in _picker_args("minimal") if word.startswith("--gpus-per-endpoint")]


def _engine(**spec: Any) -> tuple[list[str], dict[str, str]]:
    """Arguments and literal variables of the engine of a pool with traces."""
    made = one(rendered("traced", **spec), "Deployment", "twig")["spec"]["template"]["spec"]
    [container] = made["containers"]
    return container["args"], {entry["name"]: entry.get("value", "") for entry in container["env"]}


def test_all_parts_of_a_pool_with_tracing_trace() -> None:
    """Pickers and engines export to the collector, under the names of their objects; engines trace what was
    sampled before them."""
    flags = _picker_args("traced")
    collector = "http://collector.observability:4317"
    assert {f"--trace-endpoint={collector}", "--trace-protocol=grpc", "--trace-sample-ratio=0.05"} <= {*flags}
    args, variables = _engine()
    assert args[args.index("--otlp-traces-endpoint") + 1] == collector
    assert (variables["OTEL_SERVICE_NAME"], variables["OTEL_TRACES_SAMPLER"]) == (
        "twig",
        "parentbased_always_off",
    )


def test_engines_may_be_left_out_of_traces() -> None:
    """With engines: Disabled their arguments and variables are those of a pool without tracing."""
    tracing = {"endpoint": "http://collector.observability:4317", "engines": "Disabled"}
    assert _engine(tracing=tracing) == _engine(tracing=None)
    assert "OTEL_SERVICE_NAME" not in _engine(tracing=tracing)[1]


def test_users_have_the_last_word_on_traces_of_engines() -> None:
    """A flag and a variable of the user replace those of spec.tracing."""
    engine = {
        "extraArgs": ["--otlp-traces-endpoint", "http://other:4317"],
        "env": [{"name": "OTEL_TRACES_SAMPLER", "value": "always_on"}],
    }
    args, variables = _engine(engine=engine)
    assert args.count("--otlp-traces-endpoint") == 1
    assert "http://other:4317" in args
    assert variables["OTEL_TRACES_SAMPLER"] == "always_on"
