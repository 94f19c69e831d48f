"""Commands of the guides that pods run, or that ask about them."""

import asyncio
import json
import re
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import yaml
from tests.charts.generate import ROOT
from tests.cluster.client import GAIE, Client, Namespace
from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operated import account, operating, with_crd
from tests.cluster.pooled import installed, pool, until_ready
from tests.cluster.space import Space
from tests.docs_runner.blocks import Step, all_blocks
from tests.e2e.commands import Commands

from kvist_kube.certificates import CLIENT, SERVER, CertificateAuthority
from kvist_operator.manifests.object_names import METRICS_PORT

pytestmark = pytest.mark.timeout(300)
Json = dict[str, Any]
GUIDES: Final = ROOT / "docs" / "guides"
SERVING: Final = "serving"
"""The namespace of the guide on replicas."""
PLAIN: Final[Json] = {"picker": {"mode": "Off"}, "gateway": {"mode": "None"}}


def steps_of(test: str) -> list[Step]:
    """Return the steps of the block that names this test."""
    [block] = [one for one in all_blocks() if one.where == ("run by", test)]
    return block.steps()


def objects_of(guide: str) -> list[Json]:
    """Every object in the YAML of a guide."""
    found = re.findall(r"^```yaml\n(.*?)^```", (GUIDES / guide).read_text(), re.MULTILINE | re.DOTALL)
    return [one for text in found for one in yaml.safe_load_all(text) if "kind" in one]


async def test_the_guide_s_operators_start(
    plane: ControlPlane, space: Namespace, admin: Client, tmp_path: Path
) -> None:
    """Each command of the guide, with exactly the rights it needs, becomes ready."""
    await with_crd(admin)
    watched = ("serving", "staging")
    for name in watched:
        await admin.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}}, expect=(201, 409))
    await admin.ask("POST", "/api/v1/namespaces", {"metadata": {"name": f"{space.name}-two"}})
    everywhere = await account(plane, admin, space.name)
    two = await account(plane, admin, f"{space.name}-two", watched)
    for number, step in enumerate(steps_of("test_the_guide_s_operators_start")):
        words = [
            word for word in shlex.split(step.command, comments=True) if "=" not in word.partition(" ")[0]
        ]
        folder = tmp_path / str(number)
        folder.mkdir()
        config = two if "--namespaces" in words else everywhere
        async with operating(folder, config, *words[1:]) as operator:
            assert words[0] == "kvist-operator"
            assert "kvist_operator_queue_pools" in await operator.page("/metrics")


async def test_the_guide_s_replicas_follow_each_other(cluster: Cluster) -> None:
    """With the guide's Service, Deployment and command, the Role of another guide, and a Secret in place of
    cert-manager, each of three replicas follows the other two."""
    [step] = steps_of("test_the_guide_s_replicas_follow_each_other")
    service, certificate, deployment = objects_of("replicas.md")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    words = shlex.split(step.command)
    assert "=".join(words[1:]).replace("=--", " --").split() == container["args"]

    async with cluster.client() as admin, cluster.space(admin, SERVING, restricted=False) as room:
        await admin.install(GAIE)
        container |= {"image": "kvist-epp:test", "command": words[:1]}
        made = [*objects_of("kubernetes.md"), service, secret(certificate), deployment]
        for one in made:
            for subject in one.get("subjects", ()):
                subject["namespace"] = SERVING
            await room.apply(one)
        await Namespace(admin, SERVING).pool("qwen3-32b", {"app": "vllm"}, 8000)
        await room.rolled_out("kvist-epp")
        await room.until(lambda: all_hear(cluster, room), "replicas that hear each other")


def secret(certificate: Json) -> Json:
    """Return the Secret that cert-manager would make of a Certificate."""
    spec, now, life = certificate["spec"], datetime.now(UTC), timedelta(days=1)
    authority = CertificateAuthority(spec["issuerRef"]["name"], now, life)
    chain, key = authority.sign(spec["dnsNames"], now, life, (SERVER, CLIENT))
    data = {"tls.crt": chain.decode(), "tls.key": key.decode(), "ca.crt": authority.pem.decode()}
    meta = {"name": spec["secretName"]}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": data}


async def all_hear(cluster: Cluster, room: Space) -> bool:
    """Return whether each replica follows two others and knows no further one."""
    pods = await room.pods(app="kvist-epp")
    found = await asyncio.gather(*(heard(cluster, pod["status"]["podIP"]) for pod in pods))
    return found == [["heard", "heard"]] * 3


async def heard(cluster: Cluster, address: str) -> list[str]:
    """Return the states of the other replicas, as one replica sees them."""
    url = f"http://{address}:{METRICS_PORT}/debug/peers"
    try:
        async with cluster.http() as http, http.get(url) as response:
            return [one["state"] for one in json.loads(await response.text())["replicas"]]
    except aiohttp.ClientError:  # the replica is starting
        return []


async def test_the_message_has_the_termination_message_of_an_engine(
    cluster: Cluster, room: Space, tmp_path: Path
) -> None:
    """The guide's output for a new generation that does not start is exact, except for the pod's name."""
    [step] = steps_of("test_the_message_has_the_termination_message_of_an_engine")
    await installed(cluster, room.client)
    await room.apply(pool("twig", **PLAIN, replicas=2))
    await until_ready(room, "twig")
    engine = {"image": "kvist-test/no-room:1", "version": "0.33.0"}
    await room.patch("InferencePool", "twig", {"spec": {"engine": engine}})
    commands = Commands(cluster, tmp_path)
    words = [*shlex.split(step.command)[1:], f"--namespace={room.name}"]

    async def told() -> bool:
        return plain(await commands.kubectl(*words)) == plain(" ".join(step.printed))

    try:
        await room.until(told, "the words of the guide")
    except AssertionError as error:
        raise AssertionError(f"{await commands.kubectl(*words)}\n{error}") from None


def plain(message: str) -> str:
    """In one line, the pod's name left out."""
    return re.sub(r"pod twig-[a-z0-9]+-[a-z0-9]+:", "pod:", " ".join(message.split()))
