"""The volume of the disk tier, its cleaner, downloaded weights, and space on the node's disk."""

from typing import Any

import pytest
from tests.operator.manifested import rendered

from kvist_kube.quantity import parse_bytes
from kvist_operator.errors import SpecError
from kvist_operator.manifests import Rendered

Json = dict[str, Any]


def engines(**offload: str) -> Json:
    """Return the spec of an engine's pod with this offload, whose weights are on a claim."""
    return pod_of(rendered("claim", offload=offload))


def pod_of(found: Rendered) -> Json:
    """Return the spec of the engines' pods."""
    [made] = [
        o for o in found.objects if o["kind"] == "Deployment" and not o["metadata"]["name"].endswith("-epp")
    ]
    pod: Json = made["spec"]["template"]["spec"]
    return pod


def volume(pod: Json) -> Json:
    """Return the volume for blocks."""
    [found] = [each for each in pod["volumes"] if each["name"] == "kv-blocks"]
    return dict(found)


@pytest.mark.parametrize("disk", ["1Gi", "500Gi", "1537Mi", "8T"])
def test_the_cleaner_begins_below_the_size_that_the_kubelet_enforces(disk: str) -> None:
    """The cleaner knows the size of the volume and begins to remove blocks at 85 % of it; the volume is no
    smaller, and the pod may write more than the volume holds."""
    pod = engines(cpu="64Gi", disk=disk)
    [cleaner] = pod["initContainers"]
    options = dict(word.removeprefix("--").split("=") for word in cleaner["args"][1:])
    size = parse_bytes(volume(pod)["emptyDir"]["sizeLimit"])
    [engine] = pod["containers"]

    assert int(options["limit"]) == parse_bytes(disk) <= size
    assert int(options["low"]) < int(options["high"]) == 85
    for kind in ("requests", "limits"):
        assert parse_bytes(engine["resources"][kind]["ephemeral-storage"]) >= size + (16 << 30)


def test_the_cleaner_is_a_sidecar_with_the_rights_of_the_engine() -> None:
    """The cleaner runs until the engine has ended, as the same user, on the same folder, and can write
    nothing else."""
    pod = engines(cpu="64Gi", disk="500Gi")
    [cleaner], [engine] = pod["initContainers"], pod["containers"]

    assert cleaner["restartPolicy"] == "Always"
    assert "runAsUser" not in cleaner["securityContext"]
    assert cleaner["securityContext"]["readOnlyRootFilesystem"] is True
    [mount] = cleaner["volumeMounts"]
    assert mount in engine["volumeMounts"]
    assert cleaner["args"][0] == mount["mountPath"] == "/kv"
    assert cleaner["image"] == "kvist-epp:1.2.3"


def test_a_storage_class_moves_blocks_to_a_volume_of_the_pod() -> None:
    """With a storage class each pod claims a volume of this size, and nothing of the node's disk."""
    pod = engines(cpu="64Gi", disk="500Gi", storageClassName="local-nvme")
    claim = volume(pod)["ephemeral"]["volumeClaimTemplate"]["spec"]
    [engine] = pod["containers"]

    assert claim == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "local-nvme",
        "resources": {"requests": {"storage": "500Gi"}},
    }
    assert "ephemeral-storage" not in engine["resources"]["requests"]
    assert pod["initContainers"]


def test_without_a_disk_there_is_no_cleaner() -> None:
    """Pods without blocks on disk are as they were before there was a cleaner."""
    pod = engines(cpu="64Gi")
    assert "initContainers" not in pod
    assert "ephemeral-storage" not in pod["containers"][0]["resources"]["limits"]


def test_a_storage_class_without_a_size_is_refused() -> None:
    """The error names the field and what is missing."""
    with pytest.raises(SpecError, match=r"spec\.offload\.storageClassName: needs spec\.offload\.disk too"):
        rendered("minimal", offload={"cpu": "64Gi", "storageClassName": "fast"})


def cache_volume(pod: Json) -> Json:
    """Return the volume for everything that the engine writes."""
    [found] = [each for each in pod["volumes"] if each["name"] == "cache"]
    return dict(found)


def test_downloaded_weights_have_a_bounded_volume_that_fits_them() -> None:
    """A model of the hub is downloaded to a volume with 1.3 times its size and 16 GiB, which the pod requests
    from its node, together with the blocks on disk."""
    files = 8_190_735_360 * 2
    alone, both = (pod_of(rendered("minimal", offload=o)) for o in ({}, {"cpu": "1Gi", "disk": "100Gi"}))
    size = parse_bytes(cache_volume(alone)["emptyDir"]["sizeLimit"])

    assert size == pytest.approx(1.3 * files + (16 << 30), rel=0.001)
    for pod, more in ((alone, 0), (both, 100 << 30)):
        amounts = pod["containers"][0]["resources"]
        for kind in ("requests", "limits"):
            assert parse_bytes(amounts[kind]["ephemeral-storage"]) == pytest.approx(size + more, abs=2 << 20)


def test_weights_that_are_not_downloaded_take_no_space_of_the_node() -> None:
    """Weights on a claim, in an image, or on a volume that the user puts in the place of the downloads."""
    volumes = [{"name": "cache", "emptyDir": None, "persistentVolumeClaim": {"claimName": "hub"}}]
    own = rendered("minimal", podTemplate={"spec": {"volumes": volumes}})
    for found in (rendered("claim"), rendered("image"), own):
        pod = pod_of(found)
        assert "ephemeral-storage" not in pod["containers"][0]["resources"]["requests"]
        assert not cache_volume(pod).get("emptyDir")
    assert cache_volume(pod_of(own))["persistentVolumeClaim"] == {"claimName": "hub"}
