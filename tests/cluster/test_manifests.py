"""The generated objects in a real API server, with the real CRDs of others and Pod Security enforced."""

from dataclasses import replace
from typing import Any

import pytest
from tests.cluster.client import Namespace
from tests.crd.cases import cases, planned
from tests.operator.manifested import SITE

from kvist_operator.apply import Changes, changes, key_of
from kvist_operator.manifests import Rendered, Site, render
from kvist_operator.manifests.object_names import ENVOY_GATEWAY, GKE, NGINX
from kvist_operator.spec import Pool, read_pool
from kvist_operator.spec.pool import Source

pytestmark = pytest.mark.timeout(300)
APPLY = {"Content-Type": "application/apply-patch+yaml"}
PLURALS = {
    "NetworkPolicy": "networkpolicies",
    "BackendTLSPolicy": "backendtlspolicies",
    "BackendTrafficPolicy": "backendtrafficpolicies",
    "EnvoyExtensionPolicy": "envoyextensionpolicies",
    "HealthCheckPolicy": "healthcheckpolicies",
    "GCPBackendPolicy": "gcpbackendpolicies",
    "ClientSettingsPolicy": "clientsettingspolicies",
    "ProxySettingsPolicy": "proxysettingspolicies",
}
Json = dict[str, Any]


def path_of(space: Namespace, made: Json) -> str:
    """Return the path of one object."""
    group, slash, version = made["apiVersion"].partition("/")
    plural = PLURALS.get(made["kind"], f"{made['kind'].lower()}s")
    folder = space.of(group, version, plural) if slash else f"{space.path}/{plural}"
    return f"{folder}/{made['metadata']['name']}"


async def pool_in(space: Namespace, resource: Json, site: Site = SITE) -> tuple[Pool, Rendered]:
    """A pool that is really there, and its objects."""
    path = space.of("kvist.dev", "v1alpha1", "inferencepools")
    made = await space.client.ask("POST", path, resource)
    pool = read_pool(made)
    return pool, render(pool, planned(made), site)


async def apply(space: Namespace, made: Json, **query: str) -> Json:
    """Server-side, as the operator will, with unknown fields refused."""
    params = {"fieldManager": "kvist-operator", "force": "true", "fieldValidation": "Strict", **query}
    return await space.client.ask("PATCH", path_of(space, made), made, headers=APPLY, params=params)


async def carried_out(space: Namespace, pool: Pool, wanted: Rendered) -> Changes:
    """Look at everything, do what is to be done, look again: what is left to do. Engines that wait for a Job
    are made in a second round."""
    for _ in range(2):
        found = changes(pool, wanted, await looked(space, wanted))
        for step in found.steps:
            assert step.body is not None
            await apply(space, step.body)
    return changes(pool, wanted, await looked(space, wanted))


async def looked(space: Namespace, wanted: Rendered) -> list[Json]:
    """Return those of the wanted objects that exist; Jobs as if they had succeeded."""
    answers = [await space.client.ask("GET", path_of(space, o), expect=(200, 404)) for o in wanted.objects]
    complete = {"conditions": [{"type": "Complete", "status": "True"}]}
    return [
        {**answer, "status": complete} if answer["kind"] == "Job" else answer
        for answer in answers
        if answer.get("code") != 404
    ]


@pytest.mark.parametrize("case", cases("valid"), ids=lambda case: case.name)
async def test_objects_are_applied_once_and_then_left_alone(restricted: Namespace, case: Any) -> None:
    """The API server takes every object, of others' APIs too, and what it hands back is what was intended:
    nothing is left to write. Every pod passes Pod Security *restricted*, enforced."""
    pool, wanted = await pool_in(restricted, case.pool)
    left = await carried_out(restricted, pool, wanted)

    assert left == Changes(), [(str(step.key)) for step in left.steps]
    for name, template in templates(wanted):
        body = {"apiVersion": "v1", "kind": "Pod", **template}
        body["metadata"] = {**template["metadata"], "name": name.replace(" ", "-")}
        account = {"metadata": {"name": template["spec"]["serviceAccountName"]}}
        assert key_of({"apiVersion": "v1", "kind": "ServiceAccount", **account}) in map(
            key_of, wanted.objects
        )
        query = {"dryRun": "All", "fieldValidation": "Strict"}
        await restricted.client.ask("POST", f"{restricted.path}/pods", body, params=query)
    assert pool.model.kind is not Source.IMAGE or "image" in str(wanted.objects)


@pytest.mark.parametrize("picker", [{}, {"mode": "Off"}], ids=["with a picker", "without"])
async def test_policies_of_gke_are_taken_and_keep_what_a_user_adds(
    restricted: Namespace, picker: Json
) -> None:
    """The API server takes the policies of GKE; the operator's next look has nothing to write, and its next
    apply leaves a field that a user added."""
    [case] = [case for case in cases("valid") if case.name == "route"]
    resource = {**case.pool, "spec": {**case.pool["spec"], "picker": picker}}
    pool, wanted = await pool_in(restricted, resource, replace(SITE, gateways=frozenset({GKE})))
    assert await carried_out(restricted, pool, wanted) == Changes()

    [limits] = [made for made in wanted.objects if made["kind"] == "GCPBackendPolicy"]
    added = {"spec": {"default": {"securityPolicy": "armor"}}}
    merge = {"Content-Type": "application/merge-patch+json"}
    await restricted.client.ask("PATCH", path_of(restricted, limits), added, headers=merge)
    assert changes(pool, wanted, await looked(restricted, wanted)) == Changes()
    kept = (await apply(restricted, limits))["spec"]["default"]
    assert kept["securityPolicy"] == "armor"
    assert kept["timeoutSec"] == limits["spec"]["default"]["timeoutSec"]


