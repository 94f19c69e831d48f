"""The shared cache for weights: the Job that fills it, the engines that wait for it, its progress."""

import copy
from dataclasses import replace
from typing import Any

import pytest
from tests.operator.manifested import SITE, rendered, resource

from kvist_operator.apply.changes import Changes, Verb, changes, stamped
from kvist_operator.manifests import Rendered
from kvist_operator.manifests.weights_cache import is_complete, progress
from kvist_operator.spec import read_pool

Json = dict[str, Any]
POOL = read_pool(resource("cached"))


def job_of(found: Rendered) -> Json:
    """Return the Job."""
    [made] = [each for each in found.objects if each["kind"] == "Job"]
    return copy.deepcopy(made)


def engines_of(found: Rendered) -> Json:
    """Return the spec of the engines' pods."""
    [made] = [o for o in found.objects if o["kind"] == "Deployment" and o["metadata"]["name"] == "twig"]
    pod: Json = made["spec"]["template"]["spec"]
    return pod


def seen(job: Json, *, succeeded: int = 0, complete: bool = False, failed: int = 0) -> Json:
    """Return a Job as the cluster has it, with a status."""
    conditions = [{"type": "Complete", "status": "True"}] if complete else []
    return {**stamped(job), "status": {"succeeded": succeeded, "failed": failed, "conditions": conditions}}


def steps(found: Changes) -> set[tuple[str, str]]:
    """Return verb and kind of the steps that concern engines and Jobs."""
    kinds = {("Deployment", "twig")}
    return {
        (str(s.verb), s.key.kind)
        for s in found.steps
        if s.key.kind == "Job" or (s.key.kind, s.key.name) in kinds
    }


def test_engines_are_created_once_the_job_has_succeeded() -> None:
    """The Job is created first; while it runs there are no engines, and the wait has its progress."""
    made = rendered("cached")
    job = job_of(made)

    first = changes(POOL, made, [])
    assert steps(first) == {("create", "Job")}
    assert first.waits == (f"Job {job['metadata']['name']} has to download the weights first",)

    half = changes(POOL, made, [seen(job, succeeded=7, failed=2)])
    assert steps(half) == set()
    assert "has downloaded 7 of 27 parts of the weights; 2 of its pods failed" in half.waits[0]

    done = changes(POOL, made, [seen(job, succeeded=27, complete=True)])
    assert steps(done) == {("create", "Deployment")}
    assert done.waits == ()


def test_engines_keep_the_old_model_until_the_new_one_is_there() -> None:
    """Other files are another Job; the engines are changed after it has succeeded."""
    old = rendered("cached")
    model = {**resource("cached")["spec"]["model"], "adapters": []}
    new = rendered("cached", model=model)
    there = [*(o for o in old.objects if o["kind"] != "Job"), seen(job_of(old), complete=True)]
    assert job_of(new)["metadata"]["name"] != job_of(old)["metadata"]["name"]

    assert steps(changes(POOL, new, there)) == {("create", "Job"), ("delete", "Job")}
    done = changes(POOL, new, [*there, seen(job_of(new), complete=True)])
    assert steps(done) == {("update", "Deployment"), ("delete", "Job")}


