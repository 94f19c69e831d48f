"""The CRD in a real API server: what it takes, defaults and refuses."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml
from tests.cluster.client import Client, Namespace
from tests.crd.cases import CRD, Case, cases
from tests.crd.presets import PRESETS

from kvist_operator.engine_flags import GONE, OWNED
from kvist_operator.flag_table import VERSIONS, flags
from kvist_operator.spec import read_pool

NAME = "inferencepools.kvist.dev"
_MERGE = {"Content-Type": "application/merge-patch+json"}
Answer = tuple[int, dict[str, Any]]


@pytest.fixture
async def pools(space: Namespace) -> AsyncIterator["Pools"]:
    """Our InferencePools in a namespace of this test; another test's CRD goes first, this one after."""
    await space.client.uninstall(NAME)
    await space.client.install_crds(yaml.safe_load(CRD.read_text()))
    yield Pools(space)
    await space.client.uninstall(NAME)


class Pools:
    """Pools of one namespace."""

    def __init__(self, space: Namespace) -> None:
        self.path = space.of("kvist.dev", "v1alpha1", "inferencepools")
        self.session = space.client.session
        self.client: Client = space.client

    async def tried(self, pool: dict[str, Any]) -> Answer:
        """Return the API server's answer to ``kubectl apply --dry-run=server``."""
        return await self.tried_at(self.path, pool)

    async def tried_at(self, path: str, made: dict[str, Any]) -> Answer:
        """Return the answer for an object of another kind."""
        query = {"dryRun": "All", "fieldValidation": "Strict"}
        async with self.session.post(path, json=made, params=query) as response:
            return response.status, await response.json()


async def test_valid_pools_are_taken_with_the_defaults_of_the_reader(pools: Pools) -> None:
    """Each is admitted; with the server's defaults filled in it is read as the same pool."""
    for case in cases("valid"):
        status, answer = await pools.tried(case.pool)
        assert status == 201, (case.name, answer)
        assert _read(answer) == _read(case.pool), case.name
        assert answer["spec"]["replicas"] == case.pool["spec"].get("replicas", 1)


def _read(resource: dict[str, Any]) -> Any:
    meta = {"name": resource["metadata"]["name"], "namespace": "n"}
    return read_pool({**resource, "metadata": meta})


async def test_invalid_pools_are_refused_with_field_and_remedy(pools: Pools) -> None:
    """Each is refused with the message of its file, or taken where only the operator can know better."""
    wrong = {}
    for case in cases("invalid"):
        status, answer = await pools.tried(case.pool)
        if not _judged(case, status, answer):
            wrong[case.name] = f"{status} {answer.get('message')}"
    assert not wrong, "\n".join(f"{name}: {said}" for name, said in wrong.items())


async def test_doubtful_pools_are_taken(pools: Pools) -> None:
    """A pool of which the operator only warns is admitted by the API server."""
    for case in cases("warned"):
        status, answer = await pools.tried(case.pool)
        assert status == 201, (case.name, answer)


def _judged(case: Case, status: int, answer: dict[str, Any]) -> bool:
    if not case.api:
        return status == 201
    return status in (400, 422) and case.api in answer["message"]


async def test_every_flag_of_the_plan_and_every_flag_that_is_gone_is_refused(pools: Pools) -> None:
    """The rules of the CRD know what kvist_operator.engine_flags knows, in every spelling of a version."""
    words = {f"--{name}" for name in (*OWNED, *GONE)}
    for version in VERSIONS:
        owned = [flag for name, flag in flags(version).items() if name in OWNED]
        words |= {spelled for flag in owned for spelled in (*flag.also, *flag.off)}
    for word in sorted(words):
        status, answer = await pools.tried(_pool(word))
        assert (status, "extraArgs[0]" in answer.get("message", "")) == (422, True), word
    for word in ("--seed", "--block-size=16", "--long-prefill-token-threshold", "-cc.mode=3", "-q=awq"):
        status, answer = await pools.tried(_pool(word))
        assert status == 201, answer


def _pool(*extra: str) -> dict[str, Any]:
    return {
        "apiVersion": "kvist.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "twig"},
        "spec": {"model": {"source": "hf://a/b"}, "engine": {"extraArgs": list(extra)}},
    }


async def test_a_pool_scales_through_its_subresource(pools: Pools) -> None:
    """An autoscaler reads replicas and selector, and writes replicas, without knowing the kind."""
    await pools.client.ask("POST", pools.path, _pool())
    status = {"replicas": 1, "selector": "kvist.dev/pool=twig", "targetPorts": [{"number": 8000}]}
    await pools.client.ask("PATCH", f"{pools.path}/twig/status", {"status": status}, headers=_MERGE)

    scale = await pools.client.ask("GET", f"{pools.path}/twig/scale")
    assert (scale["spec"], scale["status"]) == (
        {"replicas": 1},
        {"replicas": 1, "selector": "kvist.dev/pool=twig"},
    )
    await pools.client.ask("PATCH", f"{pools.path}/twig/scale", {"spec": {"replicas": 4}}, headers=_MERGE)
    found = await pools.client.ask("GET", f"{pools.path}/twig")
    assert (found["spec"]["replicas"], found["metadata"]["generation"]) == (4, 2)


async def test_the_crd_itself_has_no_complaint(pools: Pools) -> None:
    """The CRD is structural, its rules are within the cost limit, and its names are free."""
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{NAME}"
    conditions = (await pools.client.ask("GET", path))["status"]["conditions"]

    assert {c["type"]: c["status"] for c in conditions} == {"NamesAccepted": "True", "Established": "True"}


async def test_presets_are_taken_and_checked_like_pools(pools: Pools) -> None:
    """Sections of a pool are a preset; wrong values, and what only a pool may have, are refused."""
    await pools.client.install_crds(yaml.safe_load(PRESETS.read_text()))
    try:
        where = pools.path.replace("inferencepools", "inferencepoolpresets")
        good = await pools.tried_at(where, _preset(engine={"image": "vllm/vllm-openai:v0.33.0"}))
        assert good[0] == 201, good
        for spec, field in (
            ({"engine": {"maxNumSeqs": 0}}, "spec.engine.maxNumSeqs"),
            ({"model": {"source": "hf://a/b"}}, "spec.model.source"),
            ({"replicas": 3}, "spec.replicas"),
            ({"gateway": {"mode": "Route", "flavor": "EnvoyGateway"}}, "spec.gateway.parentRefs"),
        ):
            status, answer = await pools.tried_at(where, _preset(**spec))
            assert (status in (400, 422), field in answer.get("message", "")) == (True, True), answer
    finally:
        await pools.client.uninstall("inferencepoolpresets.kvist.dev")


async def test_no_default_hides_the_value_of_a_preset(pools: Pools) -> None:
    """The API server adds nothing to the sections of a pool that a preset may have."""
    sections: dict[str, Any] = {"engine": {"maxModelLen": 4096}, "rollout": {"drainSeconds": 5}}
    sections |= {"picker": {}, "gateway": {}}
    made = _pool()
    made["spec"] |= {**sections, "presetRef": {"name": "h100"}}
    status, answer = await pools.tried(made)

    assert status == 201, answer
    assert {name: answer["spec"][name] for name in sections} == sections


def _preset(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kvist.dev/v1alpha1",
        "kind": "InferencePoolPreset",
        "metadata": {"name": "h100"},
        "spec": spec,
    }
