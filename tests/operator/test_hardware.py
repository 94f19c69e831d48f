"""Promises of the accelerator table: found by any name, read from node labels."""

import pytest

from kvist_operator.errors import HardwareError
from kvist_operator.hardware import (
    ROWS,
    find_accelerator,
    known_accelerator,
    node_facts,
    node_kinds,
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
)


@pytest.mark.parametrize("name", ASKED)
def test_the_table_has_what_people_run(name: str) -> None:
    """The table has common accelerators by short name, in any case."""
    assert find_accelerator(name.lower()) is not None


def test_products_of_node_labels_are_names_too() -> None:
    """A row is found by the value of a node's label, with the suffixes of feature discovery."""
    assert known_accelerator("NVIDIA-H100-80GB-HBM3").name == "H100-80GB"
    assert known_accelerator("NVIDIA-A100-SXM4-80GB-SHARED").name == "A100-80GB"


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


@pytest.mark.parametrize(
    ("labels", "name", "count"),
    [
        ({"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.count": "8"}, "H200-141GB", 8),
        ({"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}, "MI300X-192GB", 8),
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
    found = node_facts(labels)

    assert found is not None
    assert (found.accelerator.name, found.per_node) == (name, count)


def test_labels_without_information_are_none() -> None:
    """Labels without a product, or with one that is not in the table, give none."""
    assert node_facts({"kubernetes.io/hostname": "a"}) is None
    assert node_facts({"nvidia.com/gpu.product": "NVIDIA-X99"}) is None


def test_time_sliced_cards_are_unverified() -> None:
    """Time-sliced GPUs are unverified, because other processes may use their memory."""
    found = node_facts({"nvidia.com/gpu.product": "NVIDIA-L4-SHARED"})

    assert found is not None
    assert not found.accelerator.verified


def test_the_most_numerous_kind_comes_first() -> None:
    """The most numerous kind of node in the cluster comes first."""
    l4 = {"nvidia.com/gpu.product": "NVIDIA-L4"}
    h100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}

    assert [facts.accelerator.name for facts in node_kinds([h100, l4, l4, {}])] == [
        "L4",
        "H100-80GB",
    ]


def test_a_product_without_a_row_is_never_verified() -> None:
    """A product that is not in the table is never verified."""
    assert not unlisted_accelerator("NVIDIA-X99", 48).verified
