"""Rollouts of a pool with roles, with a model of the controllers of Deployments and LeaderWorkerSets."""

from typing import Any

import pytest
from tests.operator.pools import known, pool

from kvist_operator.apply.changes import changes, key_of
from kvist_operator.apply.paired_rollout import in_step, role_of
from kvist_operator.manifests import Rendered, Site, render
from kvist_operator.plan import make_plan
from kvist_operator.spec import Pool

Json = dict[str, Any]
NAME = "Qwen/Qwen3-8B"


def made(image: str, *, prefill: int | Json = 2, decode: int = 4) -> tuple[Pool, Rendered]:
    """Return a pool with roles and its objects; engines run this image."""
    own = prefill if isinstance(prefill, dict) else {"replicas": prefill}
    roles = {"mode": "Roles", "prefill": own, "decode": {"replicas": decode}}
    found = pool(
        f"hf://{NAME}",
        engine={"image": image},
        accelerator={"product": "H100-80GB"},
        disaggregation=roles,
        picker={"replicas": 1},
    )
    return found, render(found, make_plan(found, known(NAME)), Site())


class Controllers:
    """The workloads of a cluster, of which each step replaces one pod where that is allowed.

    Pods are ready one step after they are created, and available one step after that. ``kind`` turns
    Deployments into LeaderWorkerSets, whose ``partition`` is obeyed instead of ``paused``.
    """

    def __init__(self, kind: str = "Deployment") -> None:
        self.kind = kind
        self.found: dict[Any, Json] = {}
        self.pods: dict[Any, list[tuple[str, int]]] = {}
        """Image and age of each pod, in steps."""
        self.broken: set[str] = set()
        """Images that never become ready."""

    def typed(self, rendered: Rendered) -> dict[Any, Json]:
        """Return the objects by key, with workloads of this kind."""
        return {key_of(each): each for each in map(self._typed, rendered.objects)}

    def _typed(self, made: Json) -> Json:
        if self.kind == "Deployment" or not role_of(made):
            return made
        spec = made["spec"]
        rolling = {"maxUnavailable": 1, "maxSurge": 0}
        groups = {
            "replicas": spec["replicas"],
            "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": rolling},
            "leaderWorkerTemplate": {"leaderTemplate": spec["template"]},
        }
        return {**made, "apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": self.kind, "spec": groups}

    def apply(self, rendered: Rendered) -> None:
        """Apply the objects as the operator does."""
        wanted = self.typed(rendered)
        for key, each in in_step(wanted, self.found).items():
            if role_of(each):
                before = self.found.get(key)
                generation = before["metadata"]["generation"] if before else 0
                changed = before is None or before["spec"] != each["spec"]
                meta = {**each["metadata"], "generation": generation + changed}
                self.found[key] = {**each, "metadata": meta, "status": (before or {}).get("status", {})}

    def step(self) -> None:
        """Let every controller see its workload, and replace or create one pod."""
        for key, each in self.found.items():
            image, pods = self._image(each), self.pods.setdefault(key, [])
            pods[:] = [(of, age + (of not in self.broken)) for of, age in pods]
            while len(pods) < each["spec"]["replicas"]:
                pods.append((image, 0))
            old = [at for at, (of, _) in enumerate(pods) if of != image]
            if old and all(age >= 2 for _, age in pods) and self._may(each, len(pods) - len(old)):
                pods[old[-1]] = (image, 0)
            self._observe(each, pods, image)

    def _may(self, each: Json, updated: int) -> bool:
        if self.kind == "Deployment":
            return not each["spec"].get("paused")
        partition = each["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"].get("partition", 0)
        return bool(updated < each["spec"]["replicas"] - partition)

    def _observe(self, each: Json, pods: list[tuple[str, int]], image: str) -> None:
        each["status"] = {
            "replicas": len(pods),
            "updatedReplicas": sum(of == image for of, _ in pods),
            "readyReplicas": sum(age >= 1 for _, age in pods),
        }
        if self.kind == "Deployment":
            each["status"]["availableReplicas"] = sum(age >= 2 for _, age in pods)
            each["status"]["observedGeneration"] = each["metadata"]["generation"]

    @staticmethod
    def _image(each: Json) -> str:
        spec = each["spec"]
        template = spec.get("template") or spec["leaderWorkerTemplate"]["leaderTemplate"]
        return str(template["spec"]["containers"][0]["image"])

    def ready(self, role: str, image: str) -> int:
        """Return the ready engines of a role with this image."""
        return sum(
            of == image and age >= 1
            for key, each in self.found.items()
            if role_of(each) == role
            for of, age in self.pods[key]
        )


OLD, NEW = "vllm/vllm-openai:v0.32.0", "vllm/vllm-openai:v0.33.0"


