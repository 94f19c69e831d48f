"""Steps lead to the desired objects from any state, modify only owned objects, and keep generations apart."""

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.manifested import CASES, UID, rendered, resource

from kvist_operator.apply import Changes, Key, Verb, as_intended, changes, key_of, stamped
from kvist_operator.apply.paired_rollout import in_step
from kvist_operator.manifests import Rendered
from kvist_operator.manifests.object_names import Ref
from kvist_operator.spec import read_pool
from kvist_operator.spec.pool import Pool, Rollout

Json = dict[str, Any]
RENDERED = {case: rendered(case) for case in CASES}
POOL = read_pool(resource("minimal"))
SURGE = replace(POOL, rollout=Rollout(strategy="SurgeFirst"))
GPU_CASES = st.sampled_from(sorted(CASES))


class World:
    """A cluster of plain objects, with applies, deletions, and a controller that makes workloads ready."""

    def __init__(self, objects: Iterable[Json] = ()) -> None:
        self.objects = {key_of(o): copy.deepcopy(o) for o in objects}
        self.most_workloads = 0

    def look(self, pool: Pool, wanted: Rendered) -> Changes:
        """Return what to do now."""
        return changes(pool, wanted, copy.deepcopy(list(self.objects.values())))

    def do(self, found: Changes, upto: int | None = None) -> None:
        """Run the first steps."""
        for step in found.steps[:upto]:
            if step.verb is Verb.DELETE:
                self.objects[step.key]["metadata"]["deletionTimestamp"] = "now"
            else:
                assert step.body is not None
                old = self.objects.get(step.key, {"metadata": {"generation": 0}})
                assert step.verb is (Verb.UPDATE if step.key in self.objects else Verb.CREATE)
                self.objects[step.key] = self._served(step.body, old)
            running = [key for key in self.objects if key.name == "twig" and key.kind in WORKLOADS]
            self.most_workloads = max(self.most_workloads, len(running))

    def _served(self, body: Json, old: Json) -> Json:
        made = copy.deepcopy(body)
        made["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
        return made

    def settle(self) -> None:
        """Complete deletions and Jobs, and make workloads ready."""
        for key, found in list(self.objects.items()):
            if "deletionTimestamp" in found["metadata"]:
                del self.objects[key]
            elif found["kind"] == "Job":
                found["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
            elif found["kind"] in WORKLOADS:
                replicas = found["spec"].get("replicas", 1)
                found["status"] = {
                    "replicas": replicas,
                    "readyReplicas": replicas,
                    "observedGeneration": found["metadata"]["generation"],
                }

    def reach(self, pool: Pool, wanted: Rendered) -> int:
        """Return the number of rounds until nothing is left to do."""
        for number in range(6):
            found = self.look(pool, wanted)
            if not found.steps and not found.waits:
                return number
            self.do(found)
            self.settle()
        raise AssertionError("no end")


WORKLOADS = ("Deployment", "LeaderWorkerSet")


@settings(max_examples=60)
@given(GPU_CASES, GPU_CASES, st.booleans(), st.lists(st.integers(0, 20), max_size=4))
def test_from_anywhere_to_what_is_wanted(before: str, after: str, surge: bool, crashes: list[int]) -> None:
    """Crashes at any step lead to the same intended objects in the end; ReplaceFirst never has two engine
    workloads."""
    pool = SURGE if surge else POOL
    world = World()
    world.reach(pool, RENDERED[before])
    for steps in crashes:
        world.do(world.look(pool, RENDERED[after]), steps)
        world.settle()
    world.reach(pool, RENDERED[after])

    assert set(world.objects) == {key_of(o) for o in RENDERED[after].objects}
    wanted = in_step({key_of(o): o for o in RENDERED[after].objects}, world.objects)
    assert all(as_intended(each, world.objects[key]) for key, each in wanted.items())
    assert surge or world.most_workloads <= 1


def test_at_rest_nothing_is_written() -> None:
    """Defaults of the API server, status and fields of other managers cause no write."""
    world = World()
    world.reach(POOL, RENDERED["agents"])
    for found in world.objects.values():
        found["metadata"] |= {"uid": "x", "resourceVersion": "7", "managedFields": [{}]}
        found["metadata"]["annotations"]["deployment.kubernetes.io/revision"] = "3"
        found.setdefault("spec", {})["another"] = {"default": 1}
        found["status"] = {"replicas": 1}

    assert world.look(POOL, RENDERED["agents"]) == Changes()


def deployment(world: World) -> Json:
    """Return the Deployment of the engines."""
    return world.objects[Key("apps", "Deployment", "twig")]


def pod(world: World) -> Json:
    """Return the container of the engines."""
    found: Json = deployment(world)["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize("what", ["field", "item", "annotation"])
def test_drift_is_mended(what: str) -> None:
    """A changed field, a removed item and a foreign intent are each repaired."""
    world = World()
    world.reach(POOL, RENDERED["minimal"])
    if what == "field":
        deployment(world)["spec"]["replicas"] = 7
    elif what == "item":
        del pod(world)["containers"][0]["env"][0]
    else:
        deployment(world)["metadata"]["annotations"]["kvist.dev/intent"] = "old"

    [step] = world.look(POOL, RENDERED["minimal"]).steps
    assert (step.verb, step.key.kind, step.key.name) == (Verb.UPDATE, "Deployment", "twig")


def test_quantities_in_another_spelling_are_the_same() -> None:
    """Quantities in another notation (2048Mi as 2Gi, 1000m as 1) are equal, other fields are not."""
    world = World()
    world.reach(POOL, RENDERED["minimal"])
    amounts = world.objects[Key("apps", "Deployment", "twig-epp")]["spec"]["template"]["spec"]["containers"][
        0
    ]
    amounts["resources"]["limits"]["memory"] = "4096Mi"
    amounts["resources"]["requests"]["cpu"] = "0.5"
    assert world.look(POOL, RENDERED["minimal"]).steps == ()

    amounts["resources"]["limits"]["memory"] = "4095Mi"
    assert len(world.look(POOL, RENDERED["minimal"]).steps) == 1


def test_objects_of_other_owners_are_not_modified() -> None:
    """An object without our owner reference, or with an earlier pool's, is a conflict and is not modified."""
    for owners in ([], [{"uid": "another", "controller": True}], [{"uid": UID, "controller": False}]):
        theirs = copy.deepcopy(RENDERED["minimal"].objects[-1])
        theirs["metadata"]["ownerReferences"] = owners
        world = World([theirs])
        found = world.look(POOL, RENDERED["minimal"])

        assert found.conflicts == (key_of(theirs),)
        assert key_of(theirs) not in {step.key for step in found.steps}
        assert len(found.steps) == len(RENDERED["minimal"].objects) - 1


def test_only_ours_is_pruned() -> None:
    """Objects of other owners, without our labels, or made elsewhere by the operator are not deleted."""
    kept = [
        made("Secret", "twig-epp-tls"),
        made("ConfigMap", "theirs", uid="another"),
        made("ConfigMap", "unlabelled", labels={}),
    ]
    world = World([*kept, made("ConfigMap", "stale")])
    world.reach(POOL, RENDERED["minimal"])

    assert {key_of(o) for o in kept} <= set(world.objects)
    assert Key("", "ConfigMap", "stale") not in world.objects
    assert Ref("Secret", "twig-epp-tls") in RENDERED["minimal"].expects


def made(kind: str, name: str, *, uid: str = UID, labels: Json | None = None) -> Json:
    """Return a small object."""
    managed = {"app.kubernetes.io/managed-by": "kvist-operator"}
    meta = {
        "name": name,
        "labels": managed if labels is None else labels,
        "ownerReferences": [{"uid": uid, "controller": True}],
    }
    return {"apiVersion": "v1", "kind": kind, "metadata": meta}


def test_replace_first_gives_accelerators_back_before_it_takes_others() -> None:
    """From one node to two, the LeaderWorkerSet is created only when the Deployment has gone."""
    world = World()
    world.reach(POOL, RENDERED["minimal"])
    old, new = Key("apps", "Deployment", "twig"), Key("leaderworkerset.x-k8s.io", "LeaderWorkerSet", "twig")

    found = world.look(POOL, RENDERED["two-nodes"])
    assert (found.steps[0].verb, found.steps[0].key) == (Verb.DELETE, old)
    assert new not in {step.key for step in found.steps}
    [wait] = found.waits
    assert wait.startswith("Deployment twig has to release its accelerators first; nothing serves from then")
    world.do(found)
    again = world.look(POOL, RENDERED["two-nodes"])
    assert ({step.key for step in again.steps} & {old, new}, bool(again.waits)) == (set(), True)
    world.settle()
    assert new in {step.key for step in world.look(POOL, RENDERED["two-nodes"]).steps}


def test_surge_first_keeps_the_old_until_the_new_serves() -> None:
    """With SurgeFirst the Deployment stays until the LeaderWorkerSet has all replicas ready."""
    world = World()
    world.reach(SURGE, RENDERED["minimal"])
    old, new = Key("apps", "Deployment", "twig"), Key("leaderworkerset.x-k8s.io", "LeaderWorkerSet", "twig")

    found = world.look(SURGE, RENDERED["two-nodes"])
    assert (new in {s.key for s in found.steps}, old in {s.key for s in found.steps}) == (True, False)
    world.do(found)
    assert world.look(SURGE, RENDERED["two-nodes"]).steps == ()
    world.settle()
    assert [step.key for step in world.look(SURGE, RENDERED["two-nodes"]).steps] == [old]


def test_routes_are_created_last_and_deleted_first() -> None:
    """Service accounts and rights are created before pods, and pods before routes; deletion has the reverse
    order."""
    kinds = [step.key.kind for step in World().look(POOL, RENDERED["route"]).steps]
    assert kinds.index("ServiceAccount") < kinds.index("Deployment") < kinds.index("HTTPRoute")

    world = World()
    world.reach(POOL, RENDERED["envoy-gateway"])
    gone = [s.key.kind for s in world.look(POOL, RENDERED["minimal"]).steps if s.verb is Verb.DELETE]
    assert gone == ["HTTPRoute", "EnvoyExtensionPolicy", "BackendTrafficPolicy", "BackendTLSPolicy"]


def test_what_is_being_deleted_is_waited_for() -> None:
    """A child that is being deleted by hand is created again once it has gone."""
    world = World()
    world.reach(POOL, RENDERED["minimal"])
    deployment(world)["metadata"]["deletionTimestamp"] = "now"

    found = world.look(POOL, RENDERED["minimal"])
    assert (found.steps, found.waits) == ((), ("Deployment twig is being deleted",))
    world.settle()
    [step] = world.look(POOL, RENDERED["minimal"]).steps
    assert step.verb is Verb.CREATE


def test_the_stamp_is_of_the_intent() -> None:
    """The stamp is the same for the same intent, stamped or not, and another for another intent."""
    one, other = RENDERED["minimal"].objects[:2]

    assert as_intended(stamped(one), stamped(one))
    assert as_intended(one, stamped(one))
    assert not as_intended(one, one)
    assert not as_intended(one, stamped(other))
