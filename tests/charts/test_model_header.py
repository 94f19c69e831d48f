"""The chart's model header: `kvist-epp --role=model-header`, and what belongs to it."""

from pathlib import Path

import pytest
import yaml
from tests.charts.generate import CHART
from tests.charts.helm import MODEL_HEADER, Helm, HelmError, Json, of_kind, one, settings

from kvist_epp.settings import validation
from kvist_epp.settings.settings import Settings
from kvist_operator.manifests.object_names import PICKER_IMAGE

NAME = "kvist-model-header"
ON = settings(modelHeader__enabled=True)
KINDS = ("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor")


def made_with(helm: Helm, **values: object) -> list[Json]:
    """Everything, the filter enabled."""
    return helm.template(*ON, *settings(metrics__podMonitor="Enabled", **values))


def pod_of(objects: list[Json]) -> Json:
    """The filter's pod."""
    spec: Json = one(objects, "Deployment", MODEL_HEADER)["spec"]["template"]["spec"]
    return spec


def flags_of(objects: list[Json]) -> Settings:
    """Return the settings as the program reads them."""
    [container] = pod_of(objects)["containers"]
    assert container["command"] == ["kvist-epp"]
    return Settings.from_args(container["args"]).check()


def test_there_is_no_model_header_filter_by_default(helm4: Helm) -> None:
    """The default release has nothing of it; asked for, each of its objects is there once, by one name."""
    assert [o for o in helm4.template() if o["metadata"]["name"] == NAME] == []
    made = made_with(helm4)
    assert {one(made, kind, MODEL_HEADER)["metadata"]["name"] for kind in KINDS} == {NAME}


def test_everything_means_the_same_pods(helm4: Helm) -> None:
    """Every selector finds the filter's pods and not the operator's; ports are those that it opens."""
    made = made_with(helm4)
    template = one(made, "Deployment", MODEL_HEADER)["spec"]["template"]
    labels = template["metadata"]["labels"]
    others = one(made, "Deployment")["spec"]["template"]["metadata"]["labels"]
    spread = template["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"]
    selectors = [spread, one(made, "Service", MODEL_HEADER)["spec"]["selector"]]
    kinds = ("Deployment", "PodDisruptionBudget", "PodMonitor")
    selectors += [one(made, kind, MODEL_HEADER)["spec"]["selector"]["matchLabels"] for kind in kinds]
    selectors.append(one(made, "NetworkPolicy", MODEL_HEADER)["spec"]["podSelector"]["matchLabels"])
    assert [selector.items() <= labels.items() for selector in selectors] == [True] * len(selectors)
    assert [selector for selector in selectors if selector.items() <= others.items()] == []

    flags = flags_of(made)
    opened = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    assert opened == {
        "grpc": flags.grpc_port,
        "health": flags.grpc_health_port,
        "metrics": flags.metrics_port,
    }
    [port] = one(made, "Service", MODEL_HEADER)["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (flags.grpc_port, "grpc")


@pytest.mark.parametrize(
    ("tls", "secure", "path", "names"),
    [
        ({}, True, "", NAME),
        ({"enabled": False}, False, "", ""),
        ({"secretName": "own"}, True, "/etc/kvist/tls", ""),
    ],
    ids=["its own", "plaintext", "a Secret"],
)
def test_the_filter_understands_its_flags(
    helm4: Helm, tls: Json, secure: bool, path: str, names: str
) -> None:
    """Role, adapters, TLS and log are as the values say; a Secret is mounted where it is read."""
    values = {"modelHeader__tls": tls, "modelHeader__baseModels": {"sql.v2": "org/qwen", "poems": "org/qwen"}}
    made = made_with(helm4, **values, modelHeader__extraArgs=["--drain-delay=7"], log__level="debug")
    flags, pod = flags_of(made), pod_of(made)
    assert flags.role == validation.MODEL_HEADER
    assert validation.parse_base_models(flags.base_models) == {"sql.v2": "org/qwen", "poems": "org/qwen"}
    assert (flags.secure_serving, flags.cert_path, flags.tls_names) == (secure, path, names)
    assert (flags.drain_delay, flags.log_level) == (7, "debug")
    assert flags.drain_timeout < pod["terminationGracePeriodSeconds"]
    mounted = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    secrets = {one["name"]: one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one}
    assert {at: secrets[name] for at, name in mounted.items() if name in secrets} == (
        {path: "own"} if path else {}
    )


def test_its_image_is_the_picker_s(helm4: Helm) -> None:
    """One image has both validation."""
    [container] = pod_of(made_with(helm4))["containers"]
    assert container["image"] == PICKER_IMAGE


def test_permitted_clients_can_be_set(helm4: Helm) -> None:
    """Gateways for the filter, Prometheus for its metrics; nothing goes out; without a policy, all."""
    gateways: list[Json] = [{"namespaceSelector": {}}]
    prometheus: list[Json] = [{"podSelector": {"matchLabels": {"app": "p"}}}]
    made = made_with(helm4, modelHeader__from=gateways, networkPolicy__from=prometheus)
    policy = one(made, "NetworkPolicy", MODEL_HEADER)["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy
    told = {rule["ports"][0]["port"]: rule["from"] for rule in policy["ingress"]}
    assert told == {"grpc": gateways, "metrics": prometheus}
    assert of_kind(helm4.template(*ON, *settings(networkPolicy__enabled=False)), "NetworkPolicy") == []


def test_it_needs_no_right_and_no_token(helm4: Helm) -> None:
    """The roles and accounts of a release are the same with it and without; its pods get no token."""
    kinds = ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding", "ServiceAccount")
    with_it, without = made_with(helm4), helm4.template()
    assert [of_kind(with_it, kind) for kind in kinds] == [of_kind(without, kind) for kind in kinds]
    pod = pod_of(with_it)
    assert pod["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in pod


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"baseModel": {}}, "'baseModel'"),
        ({"tls": {"secret": "x"}}, "'secret'"),
        ({"replicas": 0}, "replicas"),
        ({"baseModels": {"a": "b,c"}}, "baseModels"),
        ({"baseModels": {"a,b": "c"}}, "baseModels"),
        ({"extraArgs": ["role=x"]}, "extraArgs"),
        ({"extraArgs": ["--base-models=a=b"]}, "--base-models is set by the value modelHeader.baseModels"),
        ({"extraArgs": ["--grpc-port=1"]}, "--grpc-port: its ports are those of the Service"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_by_its_name(helm: Helm, values: Json, said: str) -> None:
    """Typos, names that the flag cannot carry, flags that a value sets."""
    with pytest.raises(HelmError) as refused:
        helm.template(*settings(modelHeader=values))
    assert said in str(refused.value)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_notes_name_it(helm4: Helm, enabled: bool) -> None:
    """The notes name the address for gateways, and the protocol."""
    words = ("--dry-run=client", "--namespace=filters", *settings(modelHeader__enabled=enabled))
    notes = helm4.run("install", "kvist", str(CHART), *words)
    assert (f"{NAME}.filters.svc:9002, over TLS" in notes) is enabled


def test_the_examples_on_the_way_have_it() -> None:
    """Value files of the tests enable it, in plaintext and with a Secret."""
    files = sorted((CHART / "ci").glob("*-values.yaml"))
    told = [found["modelHeader"]["tls"] for found in map(read, files) if "modelHeader" in found]
    assert sorted(tls["enabled"] for tls in told) == [False, True]


def read(file: Path) -> Json:
    """Values, perhaps none."""
    return yaml.safe_load(file.read_text()) or {}
