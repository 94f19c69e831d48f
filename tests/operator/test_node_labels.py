"""Promises of accelerators from the labels of nodes: memory, capability, slices, sharing, numbers."""

import pytest

from kvist_operator.hardware import Accelerator, find_accelerator
from kvist_operator.node_labels import accelerator_labels, node_facts, node_kinds

GPU = "nvidia.com/gpu"


def gpu(product: str, mib: int = 0, capability: str = "", **more: str) -> dict[str, str]:
    """Return labels of NVIDIA's feature discovery; ``more`` are those of ``nvidia.com/gpu``."""
    found = {f"{GPU}.product": product, **{f"{GPU}.{key}": value for key, value in more.items()}}
    if mib:
        found[f"{GPU}.memory"] = str(mib)
    if capability:
        major, minor = capability.split(".")
        found |= {f"{GPU}.compute.major": major, f"{GPU}.compute.minor": minor}
    return found


def only(labels: dict[str, str]) -> Accelerator:
    """Return the only accelerator that these labels name."""
    [facts] = node_facts(labels)
    return facts.accelerator


@pytest.mark.parametrize(
    ("labels", "name", "count"),
    [
        (gpu("NVIDIA-H200", count="8"), "H200-141GB", 8),
        (gpu("NVIDIA-L4", count="1"), "L4", 1),
        (
            {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM", "amd.com/gpu.vram": "192G"},
            "MI300X-192GB",
            8,
        ),
        ({"beta.amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}, "MI300X-192GB", 8),
        (
            {"beta.amd.com/gpu.product-name": "MI300X", "beta.amd.com/gpu.device-id.74a1": "4"},
            "MI300X-192GB",
            4,
        ),
        (
            {"cloud.google.com/gke-accelerator": "nvidia-l4", "cloud.google.com/gke-accelerator-count": "2"},
            "L4",
            2,
        ),
        ({"cloud.google.com/gke-accelerator": "nvidia-l4"}, "L4", 8),
        (
            {"karpenter.k8s.aws/instance-gpu-name": "a10g", "karpenter.k8s.aws/instance-gpu-count": "1"},
            "A10",
            1,
        ),
    ],
)
def test_labels_of_the_usual_places_are_read(labels: dict[str, str], name: str, count: int) -> None:
    """Labels of NVIDIA's and AMD's feature discovery and of two clouds are read."""
    [found] = node_facts(labels)

    assert (found.accelerator.name, found.per_node) == (name, count)


@pytest.mark.parametrize(
    ("product", "mib", "capability", "least", "most", "fp8"),
    [
        ("NVIDIA-H100-NVL", 95_830, "9.0", 93.0, 93.1, True),
        ("NVIDIA-H20", 97_871, "9.0", 94.4, 95.0, True),
        ("NVIDIA-H800", 81_559, "9.0", 78.5, 79.2, True),
        ("NVIDIA-GeForce-RTX-4090", 24_564, "8.9", 23.3, 23.5, True),
        ("NVIDIA-GeForce-RTX-5090", 32_607, "12.0", 31.0, 31.4, True),
        ("NVIDIA-GH200-480GB", 97_871, "9.0", 94.4, 94.6, True),
        ("NVIDIA-L20", 46_068, "8.9", 44.1, 44.4, True),
        ("NVIDIA-RTX-A6000", 49_140, "8.6", 47.3, 47.5, False),
        ("NVIDIA-A800-SXM4-80GB", 81_920, "8.0", 78.9, 79.2, False),
        ("NVIDIA-GB300", 256_703, "10.3", 248.0, 250.0, True),
        ("NVIDIA-Brand-New", 97_871, "13.0", 94.0, 95.0, True),
    ],
)
def test_any_card_is_planned_from_its_labels(
    product: str, mib: int, capability: str, least: float, most: float, fp8: bool
) -> None:
    """Memory and FP8 follow from labels, whether the table has the card or not, and a smaller variant with a
    known product is as small as its label."""
    row = only(gpu(product, mib, capability, count="8"))

    assert least <= row.memory_gib <= most
    assert row.fp8 == fp8
    assert row.capability == int(capability.replace(".", ""))


def test_a_card_outside_the_table_is_unverified() -> None:
    """A card that only labels describe says so and is unverified; one of the table keeps its figures."""
    assert not only(gpu("NVIDIA-Brand-New", 97_871)).verified
    assert "nvidia.com/gpu.memory" in only(gpu("NVIDIA-Brand-New", 97_871)).source
    assert only(gpu("NVIDIA-H100-80GB-HBM3", 81_559, "9.0")) == find_accelerator("H100")


@pytest.mark.parametrize(
    ("device", "product", "fp8"),
    [
        ("740f", "AMD_Instinct_MI210", False),
        ("74a5", "AMD_X", True),
        ("75a0", "AMD_X", True),
        ("", "AMD_X", False),
    ],
)
def test_unlisted_cards_of_amd_are_read_too(device: str, product: str, fp8: bool) -> None:
    """VRAM and device id of AMD's node labeller give memory and FP8, in both spellings of its labels."""
    for prefix in ("amd.com/gpu", "beta.amd.com/gpu"):
        labels = {f"{prefix}.product-name": product, f"{prefix}.vram": "64G", f"{prefix}.device-id": device}
        row = only(labels)
        assert (row.vendor, row.resource, row.fp8) == ("amd", "amd.com/gpu", fp8)
        assert 62 < row.memory_gib < 64


@pytest.mark.parametrize(
    "labels",
    [
        {"kubernetes.io/hostname": "a"},
        gpu("NVIDIA-X99"),
        gpu("NVIDIA-X99", count="8"),
        {**gpu("NVIDIA-X99"), f"{GPU}.memory": "much"},
        gpu("NVIDIA-A100-SXM4-40GB-MIG-INVALID", 40_960, count="0", replicas="0"),
        gpu("NVIDIA-L4", 23_034, count="0"),
        {"amd.com/gpu.product-name": "AMD_X"},
    ],
)
def test_labels_without_information_are_none(labels: dict[str, str]) -> None:
    """Labels without a product, with one whose memory nothing says, or without a GPU give none."""
    assert node_facts(labels) == ()


def test_slices_of_the_strategy_single_are_cards_of_their_own() -> None:
    """Under the strategy ``single`` product and memory are those of the slice, which stands alone."""
    [found] = node_facts(gpu("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", 4864, "8.0", count="56", replicas="1"))
    row = found.accelerator

    assert (row.name, row.memory_gib, row.resource) == ("A100-40GB-MIG-1g.5gb", 4.75, GPU)
    assert (found.per_node, row.isolated, row.verified) == (1, True, True)


MIXED = {
    **gpu("NVIDIA-A100-80GB-PCIe", 81_920, "8.0", count="1", replicas="0"),
    "nvidia.com/mig-1g.10gb.count": "2",
    "nvidia.com/mig-1g.10gb.memory": "9728",
    "nvidia.com/mig-1g.10gb.product": "NVIDIA-A100-80GB-PCIe-MIG-1g.10gb",
    "nvidia.com/mig-1g.10gb.replicas": "1",
    "nvidia.com/mig-1g.10gb.multiprocessors": "14",
    "nvidia.com/mig-3g.40gb.count": "1",
    "nvidia.com/mig-7g.80gb.count": "0",
}
"""Labels of a public node with divided GPUs (file id 37196432096), with a profile without memory, and one
without slices."""


def test_slices_of_the_strategy_mixed_are_resources_of_their_own() -> None:
    """Each profile is a kind with its own resource and memory; a node whose GPUs are all divided has no whole
    GPU."""
    found = {facts.accelerator.resource: facts.accelerator for facts in node_facts(MIXED)}
    whole = node_facts({**MIXED, f"{GPU}.replicas": "1"})

    assert sorted(found) == ["nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"]
    assert found["nvidia.com/mig-1g.10gb"].memory_gib == 9.5
    assert 34 < found["nvidia.com/mig-3g.40gb"].memory_gib < 40
    assert all(row.isolated for row in found.values())
    assert next(facts.accelerator.name for facts in whole) == "A100-80GB"


def test_shared_cards_stand_alone() -> None:
    """Time-sliced GPUs are unverified, because other processes may use their memory; MPS divides it."""
    sliced = only(gpu("NVIDIA-L4-SHARED", 23_034, count="1", replicas="4"))
    renamed = only(gpu("NVIDIA-L4", 23_034, count="1", replicas="4"))
    divided = only({**gpu("NVIDIA-L4-SHARED", 23_034, replicas="4"), f"{GPU}.sharing-strategy": "mps"})

    assert (sliced.verified, sliced.isolated, sliced.shared) == (False, True, True)
    assert renamed == sliced
    assert divided.memory_gib == pytest.approx(sliced.memory_gib / 4, abs=0.01)
    assert (divided.isolated, divided.shared) == (True, False)


def test_kinds_do_not_depend_on_the_order_of_nodes() -> None:
    """Each product, number and memory is a kind, whatever the order of the nodes."""
    nodes = [
        gpu("NVIDIA-L4", count="1"),
        gpu("NVIDIA-H100-80GB-HBM3"),
        gpu("NVIDIA-L4", count="4"),
        MIXED,
        {},
    ]

    assert node_kinds(nodes) == node_kinds([*reversed(nodes), *nodes])
    assert [(f.accelerator.name, f.per_node) for f in node_kinds(nodes)] == [
        ("A100-80GB-MIG-1g.10gb", 1),
        ("A100-80GB-MIG-3g.40gb", 1),
        ("H100-80GB", 8),
        ("L4", 1),
        ("L4", 4),
    ]


def test_only_labels_that_are_read_are_kept() -> None:
    """Labels that change by the minute are left out, and the rest gives the same accelerators."""
    noise = {
        "nvidia.com/gfd.timestamp": "1",
        "kubernetes.io/hostname": "a",
        "nvidia.com/gpu.family": "ampere",
    }
    kept = accelerator_labels({**MIXED, **noise})

    assert not kept.keys() & noise.keys()
    assert node_facts(kept) == node_facts(MIXED)
