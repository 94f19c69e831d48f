"""A pool in a whole cluster: from ``kubectl apply`` to an answer, and through what happens to pools later.

The tests share one pool, in order, as it would live.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.cluster.certified import authorities, pickers, picks, shown
from tests.cluster.cluster import RESTRICTED, Cluster
from tests.cluster.pooled import NAME, PICKERS, Served, condition, serving
from tests.cluster.space import ready

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]
Json = dict[str, Any]
NOWHERE = "registry.example/nowhere/vllm:v0.33.0"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def twig(cluster: Cluster) -> AsyncIterator[Served]:
    """Two engines, two pickers, two Envoys."""
    picker = {"replicas": 2, "resources": PICKERS}
    async with serving(cluster, replicas=2, picker=picker) as made:
        yield made


async def test_an_applied_pool_serves_through_its_envoy(twig: Served) -> None:
    """Every pod was admitted under *restricted*; a completion comes from the model; a second one with the
    same beginning finds it in a cache, so the picker was asked and followed."""
    space = await twig.room.client.ask("GET", f"/api/v1/namespaces/{twig.room.name}")
    assert space["metadata"]["labels"].items() >= RESTRICTED.items()
    pods = await twig.room.pods()
    assert sorted(p["metadata"]["labels"]["app.kubernetes.io/component"] for p in pods) == [
        *("engine", "engine", "envoy", "envoy", "picker", "picker")
    ]
    found = await twig.get()
    assert (found["status"]["replicas"], condition(found, "Accepted")["reason"]) == (2, "Planned")

    async def cached() -> int:
        answer = await twig.ask("Once there was a forest of many words. " * 30)
        assert answer["usage"]["completion_tokens"] == 4
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await twig.room.until(cached, "an answer from a cache") > 200


async def kvist(twig: Served, *words: str) -> str:
    """Return the output of a ``kvist`` command about the pool's namespace, run in the cluster's network."""
    inside = ("nsenter", "--target", str(twig.cluster.first), "--net", "--", sys.executable, "-m", "kvist")
    where = ("-n", twig.room.name, "--kubeconfig", str(twig.cluster.folder / "components.kubeconfig"))
    process = await asyncio.create_subprocess_exec(
        *inside, *words, *where, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_kvist_pools_and_why_show_what_serves(twig: Served) -> None:
    """The hit rate comes from a picker through the API server's proxy; the page of the pool names no problem,
    and has the plan's reasons."""

    async def known() -> Json | None:
        await twig.ask("Once there was a forest of many words. " * 30)
        [found] = json.loads(await kvist(twig, "pools", "-o", "json"))["pools"]
        return found if found["hit_rate"] else None

    found = await twig.room.until(known, "a hit rate")
    assert found is not None
    assert 0 < found["hit_rate"] <= 1
    assert (found["name"], found["state"], found["hit_rate_problem"]) == (twig.name, "Ready", "")
    assert (found["replicas_ready"], found["replicas_desired"]) == (2, 2)
    page = await kvist(twig, "why")
    assert page.startswith(f"pool {twig.room.name}/{twig.name}: ready (AsAsked)\n")
    assert f"{found['planned_tokens']:,} tokens planned for each replica" in page
    assert "it means" not in page
    assert "[sizing rule]" in page.partition("\nwhy\n")[2]


async def test_kvist_top_and_explain_ask_a_picker_through_the_api_server(twig: Served, folder: Path) -> None:
    """With ``-n`` alone both are about the only pool: the table has its engines, and a request like the last
    one would go to the engine that caches it."""
    shown = json.loads(await kvist(twig, "top", "--once", "-o", "json"))
    addresses = {f"{pod['status']['podIP']}:8000" for pod in await twig.engines()}
    assert {each["endpoint"] for each in shown["endpoints"]} == addresses

    request = folder / "request.json"
    message = {"role": "user", "content": "Once there was a forest of many words. " * 30}
    request.write_text(json.dumps({"model": twig.name, "messages": [message]}))
    found = json.loads(await kvist(twig, "explain", "-f", str(request), "-o", "json"))
    assert max(each["matched_tokens"] for each in found["endpoints"]) > 200


async def test_a_change_of_one_argument_rolls_pod_by_pod_without_a_failed_request(twig: Served) -> None:
    """Under load, one engine missing at a time; afterwards every engine has the new argument."""
    before = {pod["metadata"]["uid"] for pod in await twig.engines()}
    fewest = 2
    async with twig.load() as load:
        await load.until(20)
        await twig.patch(engine={"maxNumSeqs": 64})

        async def rolled() -> bool:
            nonlocal fewest
            found = await twig.engines()
            fewest = min(fewest, len(found))
            return len(found) == 2 and not before & {pod["metadata"]["uid"] for pod in found}

        await twig.room.until(rolled, "two new engines", seconds=180)
        await twig.until_ready()
        await load.until(20)

    assert load.failures == []
    assert fewest == 1
    for pod in await twig.engines():
        args = pod["spec"]["containers"][0]["args"]
        assert args[args.index("--max-num-seqs") + 1] == "64"


