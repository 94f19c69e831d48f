"""Accelerators as frozen rows, and how a row is found: a product, a short name, or the labels of a node.

``memory_gib`` is what the driver leaves to a process (``torch.cuda.mem_get_info``), not what the box
says: vLLM's memory share is a share of that. The figures are the smallest that public CUDA out-of-memory
messages show for the card ("GPU 0 has a total capacity of … GiB"); where none was found, the data sheet,
and the row is unverified.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvist_operator.errors import HardwareError

MESSAGES: Final = "smallest total capacity in public CUDA out-of-memory messages"
SHEET: Final = "data sheet, less what the driver keeps on its siblings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One kind of accelerator."""

    name: str
    """Short: ``H100-80GB``."""
    product: str
    """The value of the node label that the device plugin's feature discovery sets."""
    also: tuple[str, ...] = ()
    """Other label values and names for the same row."""
    vendor: str
    memory_gib: float
    capability: int
    """CUDA compute capability × 10 (90 = SM90); 0 where that means nothing."""
    fp8: bool
    """Computes in FP8."""
    bf16_tflops: float
    """Dense peak of the data sheet."""
    bandwidth_gbs: float
    per_node: int
    """How many a usual node has, where nothing says."""
    resource: str = "nvidia.com/gpu"
    verified: bool = True
    """vLLM's memory use on it is modelled; otherwise a plan is unverified."""
    source: str = MESSAGES

    @property
    def peak_tflops(self) -> float:
        """In the best dtype for 8-bit weights."""
        return self.bf16_tflops * (2 if self.fp8 else 1)


def _nvidia(
    name: str, product: str, gib: float, sm: int, tflops: float, gbs: float, **more: object
) -> Accelerator:
    fields: dict[str, object] = {"per_node": 8, "fp8": sm >= 89, **more}
    return Accelerator(
        name=name,
        product=product,
        vendor="nvidia",
        memory_gib=gib,
        capability=sm,
        bf16_tflops=tflops,
        bandwidth_gbs=gbs,
        **fields,  # type: ignore[arg-type]
    )


def _amd(name: str, product: str, gib: float, tflops: float, gbs: float, **more: object) -> Accelerator:
    return Accelerator(
        name=name,
        product=product,
        vendor="amd",
        memory_gib=gib,
        capability=94,
        fp8=True,
        bf16_tflops=tflops,
        bandwidth_gbs=gbs,
        per_node=8,
        resource="amd.com/gpu",
        **more,  # type: ignore[arg-type]
    )


ROWS: Final = (
    _nvidia(
        "A100-40GB",
        "NVIDIA-A100-SXM4-40GB",
        39.38,
        80,
        312,
        1555,
        also=("NVIDIA-A100-PCIE-40GB", "nvidia-tesla-a100"),
    ),
    _nvidia(
        "A100-80GB",
        "NVIDIA-A100-SXM4-80GB",
        79.14,
        80,
        312,
        2039,
        also=("NVIDIA-A100-80GB-PCIe", "nvidia-a100-80gb"),
    ),
    _nvidia("A10", "NVIDIA-A10", 22.03, 86, 125, 600, also=("NVIDIA-A10G", "a10g"), per_node=4),
    _nvidia("L4", "NVIDIA-L4", 22.03, 89, 121, 300, also=("nvidia-l4",)),
    _nvidia("L40S", "NVIDIA-L40S", 44.34, 89, 362, 864, also=("nvidia-l40s",)),
    _nvidia(
        "H100-80GB",
        "NVIDIA-H100-80GB-HBM3",
        79.11,
        90,
        989,
        3350,
        also=("NVIDIA-H100-PCIe", "nvidia-h100-80gb", "nvidia-h100-mega-80gb", "H100"),
    ),
    _nvidia(
        "H200-141GB",
        "NVIDIA-H200",
        139.72,
        90,
        989,
        4800,
        also=("NVIDIA-H200-NVL", "nvidia-h200-141gb", "H200"),
    ),
    _nvidia("B200-180GB", "NVIDIA-B200", 178.35, 100, 2250, 7700, also=("nvidia-b200", "B200")),
    _nvidia(
        "GB200-186GB", "NVIDIA-GB200", 184.31, 100, 2450, 8000, also=("nvidia-gb200", "GB200"), per_node=4
    ),
    _nvidia(
        "RTX-PRO-6000-96GB",
        "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
        94.96,
        120,
        500,
        1597,
        also=("NVIDIA-RTX-PRO-6000-Blackwell-Workstation-Edition", "nvidia-rtx-pro-6000", "RTX-PRO-6000"),
    ),
    _nvidia(
        "B300-288GB",
        "NVIDIA-B300-SXM6-AC",
        265.0,
        103,
        2250,
        8000,
        also=("B300",),
        verified=False,
        source=SHEET,
    ),
    _nvidia("L40", "NVIDIA-L40", 44.34, 89, 181, 864, verified=False, source=SHEET),
    _nvidia("A40", "NVIDIA-A40", 44.34, 86, 150, 696, verified=False, source=SHEET),
    _nvidia("T4", "Tesla-T4", 14.5, 75, 65, 320, also=("nvidia-tesla-t4",), verified=False, source=SHEET),
    _nvidia("V100-32GB", "Tesla-V100-SXM2-32GB", 31.7, 70, 125, 900, verified=False, source=SHEET),
    _amd(
        "MI300X-192GB",
        "AMD_Instinct_MI300X_OAM",
        191.69,
        1307,
        5300,
        also=("AMD-Instinct-MI300X-OAM", "MI300X"),
    ),
    _amd(
        "MI325X-256GB",
        "AMD_Instinct_MI325X_OAM",
        255.69,
        1307,
        6000,
        also=("AMD-Instinct-MI325X-OAM", "MI325X"),
        source=SHEET,
    ),
    _amd(
        "MI355X-288GB",
        "AMD_Instinct_MI355X_OAM",
        287.6,
        2500,
        8000,
        also=("AMD-Instinct-MI355X-OAM", "MI355X"),
        verified=False,
        source=SHEET,
    ),
    Accelerator(
        name="TPU-v6e",
        product="tpu-v6e-slice",
        also=("TPU", "v6e"),
        vendor="google",
        memory_gib=31.25,
        capability=0,
        fp8=False,
        bf16_tflops=918,
        bandwidth_gbs=1640,
        per_node=4,
        resource="google.com/tpu",
        verified=False,
        source=SHEET,
    ),
    Accelerator(
        name="Gaudi3-128GB",
        product="HL-325L",
        also=("Gaudi3",),
        vendor="intel",
        memory_gib=127.0,
        capability=0,
        fp8=True,
        bf16_tflops=1835,
        bandwidth_gbs=3700,
        per_node=8,
        resource="habana.ai/gaudi",
        verified=False,
        source=SHEET,
    ),
    Accelerator(
        name="CPU",
        product="cpu",
        vendor="cpu",
        memory_gib=0.0,
        capability=0,
        fp8=False,
        bf16_tflops=2,
        bandwidth_gbs=200,
        per_node=1,
        resource="cpu",
        source="spec.accelerator.memory",
    ),
)
CPU: Final = ROWS[-1]

