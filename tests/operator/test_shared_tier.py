"""Objects for blocks that outlive a pod: the claim, its cleaner, a folder of the node, LMCache's servers."""

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import pytest
from tests.operator.manifested import SITE, one, rendered, resource
from tests.operator.test_disk_tier import engines, pod_of, volume

from kvist_kube.quantity import parse_bytes
from kvist_operator.apply.upgrades import APPROVED, hold_upgrade
from kvist_operator.manifests import Rendered
from kvist_operator.spec import read_pool

Json = dict[str, Any]
SHARED = {"claim": "kv", "path": "chats", "size": "10Ti"}
IMAGE: Final = "vllm/vllm-openai:v0.32.0"
LMCACHE_NAME: Final = re.compile("twig-lmcache-[0-9a-f]{6}")


def template(found: Rendered) -> Json:
    """Return the template of the engines' pods."""
    made: Json = one(found, "Deployment", "twig")["spec"]["template"]
    return made


def with_shared(site: Any = SITE, **spec: Any) -> Rendered:
    """Return the objects of a pool with a shared claim."""
    offload = {"cpu": "64Gi", "disk": "500Gi", "shared": SHARED}
    return rendered("claim", site, offload=offload, **spec)


def test_engines_write_to_the_claim_that_the_cleaner_cleans() -> None:
    """Engines and cleaner mount the same claim at the same place; the folder that is cleaned contains the one
    that engines write to, and its limit is the size of the spec."""
    found = with_shared()
    pod, cleaning = (
        pod_of_engines(found),
        one(found, "Deployment", "twig-kv-cleaner")["spec"]["template"]["spec"],
    )
    [engine], [cleaner] = pod["containers"], cleaning["containers"]
    argument = engine["args"][engine["args"].index("--kv-transfer-config") + 1]
    for made in (pod, cleaning):
        [mounted] = [each for each in made["volumes"] if each["name"] == "kv-shared"]
        assert mounted["persistentVolumeClaim"] == {"claimName": "kv"}
        assert {"name": "kv-shared", "mountPath": "/kv-shared"} in made["containers"][0]["volumeMounts"]

    assert cleaner["args"][0] == "/kv-shared/chats"
    assert '"root_dir":"/kv-shared/chats/' in argument
    assert f"--limit={10 << 40}" in cleaner["args"]
    assert "--create" in cleaner["args"]
    assert cleaner["image"] == "kvist-epp:1.2.3"


def pod_of_engines(found: Rendered) -> Json:
    """Return the spec of the engines' pods."""
    made: Json = template(found)["spec"]
    return made


def test_there_is_one_cleaner_whatever_the_replicas() -> None:
    """A second cleaner would only walk through the same files; a new one starts after the old one is gone."""
    made = one(with_shared(replicas=7), "Deployment", "twig-kv-cleaner")["spec"]
    assert made["replicas"] == 1
    assert made["strategy"] == {"type": "Recreate"}


def test_pods_say_where_their_blocks_are_and_who_shares_them() -> None:
    """The picker reads the places from an annotation, and the namespace from a label that only pods with a
    shared claim or LMCache have."""
    cases = {
        "host": {"cpu": "1Gi"},
        "host,disk": {"cpu": "1Gi", "disk": "10Gi"},
        "host,disk,shared": {"cpu": "1Gi", "disk": "10Gi", "shared": SHARED},
        "lmcache": {"lmcache": {"address": "lm.infra"}},
    }
    for media, offload in cases.items():
        meta = template(rendered("claim", offload=offload))["metadata"]
        assert meta["annotations"]["kvist.dev/kv-tiers"] == media
        shares = media.endswith(("shared", "lmcache"))
        assert ("kvist.dev/kv-storage-namespace" in meta["labels"]) == shares
    plain = template(rendered("claim"))["metadata"]
    assert "kvist.dev/kv-tiers" not in plain["annotations"]
    node = template(rendered("claim", offload={"cpu": "1Gi", "disk": "1Gi", "hostPath": "/mnt/kv"}))[
        "metadata"
    ]
    assert "kvist.dev/kv-storage-namespace" not in node["labels"]