def rolled(controllers: Controllers, old: Rendered, new: Rendered, steps: int = 80) -> list[tuple[int, ...]]:
    """Apply the old objects, then the new ones for so many steps; return the ready engines after each: old
    and new ones for prefill, old and new ones for decode."""
    for _ in range(4):
        controllers.apply(old)
        controllers.step()
    seen = []
    for _ in range(steps):
        controllers.apply(new)
        controllers.step()
        seen.append(
            tuple(controllers.ready(role, image) for role in ("prefill", "decode") for image in (OLD, NEW))
        )
    return seen


@pytest.mark.parametrize("kind", ["Deployment", "LeaderWorkerSet"])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 4), (4, 2), (3, 3), (1, 5), (2, 2)])
def test_a_rollout_ends_and_keeps_pairs(kind: str, prefill: int, decode: int) -> None:
    """All engines are replaced, one at a time over both roles, and with two or more engines in each role
    there is always a pair of one generation."""
    (_, old), (_, new) = (made(image, prefill=prefill, decode=decode) for image in (OLD, NEW))
    seen = rolled(Controllers(kind), old, new)

    assert seen[-1] == (0, prefill, 0, decode)
    assert all(sum(each) >= prefill + decode - 1 for each in seen)
    if prefill > 1 and decode > 1:
        assert all((a and c) or (b and d) for a, b, c, d in seen)


@pytest.mark.parametrize("kind", ["Deployment", "LeaderWorkerSet"])
def test_decode_goes_first_and_roles_take_turns(kind: str) -> None:
    """The new engines come in the order of the shares that are done, decode first where these are equal."""
    (_, old), (_, new) = made(OLD), made(NEW)
    seen = rolled(Controllers(kind), old, new)

    order = list(dict.fromkeys((b, d) for _, b, _, d in seen))
    assert order == [(0, 0), (0, 1), (1, 1), (1, 2), (1, 3), (2, 3), (2, 4)]


@pytest.mark.parametrize("kind", ["Deployment", "LeaderWorkerSet"])
def test_a_broken_generation_costs_one_engine(kind: str) -> None:
    """If new engines never become ready, one engine of decode is lost and all others stay as they are."""
    controllers = Controllers(kind)
    controllers.broken.add(NEW)
    seen = rolled(controllers, made(OLD)[1], made(NEW)[1])

    assert seen[-1] == (2, 0, 3, 0)


def test_a_change_of_one_role_leaves_the_other_alone() -> None:
    """The role whose pods differ is replaced alone, and is not held."""
    _, old = made(OLD)
    _, new = made(OLD, prefill={"replicas": 2, "engine": {"maxNumSeqs": 32}})
    controllers = Controllers()
    rolled(controllers, old, old, steps=4)
    controllers.apply(new)

    held = {role_of(each): each["spec"].get("paused") for each in controllers.found.values()}
    assert held == {"prefill": None, "decode": None}


def test_a_rollout_goes_on_with_a_new_operator() -> None:
    """The turn follows from the observed workloads alone: the same state gives the same objects."""
    controllers = Controllers()
    (_, old), (_, new) = made(OLD), made(NEW)
    rolled(controllers, old, new, steps=9)

    wanted = controllers.typed(new)
    assert in_step(wanted, controllers.found) == in_step(dict(wanted), dict(controllers.found))


def test_replicas_of_an_autoscaler_stay() -> None:
    """A workload that an autoscaler scales is created without replicas, and keeps the observed ones later."""
    owner, found = made(OLD, prefill={"scaling": "External"})
    wanted = {key_of(each): each for each in found.objects}
    first = in_step(wanted, {})
    [key] = [key for key, each in first.items() if role_of(each) == "prefill"]
    assert "replicas" not in first[key]["spec"]

    there = {
        at: {**each, "spec": {**each["spec"], "replicas": 7}} for at, each in first.items() if role_of(each)
    }
    assert in_step(wanted, there)[key]["spec"]["replicas"] == 7
    assert owner.disaggregation is not None


def test_engines_without_roles_are_deleted_before_those_with_roles_come() -> None:
    """Engines of a pool that gets roles release their accelerators first, as with ReplaceFirst."""
    plain = pool(f"hf://{NAME}", accelerator={"product": "H100-80GB"})
    before = render(plain, make_plan(plain, known(NAME)), Site())
    owner, after = made(OLD)
    reference = [{"controller": True, "uid": owner.uid}]
    there = [{**o, "metadata": {**o["metadata"], "ownerReferences": reference}} for o in before.objects]

    found = changes(owner, after, there)
    verbs = {str(step.key): str(step.verb) for step in found.steps}
    assert verbs["Deployment twig"] == "delete"
    assert not {"Deployment twig-prefill", "Deployment twig-decode"} & verbs.keys()
    [wait] = found.waits
    assert wait.startswith("Deployment twig has to release its accelerators first; nothing serves from then")