@pytest.mark.parametrize("complete", [False, True])
def test_a_job_that_could_not_finish_is_made_again_with_what_was_corrected(*, complete: bool) -> None:
    """The pods of a Job cannot be changed: another token or image replaces a Job that has not succeeded, and
    leaves one that has."""
    made = rendered("cached")
    job = seen(job_of(made), complete=complete, succeeded=14 if complete else 3)
    assert not [s for s in changes(POOL, made, [job]).steps if s.key.kind == "Job"]

    model = {**resource("cached")["spec"]["model"], "tokenSecretRef": {"name": "corrected"}}
    now = changes(POOL, rendered("cached", model=model), [job])
    assert [s.verb for s in now.steps if s.key.kind == "Job"] == ([] if complete else [Verb.DELETE])
    job["metadata"]["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    assert not [s for s in changes(POOL, rendered("cached", model=model), [job]).steps if s.key.kind == "Job"]


def test_engines_read_the_cache_and_never_ask_the_hub() -> None:
    """The claim is mounted read-only where the hub's client looks; the node needs no space for weights."""
    pod = engines_of(rendered("cached"))
    [engine] = pod["containers"]
    env = {each["name"]: each.get("value") for each in engine["env"]}
    [mount] = [each for each in engine["volumeMounts"] if each["name"] == "weights"]

    assert mount["readOnly"] is True
    assert (env["HF_HUB_CACHE"], env["HF_HUB_OFFLINE"]) == (mount["mountPath"], "1")
    assert {"name": "weights", "persistentVolumeClaim": {"claimName": "hub-cache"}} in pod["volumes"]
    assert "ephemeral-storage" not in engine["resources"]["requests"]
    assert "initContainers" not in pod


def test_a_folder_of_the_node_is_filled_before_each_engine() -> None:
    """There is no Job for folders of nodes: an init container downloads all files, or finds them."""
    model = {**resource("cached")["spec"]["model"], "cache": {"hostPath": "/var/cache/models"}}
    found = rendered("cached", model=model)
    pod = engines_of(found)
    [download] = pod["initContainers"]

    assert [o for o in found.objects if o["kind"] == "Job"] == []
    assert {"name": "weights", "hostPath": {"path": "/var/cache/models", "type": "Directory"}} in pod[
        "volumes"
    ]
    assert download["args"] == [
        "/weights",
        "meta-llama/Llama-3.3-70B-Instruct",
        "acme/sql-lora",
        "--parts=1",
    ]
    assert "restartPolicy" not in download
    [mount] = [each for each in download["volumeMounts"] if each["name"] == "weights"]
    assert not mount.get("readOnly")


@pytest.mark.parametrize(
    ("succeeded", "complete", "phase", "share"),
    [
        (0, False, "Filling", 0),
        (9, False, "Filling", 1 / 3),
        (27, False, "Filling", 1),
        (27, True, "Filled", 1),
    ],
)
def test_the_status_has_the_progress(succeeded: int, complete: bool, phase: str, share: float) -> None:
    """Bytes follow the parts that are there; only a complete Job has filled the cache."""
    job = job_of(rendered("cached"))
    found = progress(seen(job, succeeded=succeeded, complete=complete))
    assert found["phase"] == phase
    assert found["bytes"] == pytest.approx(share * found["totalBytes"], abs=1)
    assert found["totalBytes"] == pytest.approx(141.1e9, rel=0.01)


def test_a_job_without_a_status_is_pending() -> None:
    """The cluster has not looked at it yet, or it is refused."""
    job = job_of(rendered("cached"))
    assert progress(job)["phase"] == "Pending"
    assert not is_complete(job)


def test_the_download_reaches_the_hub_as_engines_would() -> None:
    """Mirror, proxy and authorities of the engines apply; variables of their own cache do not."""
    given = {
        "HF_ENDPOINT": "http://mirror",
        "https_proxy": "http://proxy",
        "HF_HOME": "/x",
        "NCCL_DEBUG": "INFO",
    }
    env = [{"name": name, "value": value} for name, value in given.items()]
    job = job_of(rendered("cached", engine={"env": env}))
    [container] = job["spec"]["template"]["spec"]["containers"]

    names = [each["name"] for each in container["env"]]
    assert names[:3] == ["HOME", "HF_ENDPOINT", "https_proxy"]
    assert not {"HF_HOME", "NCCL_DEBUG"} & set(names)


@pytest.mark.parametrize(
    ("modes", "advised"),
    [
        (("ReadWriteMany", "ReadWriteOnce"), False),
        (("ReadWriteOnce",), True),
        (("ReadOnlyMany",), True),
        ((), False),
    ],
)
def test_a_claim_of_one_node_is_advised_against(modes: tuple[str, ...], *, advised: bool) -> None:
    """The advice names the claim, its access mode, the field and both remedies."""
    site = replace(SITE, claims={"hub-cache": frozenset(modes)} if modes else {})
    found = [each.message for each in rendered("cached", site).notes if "spec.model.cache" in each.message]
    assert len(found) == advised
    if advised:
        assert f"claim hub-cache is {modes[0]}" in found[0]
        assert "use a claim with ReadWriteMany, or spec.model.cache.hostPath" in found[0]