def test_volumes_of_many_files_are_not_walked_through_by_the_kubelet() -> None:
    """Ownership is set only where the root of the volume has another."""
    assert pod_of_engines(with_shared())["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    assert "fsGroupChangePolicy" not in pod_of_engines(rendered("claim"))["securityContext"]


def test_a_folder_of_the_node_is_cleaned_and_requests_no_space() -> None:
    """The folder must exist; it is not counted as the pod's, and the cleaner has its limit."""
    pod = engines(cpu="64Gi", disk="500Gi", hostPath="/mnt/kv")
    [cleaner] = pod["initContainers"]

    assert volume(pod)["hostPath"] == {"path": "/mnt/kv", "type": "Directory"}
    assert "ephemeral-storage" not in pod["containers"][0]["resources"]["requests"]
    assert f"--limit={500 << 30}" in cleaner["args"]


def test_disk_and_claim_are_both_bounded() -> None:
    """The disk's cleaner is beside the engine, the claim's has a pod of its own."""
    pod = pod_of_engines(with_shared())
    assert [each["name"] for each in pod["initContainers"]] == ["disk-cleaner"]
    assert parse_bytes(volume(pod)["emptyDir"]["sizeLimit"]) == 500 << 30


def advice(site: Any) -> list[str]:
    """Return the advice about the shared claim."""
    return [note.message for note in with_shared(site).notes if "spec.offload.shared" in note.message]


def test_a_claim_for_one_node_is_advised_against() -> None:
    """The advice names the field, the claim's modes and the mode that is needed."""
    one_node = replace(SITE, claims={"kv": frozenset({"ReadWriteOnce"})})
    [text] = advice(one_node)
    assert "claim kv is ReadWriteOnce" in text
    assert "use a claim with ReadWriteMany" in text
    assert advice(replace(SITE, claims={"kv": frozenset({"ReadWriteMany"})})) == []


def test_a_pool_that_cannot_share_is_named_with_the_difference() -> None:
    """Another pool with the same model on the same claim is named with each setting that differs; one that
    shares, one with another model and one on another claim are not."""
    own = agreed()
    others = {
        "shares": own,
        "differs": own | {"kvCacheDtype": "nvfp4", "namespace": "a"},
        "model": own | {"model": "hf://other as other", "kvCacheDtype": "nvfp4"},
        "claim": own | {"volume": "forest/other/chats", "kvCacheDtype": "nvfp4"},
        "path": own | {"volume": "forest/kv/other"},
    }
    texts = {name: advice(replace(SITE, storage={name: each})) for name, each in others.items()}

    assert texts["shares"] == texts["model"] == texts["claim"] == []
    assert "pool differs has the same model on claim kv" in texts["differs"][0]
    assert f"kvCacheDtype is {own['kvCacheDtype']} here and nvfp4 there" in texts["differs"][0]
    assert "volume is forest/kv/chats here and forest/kv/other there" in texts["path"][0]


def agreed() -> dict[str, str]:
    """Return what the status of a pool like ours has."""
    from tests.crd.cases import planned
    from tests.operator.manifested import resource

    found = resource("claim")
    found["spec"]["offload"] = {"cpu": "64Gi", "disk": "500Gi", "shared": SHARED}
    storage: dict[str, str] = planned(found).to_dict()["storage"]
    return storage


def server(found: Rendered, kind: str) -> Json:
    """Return LMCache's DaemonSet or Service."""
    [made] = [each for each in found.objects if each["kind"] == kind and LMCACHE_NAME.fullmatch(name(each))]
    return made


def name(resource: Json) -> str:
    """Return the name of an object."""
    return str(resource["metadata"]["name"])


def test_engines_that_differ_have_servers_of_their_own() -> None:
    """LMCache tells models apart by their path alone, and outlives the engines of a rollout: a newer image,
    or revision, gets another server, whose pods only its own Service selects, and engines connect to that."""
    old, new = rendered("lmcache"), rendered("lmcache", engine={"image": "vllm/vllm-openai:v0.31.0"})
    servers = [server(found, "DaemonSet") for found in (old, new)]
    services = [server(found, "Service") for found in (old, new)]
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in servers]

    assert name(servers[0]) == name(services[0]) != name(servers[1]) == name(services[1])
    for each, found, mine in zip(servers, (old, new), labels, strict=True):
        [argument] = [a for a in pod_of(found)["containers"][0]["args"] if "lmcache.mp.host" in a]
        assert f"tcp://{name(each)}.forest.svc" in argument
        assert each["spec"]["selector"]["matchLabels"].items() <= mine.items()
    assert not services[0]["spec"]["selector"].items() <= labels[1].items()


