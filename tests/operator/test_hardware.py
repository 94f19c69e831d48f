"""Promises of the accelerator table: found by any name, FP8 by capability, memory on the safe side."""

import pytest

from kvist_operator.errors import HardwareError
from kvist_operator.hardware import (
    ROWS,
    find_accelerator,
    known_accelerator,
    process_gib,
    unlisted_accelerator,
)

ASKED = (
    "A100-40GB",
    "A100-80GB",
    "A10",
    "L4",
    "L40S",
    "H100-80GB",
    "H200",
    "B200",
    "GB200",
    "RTX-PRO-6000",
    "MI300X",
    "MI325X",
    "TPU",
    "CPU",
    "H100-NVL",
    "H20",
    "H800",
    "A800",
    "RTX-4090",
    "RTX-5090",
    "GH200",
    "GB300",
    "L20",
    "A6000",
)


@pytest.mark.parametrize("name", ASKED)
def test_the_table_has_what_people_run(name: str) -> None:
    """The table has common accelerators by short name, in any case."""
    assert find_accelerator(name.lower()) is not None


def test_products_of_node_labels_are_names_too() -> None:
    """A row is found by the value of a node's label, with the suffixes of feature discovery."""
    assert known_accelerator("NVIDIA-H100-80GB-HBM3").name == "H100-80GB"
    assert known_accelerator("NVIDIA-A100-SXM4-80GB-SHARED").name == "A100-80GB-SHARED"
    assert known_accelerator("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb").name == "A100-80GB-MIG-1g.10gb"


def test_an_unknown_product_lists_the_known_ones() -> None:
    """The error for an unknown product lists the known ones and the field for another one."""
    with pytest.raises(
        HardwareError, match=r"'X99' is not known; known are A100-40GB.*spec\.accelerator\.memory"
    ):
        known_accelerator("X99")


def test_no_name_stands_for_two_rows() -> None:
    """No short name or product occurs twice."""
    names = [name.lower() for row in ROWS for name in {row.name.lower(), row.product.lower()}]

    assert len(names) == len(set(names))


def test_a_product_without_a_row_is_never_verified() -> None:
    """A product that is not in the table is never verified."""
    assert not unlisted_accelerator("NVIDIA-X99", 48).verified


def test_fp8_follows_the_compute_capability() -> None:
    """NVIDIA from 8.9, AMD from gfx942 and Gaudi 3 compute in FP8; an unknown capability does not."""
    known = {row.name: row.fp8 for row in ROWS}

    assert all(row.fp8 == (row.capability >= 89) for row in ROWS if row.vendor == "nvidia")
    assert known["H20-96GB"]
    assert known["RTX-4090"]
    assert not known["RTX-3090"]
    assert known["MI300X-192GB"]
    assert known["Gaudi3-128GB"]
    assert not known["TPU-v6e"]
    assert unlisted_accelerator("NVIDIA-X99", 48, capability=89).fp8


@pytest.mark.parametrize(
    ("capability", "memory", "resource", "like"),
    [
        (0, 48, "", "L40S"),
        (90, 96, "", "GH200-96GB"),
        (100, 190, "", "GB200-186GB"),
        (86, 12, "", "A10"),
        (0, 200, "amd.com/gpu", "MI300X-192GB"),
    ],
)
def test_an_unlisted_card_is_as_fast_as_the_one_that_is_most_like_it(
    capability: int, memory: float, resource: str, like: str
) -> None:
    """The speed is that of a row of the same architecture and about as much memory."""
    row = unlisted_accelerator("X99", memory, capability=capability, resource=resource)

    assert (row.like, row.bf16_tflops) == (like, known_accelerator(like).bf16_tflops)
    assert not unlisted_accelerator("NVIDIA-X99", 48).fp8
    assert not unlisted_accelerator("AMD-X", 48, capability=90, resource="amd.com/gpu").fp8


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("L4", 23_034),
        ("A10", 23_028),
        ("L40S", 46_068),
        ("A100-40GB", 40_960),
        ("A100-80GB", 81_920),
        ("H100-80GB", 81_559),
        ("H100-NVL-94GB", 95_830),
        ("GH200-96GB", 97_871),
        ("H200-141GB", 143_771),
        ("B200-180GB", 183_359),
        ("GB200-186GB", 189_471),
        ("B300-288GB", 275_040),
        ("RTX-4090", 24_564),
        ("RTX-5090", 32_607),
        ("RTX-A6000", 49_140),
        ("RTX-PRO-6000-96GB", 97_887),
    ],
)
def test_the_driver_s_part_is_never_underestimated(name: str, mib: int) -> None:
    """From the total of ``nvidia-smi`` follows at most the memory that CUDA out-of-memory messages show, and
    not more than 2 % less."""
    process = known_accelerator(name).memory_gib
    computed = process_gib(mib / 1024)

    assert 0.98 * process <= computed <= process + 0.005


@pytest.mark.parametrize(
    ("product", "gib"),
    [
        ("NVIDIA-A100-80GB-PCIe-MIG-1g.10gb", 9.5),
        ("NVIDIA-H100-NVL-MIG-1g.12gb", 10.75),
        ("H200-MIG-1g.18gb", 16),
    ],
)
def test_slices_are_never_larger_than_nvidia_smi_says(product: str, gib: float) -> None:
    """Without a label, the memory of a MIG slice follows from its profile, on the safe side."""
    row = known_accelerator(product)

    assert 0.9 * gib <= row.memory_gib <= gib
    assert row.isolated
    assert not row.shared