async def test_a_drain_respects_the_budget(twig: Served) -> None:
    """One of two engines may be evicted, the other one only once a new one serves. Requests continue."""
    first, second = await twig.engines()
    async with twig.load() as load:
        assert await evicted(twig, first) == 201
        assert await evicted(twig, second) == 429

        async def allowed() -> bool:
            return await evicted(twig, second) == 201

        await twig.room.until(allowed, "the second eviction")
        gone = {pod["metadata"]["uid"] for pod in (first, second)}

        async def replaced() -> bool:
            found = {pod["metadata"]["uid"] for pod in await twig.engines()}
            return len(found) == 2 and not found & gone

        await twig.room.until(replaced, "two other engines")
        await load.until(20)
    assert load.failures == []


async def evicted(twig: Served, pod: Json) -> int:
    """Status of the answer to an eviction, as ``kubectl drain`` asks for it."""
    name = pod["metadata"]["name"]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    path = f"{await twig.room.path('Pod', name)}/eviction"
    async with twig.room.client.session.post(path, json=body) as response:
        return response.status


async def test_pickers_and_envoys_follow_a_new_certificate(twig: Served) -> None:
    """Secret and ConfigMap are deleted; the operator makes others, the kubelet brings them to every pod.
    Pickers show the new certificate, and Envoys that were there before trust pickers that come after."""
    old = await authorities(twig.room)
    assert all([await shown(twig, pod, old) for pod in await pickers(twig)])
    await twig.room.remove("Secret", "twig-epp-tls")
    await twig.room.remove("ConfigMap", "twig-epp-ca")

    async def renewed() -> set[str]:
        there = await twig.room.found("ConfigMap", "twig-epp-ca")
        return await authorities(twig.room) - old if there else set()

    new = await twig.room.until(renewed, "another authority")

    async def all_show() -> bool:
        return all([await shown(twig, pod, new) for pod in await pickers(twig)])

    await twig.room.until(all_show, "pickers with the new certificate")
    before = {pod["metadata"]["name"] for pod in await pickers(twig)}
    for name in before:
        await twig.room.remove("Pod", name)

    async def picked() -> bool:
        await twig.ask("Who picks?")
        after = [pod for pod in await pickers(twig) if pod["metadata"]["name"] not in before]
        return len(after) == 2 and all([await picks(twig, pod) for pod in after])

    await twig.room.until(picked, "picks by new pickers")


async def test_a_broken_image_leaves_the_old_generation_serving_and_says_why(twig: Served) -> None:
    """The rollout stops at the first pod, a condition names the image, and the way back is a patch."""
    old = (await twig.get())["spec"].get("engine", {}).get("image")
    await twig.until_ready()
    async with twig.load() as load:
        await twig.patch(engine={"image": NOWHERE, "version": "0.33.0"})

        async def told() -> Json | None:
            found = condition(await twig.get(), "Progressing")
            return found if NOWHERE in found.get("message", "") else None

        said = await twig.room.until(told, "a condition about the image")
        assert said is not None
        assert "Image" in said["reason"]
        status = await twig.get()
        assert condition(status, "Available")["status"] == "True"
        assert condition(status, "Ready")["status"] == "False"
        await asyncio.sleep(2)
        assert len(await twig.engines()) == 1
        await load.until(20)
        await twig.patch(engine={"image": old, "version": None})
        await twig.until_ready()
    assert load.failures == []


async def test_a_deleted_pool_is_gone_also_with_the_operator_down(twig: Served) -> None:
    """All objects of a deleted pool go by their owner references, also with the operator down."""
    await twig.operator.patch("Deployment", NAME, {"spec": {"replicas": 0}})
    try:

        async def down() -> bool:
            return not await twig.operator.pods()

        await twig.room.until(down, "the operator to be gone")
        await twig.room.remove("InferencePool", twig.name)

        async def clean() -> bool:
            kinds = ("Deployment", "Service", "Secret", "PodDisruptionBudget", "ServiceAccount")
            found = [o for kind in kinds for o in await twig.room.all_of(kind)]
            names = {o["metadata"]["name"] for o in found} - {"default"}
            return not names and not [pod for pod in await twig.room.pods() if ready(pod)]

        await twig.room.until(clean, "nothing to be left")
    finally:
        await twig.operator.patch("Deployment", NAME, {"spec": {"replicas": 1}})