PRODUCT_LABELS: Final = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "cloud.google.com/gke-tpu-accelerator",
    "k8s.amazonaws.com/accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
)
COUNT_LABELS: Final = ("nvidia.com/gpu.count", "karpenter.k8s.aws/instance-gpu-count", "amd.com/gpu.count")
SHARED: Final = "-SHARED"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Accelerators of one node, from its labels."""

    accelerator: Accelerator
    per_node: int


def find(text: str) -> Accelerator | None:
    """The row of a product or short name, by any of its names; case, dashes and underscores do not matter."""
    return BY_NAME.get(_plain(text.removesuffix(SHARED)))


def known(text: str, field: str = "spec.accelerator.product") -> Accelerator:
    """The row of a product or short name.

    Raises:
        HardwareError: no row has that name; ``field`` is where it came from.
    """
    row = find(text)
    if row is None:
        names = ", ".join(row.name for row in ROWS)
        raise HardwareError(
            f"{field}: {text!r} is not known; known are {names}. For another one give its memory too: "
            "spec.accelerator.memory"
        )
    return row


def other(product: str, memory_gib: float, resource: str = "") -> Accelerator:
    """A row for a product that has none, from its memory: always unverified."""
    return replace(
        known("L40S"),
        name=product,
        product=product,
        also=(),
        memory_gib=memory_gib,
        capability=0,
        fp8=False,
        resource=resource or "nvidia.com/gpu",
        verified=False,
        source="spec.accelerator.memory",
    )


def from_labels(labels: Mapping[str, str]) -> NodeFacts | None:
    """Read a node's accelerators from its labels; None if no label is known."""
    product = next((labels[name] for name in PRODUCT_LABELS if labels.get(name)), "")
    row = find(product) if product else None
    if row is None:
        return None
    count = next((labels[name] for name in COUNT_LABELS if labels.get(name, "").isdigit()), "")
    shared = product.endswith(SHARED)
    return NodeFacts(replace(row, verified=False) if shared else row, int(count or row.per_node))


def of_nodes(nodes: Iterable[Mapping[str, str]]) -> list[NodeFacts]:
    """The kinds of accelerator in a cluster, the most numerous first."""
    found = [facts for labels in nodes if (facts := from_labels(labels))]
    return sorted(set(found), key=lambda facts: (-found.count(facts), facts.accelerator.name))


def _plain(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())


BY_NAME: Final[Mapping[str, Accelerator]] = {
    _plain(name): row for row in ROWS for name in (row.name, row.product, *row.also)
}
