"""The volume of the disk tier, its cleaner, and space on the node's disk."""

from typing import Any

import pytest
from tests.operator.manifested import one, rendered

from kvist_kube.quantity import parse_bytes
from kvist_operator.errors import SpecError

Json = dict[str, Any]


def engines(**offload: str) -> Json:
    """Return the spec of an engine's pod with this offload."""
    pod: Json = one(rendered("minimal", offload=offload), "Deployment", "twig")["spec"]["template"]["spec"]
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
