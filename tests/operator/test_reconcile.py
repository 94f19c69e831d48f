"""One reconciliation of a pool on a cluster in memory: writes and conditions."""

import json
from datetime import timedelta
from typing import Any

import pytest
from tests.operator.ground import KEY, Ground
from tests.operator.pools import DENSE

from kvist_operator.cluster.cluster_api import Json
from kvist_operator.cluster.kinds import (
    CHILDREN,
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    NODE,
    PRESET,
    SECRET,
    ObjectKind,
    Target,
    target_of,
)
from kvist_operator.errors import Forbidden, ModelNotFound, OperatorError, Refused, Unavailable
from kvist_operator.models.shape import ModelFiles
from kvist_operator.models.source import from_model_files
from kvist_operator.reconcile.model_cache import ModelFacts, ModelQuery, look_up_facts

SERVICE = ObjectKind("", "v1", "Service", "services")
L4 = {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.count": "4"}
H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.count": "8"}


async def test_a_pool_is_made_and_then_left_alone(ground: Ground) -> None:
    """Objects are written first, the status last; reconciling again, also after a restart, writes nothing."""
    await ground.look()
    assert ground.cluster.writes[-1] == "status InferencePool twig"
    assert "apply Deployment twig" in ground.cluster.writes
    assert (await ground.said("Accepted"))["status"] == "True"

    await ground.look()
    assert ground.cluster.writes == []
    ground.restart()
    await ground.look()
    assert ground.cluster.writes == []


async def test_an_invalid_spec_is_a_condition_and_engines_keep_running(ground: Ground) -> None:
    """An invalid spec leaves the running objects unchanged; a corrected one continues."""
    await ground.look()
    before = await ground.engines()
    ground.put(engine={"extraArgs": ["--port=1"]})
    await ground.look()
    assert ground.cluster.writes == ["status InferencePool twig"]
    assert (await ground.said("Accepted"))["reason"] == "InvalidSpec"
    assert await ground.engines() == before

    ground.put(engine={"maxNumSeqs": 8})
    await ground.look()
    assert (await ground.said("Accepted"))["status"] == "True"
    assert await ground.engines() != before


async def test_a_model_that_does_not_fit_is_a_condition(ground: Ground) -> None:
    """A refused plan creates no object."""
    ground.put(model={"source": "hf://deepseek-ai/DeepSeek-R1"}, accelerator={"product": "L4", "count": 1})
    await ground.look()
    assert ground.cluster.writes == ["status InferencePool twig"]
    assert (await ground.said("Accepted"))["reason"] == "DoesNotFit"


async def test_refused_objects_are_a_condition_and_the_rest_is_written(ground: Ground) -> None:
    """All refused objects are in one condition; the call fails, so that the pool is retried."""
    refused = {
        "NetworkPolicy": Refused("apply NetworkPolicy twig: denied by a webhook", 403),
        "Role": Forbidden("apply Role twig-epp: may not", 403),
    }
    ground.cluster.refuse = lambda _verb, target: refused.get(target.kind.kind)
    with pytest.raises(Forbidden):
        await ground.look()
    said = await ground.said("Progressing")
    assert said["reason"] == "Forbidden"
    assert "may not" in said["message"]
    assert "denied by a webhook" in said["message"]
    assert await ground.engines()

    ground.cluster.refuse = lambda _verb, _target: None
    await ground.look()
    assert (await ground.said("Progressing"))["reason"] != "Forbidden"


async def test_a_busy_api_server_is_no_condition(ground: Ground) -> None:
    """A temporary error is raised and changes no condition."""
    ground.cluster.refuse = lambda _verb, target: (
        Unavailable("busy", 503) if target.kind == DEPLOYMENT else None
    )
    with pytest.raises(Unavailable):
        await ground.look()
    assert "status InferencePool twig" not in ground.cluster.writes


async def test_an_admission_webhook_that_is_down_is_a_condition(ground: Ground) -> None:
    """An error of the API server about one object is said in the status, and the others are written."""
    down = Unavailable('apply Deployment twig: failed calling webhook "policy.example.com"', 500)
    ground.cluster.refuse = lambda _verb, target: down if target.kind == DEPLOYMENT else None
    with pytest.raises(Unavailable):
        await ground.look()
    said = await ground.said("Progressing")
    assert said["reason"] == "ApiUnavailable"
    assert "failed calling webhook" in said["message"]
    assert "apply Service twig" in ground.cluster.writes


async def test_a_name_that_is_taken_is_left_to_its_owner(ground: Ground) -> None:
    """A name in use is a conflict, also where only a read by name reveals it, and also for the Secret."""
    for kind, name in (("Service", "twig"), ("Secret", "twig-epp-tls")):
        meta = {"name": name, "namespace": "forest"}
        ground.cluster.put({"apiVersion": "v1", "kind": kind, "metadata": meta, "spec": {"x": 1}})
    await ground.look()
    assert "apply Service twig" not in ground.cluster.writes
    assert "apply Secret twig-epp-tls" not in ground.cluster.writes
    said = await ground.said("Ready")
    assert said["reason"] == "NameConflict"
    assert "Service twig" in said["message"]
    assert "Secret twig-epp-tls" in said["message"]


async def test_an_object_of_ours_whose_labels_were_taken_is_taken_back(ground: Ground) -> None:
    """An owned object whose labels were removed is in no list, and gets its labels back."""
    await ground.look()
    found = await ground.cluster.get(Target(SERVICE, "forest", "twig"))
    assert found is not None
    ground.cluster.put({**found, "metadata": {**found["metadata"], "labels": {}}})
    await ground.look()
    assert ground.cluster.writes[:1] == ["apply Service twig"]
    await ground.look()
    assert ground.cluster.writes == []


async def test_certificates_come_and_go_with_the_pickers(ground: Ground) -> None:
    """A Secret in order is not read again at each reconciliation."""
    await ground.look()
    secret = Target(SECRET, "forest", "twig-epp-tls")
    made = await ground.cluster.get(secret)
    assert made is not None
    assert set(made["data"]) == {"tls.crt", "tls.key", "ca.crt"}
    public = await ground.cluster.get(Target(CONFIG_MAP, "forest", "twig-epp-ca"))
    assert public is not None
    assert list(public["data"]) == ["ca.crt"]
    ground.put(picker={"mode": "Off"})
    await ground.look()
    assert await ground.cluster.get(secret) is None
    assert await ground.cluster.get(Target(CONFIG_MAP, "forest", "twig-epp-ca")) is None


async def test_deletion_costs_are_set_before_replicas_are_lowered_and_only_then(ground: Ground) -> None:
    """Raising replicas asks no picker; lowering sets deletion costs for the number that stays."""
    for replicas in (1, 4, 2, 2):
        ground.put(replicas=replicas)
        await ground.look()
    assert ground.pickers.priced == [(0, 2)]
    assert (await ground.engines())["spec"]["replicas"] == 2


async def test_an_api_that_comes_later_is_used_and_one_that_goes_is_a_condition(ground: Ground) -> None:
    """PodMonitors give a condition without their API, objects with it, and a condition again."""
    monitors = next(kind for kind in CHILDREN if kind.kind == "PodMonitor")
    ground.put(monitoring={"podMonitor": "Enabled"})
    await ground.look()
    assert (await ground.said("Monitored"))["reason"] == "ApiMissing"
    ground.cluster.absent.discard(monitors)
    await ground.look()
    assert await ground.said("Monitored") == {}
    assert len(await ground.cluster.find(monitors)) == 2
    ground.cluster.absent.add(monitors)
    await ground.look()
    assert (await ground.said("Monitored"))["reason"] == "ApiMissing"


async def test_nodes_that_go_change_nothing_that_was_planned(ground: Ground) -> None:
    """An autoscaler's replacement of nodes changes neither accelerator nor affinity under running engines."""
    ground.put(accelerator={}, replicas=1)
    ground.cluster.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a", "labels": L4}})
    await ground.look()
    before = await ground.engines()
    assert (await ground.status())["plan"]["accelerator"]["name"] == "L4"
    ground.cluster.objects.pop(Target(NODE, "", "a"))
    for name in ("b", "c"):
        ground.cluster.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": H100}})
    ground.restart()
    await ground.look()
    assert await ground.engines() == before
    assert ground.cluster.writes == []


async def test_reported_tokens_stand_until_others_are_reported(ground: Ground) -> None:
    """Reported sizes stand after a restart until figures arrive."""
    ground.pickers.tokens = 1234
    await ground.look()
    assert (await ground.status())["reportedKvTokens"] == 1234
    ground.pickers.tokens = None
    ground.restart()
    await ground.look()
    assert ground.cluster.writes == []


async def test_a_pool_that_is_gone_or_going_is_left_to_the_garbage_collector(ground: Ground) -> None:
    """A pool that is being deleted is not written."""
    await ground.look()
    found = ground.cluster.objects[KEY.target]
    found["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "99999"}
    await ground.look()
    assert ground.cluster.writes == []
    del ground.cluster.objects[KEY.target]
    await ground.look()
    assert ground.cluster.writes == []


async def test_an_internal_error_is_a_condition_too(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error ends in a condition that asks for a report, not in a crash loop."""

    def broken(*_: object) -> Any:
        raise ZeroDivisionError("of what")

    monkeypatch.setattr("kvist_operator.reconcile.reconciler.render", broken)
    await ground.look()
    said = await ground.said("Accepted")
    assert (said["status"], said["reason"]) == ("False", "InternalError")
    assert "of what" in said["message"]
    assert issubclass(Refused, OperatorError)


async def test_a_change_of_the_pool_meanwhile_is_read_again(ground: Ground) -> None:
    """A status for an outdated version is not written, and the pool is reconciled again at once."""
    await ground.look()
    ground.put(replicas=3)
    await ground.informer.resync()
    ground.cluster.put({**ground.cluster.objects[KEY.target]})  # somebody was faster
    assert await ground.reconciler.reconcile(KEY) == 0.0
    assert await ground.reconciler.reconcile(KEY) is None
    assert (await ground.said("Progressing"))["reason"] != "Settled"


OLD, NEW = "vllm/vllm-openai:v0.32.0", "vllm/vllm-openai:v0.33.0"


def image_of(workload: Json) -> str:
    """Return the image of the engine's container."""
    containers = workload["spec"]["template"]["spec"]["containers"]
    return str(next(each["image"] for each in containers if each["name"] == "engine"))


async def test_a_new_operator_changes_no_pods_until_asked(ground: Ground) -> None:
    """A new default image leaves engines alone, is shown as pending, and is applied with its hash."""
    await ground.look()
    before = await ground.engines()

    ground.restart(build="2", engine_image=NEW)
    await ground.look()

    held, pending = await ground.engines(), (await ground.status())["pendingPlan"]
    assert held["spec"] == before["spec"]
    assert f"Deployment twig: containers[engine].image: {OLD} → {NEW}" in pending["changes"]
    assert pending["restartsEngines"] is True
    said = await ground.said("UpgradePending")
    assert (said["status"], said["reason"]) == ("True", "WaitingForApproval")
    assert f"kvist.dev/apply-plan={pending['hash']}" in said["message"]
    assert (await ground.said("Ready"))["status"] != "Unknown"
    await ground.look()
    assert ground.cluster.writes == []

    ground.annotate({"kvist.dev/apply-plan": pending["hash"]})
    await ground.look()
    assert image_of(await ground.engines()) == NEW
    assert "pendingPlan" not in await ground.status()
    assert await ground.said("UpgradePending") == {}


async def test_replicas_follow_the_spec_while_an_upgrade_waits(ground: Ground) -> None:
    """Scaling a pool neither applies what is pending nor is held back by it."""
    await ground.look()
    ground.restart(build="2", engine_image=NEW)
    await ground.look()
    pending = (await ground.status())["pendingPlan"]
    ground.put(replicas=3)
    await ground.look()

    engines = await ground.engines()
    assert (engines["spec"]["replicas"], image_of(engines)) == (3, OLD)
    assert (await ground.status())["pendingPlan"] == pending


async def test_a_change_of_the_spec_takes_the_new_defaults_along(ground: Ground) -> None:
    """An owner who changes the engine expects a rollout, so nothing stays pending."""
    await ground.look()
    ground.restart(build="2", engine_image=NEW)
    await ground.look()
    ground.put(engine={"maxModelLen": 4096})
    await ground.look()

    engines = await ground.engines()
    assert image_of(engines) == NEW
    assert "pendingPlan" not in await ground.status()


async def test_a_change_of_the_gateway_rolls_no_engines(ground: Ground) -> None:
    """A field on which engines do not depend applies no pending change to them."""
    await ground.look()
    ground.restart(build="2", engine_image=NEW)
    ground.put(picker={"replicas": 3})
    await ground.look()

    assert image_of(await ground.engines()) == OLD


async def test_a_change_of_the_interconnect_is_applied_while_an_upgrade_waits(ground: Ground) -> None:
    """A field that changes the pods of engines is applied at once, with what was pending."""
    await ground.look()
    ground.restart(build="2", engine_image=NEW)
    ground.put(interconnect={"placement": "Required", "topologyKey": "rack"})
    await ground.look()

    assert image_of(await ground.engines()) == NEW
    assert "pendingPlan" not in await ground.status()


async def test_the_same_operator_may_change_what_it_made(ground: Ground) -> None:
    """Facts of the cluster that change the pods are no upgrade: the same build applies them at once."""
    await ground.look()
    ground.restart(build="1", engine_image=OLD)
    await ground.look()

    assert ground.cluster.writes == []


def preset(namespace: str = "kvist-system", **engine: Any) -> Json:
    """Return a preset that sets fields of the engine."""
    return {
        "apiVersion": "kvist.dev/v1alpha1",
        "kind": "InferencePoolPreset",
        "metadata": {"name": "standard", "namespace": namespace},
        "spec": {"engine": engine},
    }


async def test_a_preset_is_found_in_the_namespace_of_the_pool_or_of_the_operator(ground: Ground) -> None:
    """That of the pool's namespace comes first; without any the pool says so and nothing is made."""
    ground.put(presetRef={"name": "standard"})
    await ground.look()
    said = await ground.said("Accepted")
    assert (said["status"], said["reason"]) == ("False", "InvalidSpec")
    assert "no InferencePoolPreset standard in forest or kvist-system" in said["message"]
    assert [target for target in ground.cluster.objects if target.kind == DEPLOYMENT] == []

    ground.cluster.put(preset(image=NEW))
    await ground.look()
    assert image_of(await ground.engines()) == NEW
    assert (await ground.status())["preset"].startswith("kvist-system/standard")

    ground.restart()
    ground.cluster.put(preset("forest", image=OLD))
    ground.put(presetRef={"name": "standard"}, rollout={"upgrade": "Automatic"})
    await ground.look()
    assert image_of(await ground.engines()) == OLD


async def test_a_changed_preset_waits_like_an_upgrade(ground: Ground) -> None:
    """A platform team's change rolls no pool by itself; a change of the pool's own spec takes it along."""
    ground.cluster.put(preset(image=OLD))
    ground.put(presetRef={"name": "standard"})
    await ground.look()
    ground.cluster.put(preset(image=NEW))
    await ground.look()

    assert image_of(await ground.engines()) == OLD
    pending = (await ground.status())["pendingPlan"]
    assert f"Deployment twig: containers[engine].image: {OLD} → {NEW}" in pending["changes"]
    ground.put(presetRef={"name": "standard"}, engine={"maxModelLen": 4096})
    await ground.look()
    assert image_of(await ground.engines()) == NEW
    assert "pendingPlan" not in await ground.status()


async def test_another_preset_is_a_change_of_the_pool(ground: Ground) -> None:
    """A pool that names a preset, or another one, gets its fields at once."""
    await ground.look()
    ground.cluster.put(preset(maxModelLen=4096))
    ground.restart(build="2")
    ground.put(presetRef={"name": "standard"})
    await ground.look()

    containers = (await ground.engines())["spec"]["template"]["spec"]["containers"]
    words = next(json.dumps(each) for each in containers if each["name"] == "engine")
    assert '"--max-model-len", "4096"' in words


async def test_a_deleted_preset_leaves_the_engines_alone(ground: Ground) -> None:
    """The pool says what is missing, and what runs goes on running."""
    ground.cluster.put(preset(image=OLD))
    ground.put(presetRef={"name": "standard"})
    await ground.look()
    before = await ground.engines()
    del ground.cluster.objects[target_of(preset())]
    await ground.look()

    assert (await ground.said("Accepted"))["reason"] == "InvalidSpec"
    assert await ground.engines() == before


async def test_a_cluster_without_presets_says_what_to_install(ground: Ground) -> None:
    """Pools without a preset are not affected by a CRD that was never installed."""
    ground.cluster.absent = ground.cluster.absent | {PRESET}
    await ground.look()
    assert await ground.engines()
    ground.put(presetRef={"name": "standard"})
    await ground.look()

    said = (await ground.said("Accepted"))["message"]
    assert "kubectl apply --server-side -f crds/inferencepoolpresets.yaml" in said


@pytest.mark.parametrize("upgrade", ["Automatic", "Window"])
async def test_upgrades_can_be_automatic_or_in_a_window(ground: Ground, upgrade: str) -> None:
    """Automatic upgrades are applied at once, others when the window opens, when the operator wakes."""
    window = {"days": ["Tue"], "start": "02:00", "minutes": 120, "timeZone": "Europe/Berlin"}
    ground.put(rollout={"upgrade": upgrade, "window": window})
    await ground.look()
    ground.restart(build="2", engine_image=NEW)
    again = await ground.look()

    if upgrade == "Window":
        assert image_of(await ground.engines()) == OLD
        # Tuesday, 2 o'clock in Berlin is 1 o'clock in UTC, 13 hours from now
        assert again == timedelta(hours=13).total_seconds()
        assert (await ground.status())["pendingPlan"]["nextWindow"] == "2026-11-24T01:00:00Z"
        assert (await ground.said("UpgradePending"))["reason"] == "WaitingForWindow"
        ground.now += timedelta(hours=13)
        await ground.look()
    assert image_of(await ground.engines()) == NEW


async def test_a_paused_pool_is_reported_and_not_changed(ground: Ground) -> None:
    """While spec.paused is true no object is written, not even a scale; afterwards everything is."""
    await ground.look()
    ground.put(paused=True, replicas=2, engine={"maxModelLen": 4096})
    await ground.look()

    assert [write for write in ground.cluster.writes if not write.startswith("status")] == []
    assert (await ground.engines())["spec"]["replicas"] == 0
    assert (await ground.said("Progressing"))["reason"] == "Paused"

    ground.put(replicas=2, engine={"maxModelLen": 4096})
    await ground.look()
    assert (await ground.engines())["spec"]["replicas"] == 2
    assert (await ground.said("Progressing"))["reason"] != "Paused"


async def test_an_annotation_edited_by_hand_holds_nothing(ground: Ground) -> None:
    """If what was applied cannot be read, the pods are applied as rendered."""
    await ground.look()
    engines = await ground.engines()
    engines["metadata"]["annotations"]["kvist.dev/applied"] = "{"
    ground.cluster.put(engines)
    ground.restart(build="2", engine_image=NEW)
    await ground.look()

    assert image_of(await ground.engines()) == NEW


class Changing:
    """A hub whose model has another commit and shape at each lookup, until it goes away."""

    def __init__(self) -> None:
        self.asked = 0
        self.away = False

    def __call__(self, query: ModelQuery) -> ModelFacts:
        """Answer from what is known, as the operator does, else from the hub."""
        if query.known and query.known.files:
            return look_up_facts(query)
        if self.away:
            raise ModelNotFound("spec.model.source: the hub does not answer")
        self.asked += 1
        config = json.dumps({**DENSE, "num_hidden_layers": 30 + self.asked})
        files = ModelFiles(repository="acme/new", revision=f"c{self.asked}", config=config)
        return from_model_files(files), None


async def test_a_hub_that_moves_on_or_goes_away_changes_nothing(ground: Ground) -> None:
    """Commit and files are kept in the status, so that restarts ask no hub and write nothing."""
    hub = Changing()
    ground.put(model={"source": "hf://acme/new"})
    ground.restart(look_up=hub)
    await ground.look()
    before, status = await ground.engines(), await ground.status()
    assert status["model"]["revision"] == "c1"
    args = before["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--revision") + 1] == "c1"
    await ground.look()
    assert ground.cluster.writes == []

    for away in (False, True):
        hub.away = away
        ground.restart(look_up=hub)
        await ground.look()
        assert ground.cluster.writes == []
        assert (await ground.said("Accepted"))["status"] == "True"
    assert hub.asked == 1

    hub.away = False
    ground.put(model={"source": "hf://acme/newer"})
    await ground.look()
    assert (await ground.status())["model"]["revision"] == "c2"


async def test_without_a_hub_the_first_plan_of_an_unknown_model_is_a_condition(ground: Ground) -> None:
    """A pool whose model was never looked up says so, and is planned once the hub is back."""
    hub = Changing()
    hub.away = True
    ground.put(model={"source": "hf://acme/new"})
    ground.restart(look_up=hub)
    await ground.look()
    assert (await ground.said("Accepted"))["reason"] == "ModelNotFound"
    assert "model" not in await ground.status()


async def test_the_pool_of_another_release_is_left_alone_until_it_is_handed_over(
    ground: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    """A release writes its name into the status; another one says so once and writes nothing."""
    ground.restart(release="one/kvist")
    await ground.look()
    assert (await ground.status())["operator"] == "one/kvist"

    ground.restart(release="two/kvist", engine_image="vllm/vllm-openai:v0.33.0", build="2")
    for _ in range(2):
        await ground.look()
        assert ground.cluster.writes == []
    assert caplog.text.count("the release one/kvist manages this pool") == 1

    ground.annotate({"kvist.dev/operator": "two/kvist"})
    await ground.look()
    assert (await ground.status())["operator"] == "two/kvist"
    ground.restart(release="one/kvist")
    await ground.look()
    assert ground.cluster.writes == []


async def test_engines_wait_for_the_job_that_downloads_their_weights(ground: Ground) -> None:
    """The pool creates the Job alone, shows its progress, and creates the engines after it has succeeded; the
    operator needs no more than the status of the Job."""
    ground.put(model={"source": "hf://Qwen/Qwen3-8B", "cache": {"claim": "hub"}})
    assert await ground.look()
    engines = Target(DEPLOYMENT, "forest", "twig")
    assert await ground.cluster.get(engines) is None
    [job] = [each for target, each in ground.cluster.objects.items() if target.kind == JOB]
    assert (await ground.status())["cache"]["phase"] == "Pending"

    job["status"] = {"succeeded": 1}
    ground.cluster.put(job)
    await ground.look()
    cache = (await ground.status())["cache"]
    assert (cache["phase"], cache["partsFilled"], cache["parts"]) == ("Filling", 1, 4)
    assert 0 < cache["bytes"] < cache["totalBytes"]
    assert "1 of 4 parts" in (await ground.said("Progressing"))["message"]
    assert await ground.cluster.get(engines) is None

    job["status"] = {"succeeded": 4, "conditions": [{"type": "Complete", "status": "True"}]}
    ground.cluster.put(job)
    await ground.look()
    assert await ground.cluster.get(engines) is not None
    assert (await ground.status())["cache"]["phase"] == "Filled"

    await ground.look()
    assert ground.cluster.writes == []