def test_the_picker_is_told_that_each_node_has_a_server_and_how_much_it_holds() -> None:
    """Engines share the server of their node only; its tokens bound what is believed to be there."""
    own = template(rendered("lmcache"))["metadata"]
    other = template(rendered("claim", offload={"lmcache": {"address": "lm.infra"}}))["metadata"]

    assert own["annotations"]["kvist.dev/kv-tiers"] == "lmcache"
    assert own["annotations"]["kvist.dev/kv-storage-scope"] == "node"
    assert int(own["annotations"]["kvist.dev/kv-storage-tokens"]) > 100_000
    assert "kvist.dev/kv-storage-scope" not in other["annotations"]
    assert "kvist.dev/kv-storage-tokens" not in other["annotations"]


def test_lmcache_has_the_memory_that_it_takes() -> None:
    """The server's blocks and an allowance are requested; it takes all of them when it starts."""
    made = server(rendered("lmcache"), "DaemonSet")["spec"]["template"]["spec"]
    [container] = made["containers"]

    resources = container["resources"]
    assert container["command"] == ["lmcache", "server"]
    assert "--l1-size-gb=100" in container["args"]
    assert "--supported-transfer-mode=engine_driven" in container["args"]
    assert "--kv-event-log-size=0" in container["args"]
    assert "--no-l1-use-lazy" in container["args"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"] == "104Gi"
    assert made["nodeSelector"] == {"pool": "l4"}
    assert made["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_engines_reach_the_server_of_their_node_only() -> None:
    """The Service never leaves the node, and only engines may connect."""
    found = rendered("lmcache")
    service = server(found, "Service")["spec"]
    [rule] = one(found, "NetworkPolicy", "twig-lmcache")["spec"]["ingress"]

    assert service["internalTrafficPolicy"] == "Local"
    assert [port["port"] for port in service["ports"]] == [5555]
    assert rule["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "engine"
    assert rule["ports"] == [{"port": 5555, "protocol": "TCP"}]


@pytest.mark.parametrize("offload", [{"lmcache": {"address": "lm.infra"}}, {"cpu": "64Gi"}])
def test_no_server_is_made_for_others(offload: Json) -> None:
    """Your own server is yours, and blocks in memory need none."""
    found = rendered("claim", offload=offload)
    assert not [each for each in found.objects if each["kind"] == "DaemonSet"]
    assert "initContainers" not in pod_of(found)


def test_servers_stay_with_engines_whose_upgrade_waits() -> None:
    """A new default image has other servers, too; while the engines wait for approval, they keep theirs, and
    the Service by which they reach them. With the approval both are replaced."""
    found = resource("lmcache")
    old, new = (rendered("lmcache", engine={"image": f"vllm/vllm-openai:v0.{n}.0"}) for n in (32, 33))

    def held(made: Rendered, observed: Sequence[Json], approved: str = "") -> tuple[Rendered, str]:
        asked = {**found, "metadata": {**found["metadata"], "annotations": {APPROVED: approved}}}
        applied, pending = hold_upgrade(
            *(read_pool(found, default_image=IMAGE), asked, made, observed),
            identity=f"operator {len(observed)}",
            default_image=IMAGE,
            now=datetime(2026, 11, 24, tzinfo=UTC),
        )
        return applied, pending.hash if pending else ""

    first, _ = held(old, [])
    waiting, hash_ = held(new, first.objects)
    approved, left = held(new, first.objects, hash_)

    for kind in ("DaemonSet", "Service"):
        before, after = server(first, kind), server(waiting, kind)
        assert (name(after), after["spec"]["selector"]) == (name(before), before["spec"]["selector"])
        assert name(server(approved, kind)) == name(server(new, kind)) != name(before)
    assert one(waiting, "Deployment", "twig")["spec"] == one(first, "Deployment", "twig")["spec"]
    assert (bool(hash_), left) == (True, "")