@pytest.mark.parametrize("controller", [NGINX, ENVOY_GATEWAY])
async def test_policies_of_other_gateways_are_taken(restricted: Namespace, controller: str) -> None:
    """The API server takes the policies that only one gateway has, and nothing is left to write."""
    [case] = [case for case in cases("valid") if case.name == "route"]
    pool, wanted = await pool_in(restricted, case.pool, replace(SITE, gateways=frozenset({controller})))
    assert len(wanted.objects) > len(render(pool, planned(case.pool), SITE).objects)
    assert await carried_out(restricted, pool, wanted) == Changes()


def templates(wanted: Rendered) -> list[tuple[str, Json]]:
    """Pods of all workloads."""
    found = []
    for made in wanted.objects:
        name, spec = made["metadata"]["name"], made.get("spec", {})
        if made["kind"] == "Deployment":
            found.append((name, spec["template"]))
        elif made["kind"] == "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            found += [
                (f"{name} leader", group["leaderTemplate"]),
                (f"{name} worker", group["workerTemplate"]),
            ]
    return found


async def test_a_field_we_no_longer_set_is_taken_away(restricted: Namespace) -> None:
    """A change of the pool is one update of one object; server-side apply drops what is not said again."""
    [agents] = [case for case in cases("valid") if case.name == "agents"]
    pool, before = await pool_in(restricted, agents.pool)
    await carried_out(restricted, pool, before)
    plain = {**agents.pool, "spec": {**agents.pool["spec"], "podTemplate": {}}}
    plain["metadata"] = {"name": "twig", "namespace": restricted.name, "uid": pool.uid}
    after = render(read_pool(plain), planned(plain), SITE)

    found = changes(pool, after, await looked(restricted, after))
    assert [str(step.key) for step in found.steps] == ["Deployment twig"]
    assert await carried_out(restricted, pool, after) == Changes()
    [made] = [o for o in await looked(restricted, after) if key_of(o) == found.steps[0].key]
    assert made["spec"]["template"]["spec"]["schedulerName"] == "default-scheduler"


async def test_children_of_a_deleted_pool_name_it_as_their_owner(restricted: Namespace) -> None:
    """The garbage collector needs nothing else: uid and kind of the pool are those of the real object."""
    [minimal] = [case for case in cases("valid") if case.name == "minimal"]
    pool, wanted = await pool_in(restricted, minimal.pool)
    await carried_out(restricted, pool, wanted)
    path = f"{restricted.of('kvist.dev', 'v1alpha1', 'inferencepools')}/twig"
    real = await restricted.client.ask("GET", path)

    for made in await looked(restricted, wanted):
        [ref] = made["metadata"]["ownerReferences"]
        assert (ref["uid"], ref["kind"], ref["apiVersion"]) == (
            real["metadata"]["uid"],
            real["kind"],
            real["apiVersion"],
        )


async def test_pods_of_a_group_are_compared_by_their_group(restricted: Namespace) -> None:
    """The API server takes the affinity of a replica over nodes, and adds the group of the pod to it, so that
    replicas are not pulled together."""
    _, wanted = await pool_in(restricted, _over_nodes({"placement": "Required", "topologyKey": "rack"}))
    key = "leaderworkerset.sigs.k8s.io/group-key"
    [found] = [
        o for o in wanted.objects if o["kind"] == "ServiceAccount" and o["metadata"]["name"] == "twig-engine"
    ]
    await apply(restricted, found)
    for name, template in templates(wanted):
        if not name.startswith("twig "):
            continue
        labels = {**template["metadata"]["labels"], key: "abc"}
        body = {"apiVersion": "v1", "kind": "Pod", **template}
        body["metadata"] = {"name": name.replace(" ", "-"), "labels": labels}
        query = {"dryRun": "All", "fieldValidation": "Strict"}
        made = await restricted.client.ask("POST", f"{restricted.path}/pods", body, params=query)
        [term] = made["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        rule = {"key": key, "operator": "In", "values": ["abc"]}
        assert rule in term["labelSelector"]["matchExpressions"]


async def test_locked_memory_is_refused_where_pods_are_restricted(restricted: Namespace) -> None:
    """The API server takes the LeaderWorkerSet with RDMA, IPC_LOCK and an exclusive topology; its pods are
    refused in a restricted namespace, for the capability and the user."""
    link = {"placement": "Exclusive", "topologyKey": "rack", "rdma": {"resourceName": "rdma/hca"}}
    pool, wanted = await pool_in(restricted, _over_nodes(link))
    assert await carried_out(restricted, pool, wanted) == Changes()
    [leader] = [template for name, template in templates(wanted) if name == "twig leader"]
    body = {"apiVersion": "v1", "kind": "Pod", **leader}
    body["metadata"] = {**leader["metadata"], "name": "leader"}
    query = {"dryRun": "All"}
    answer = await restricted.client.ask("POST", f"{restricted.path}/pods", body, params=query, expect=(403,))

    assert "IPC_LOCK" in answer["message"]
    assert "runAsNonRoot" in answer["message"]


def _over_nodes(interconnect: Json) -> Json:
    [case] = [case for case in cases("valid") if case.name == "two-nodes"]
    return {**case.pool, "spec": {**case.pool["spec"], "interconnect": interconnect}}
