"""Table of accelerators; rows are found by product, by short name, or by the labels of a node.

``memory_gib`` is what the driver leaves to a process (``torch.cuda.mem_get_info``), not the nominal size,
because vLLM's memory share is a share of that. The figures are the smallest that public CUDA out-of-memory
messages show for the card ("GPU 0 has a total capacity of … GiB"); where none was found, they are those of
the data sheet.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvist_operator.errors import HardwareError

SOURCES: Final = {
    "messages": "smallest total capacity in public CUDA out-of-memory messages",
    "sheet": "data sheet, less the memory that the driver reserves on similar cards",
    "spec": "spec.accelerator.memory",
}
RESOURCES: Final = {
    "nvidia": "nvidia.com/gpu",
    "amd": "amd.com/gpu",
    "google": "google.com/tpu",
    "intel": "habana.ai/gaudi",
    "cpu": "cpu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One kind of accelerator."""

    name: str
    """Short: ``H100-80GB``."""
    product: str
    """Value of the node label that the device plugin's feature discovery sets."""
    also: tuple[str, ...] = ()
    """Other label values and names for the same row."""
    vendor: str
    memory_gib: float
    capability: int
    """CUDA compute capability × 10 (90 = SM90); 0 for other vendors."""
    fp8: bool
    """Computes in FP8."""
    bf16_tflops: float
    """Dense peak of the data sheet."""
    bandwidth_gbs: float
    per_node: int
    """Number on a usual node, for nodes without a label that has it."""
    resource: str = "nvidia.com/gpu"
    verified: bool = True
    """vLLM's memory use on it is modelled; otherwise a plan is unverified."""
    source: str = SOURCES["messages"]

    @property
    def peak_tflops(self) -> float:
        """Peak in the best dtype for 8-bit weights."""
        return self.bf16_tflops * (2 if self.fp8 else 1)


TABLE: Final = """
name               vendor  GiB     SM   FP8  TFLOPS  GB/s  per-node  verified  source
A100-40GB          nvidia  39.38   80   no   312     1555  8         yes       messages
A100-80GB          nvidia  79.14   80   no   312     2039  8         yes       messages
A10                nvidia  22.03   86   no   125     600   4         yes       messages
L4                 nvidia  22.03   89   yes  121     300   8         yes       messages
L40S               nvidia  44.34   89   yes  362     864   8         yes       messages
H100-80GB          nvidia  79.11   90   yes  989     3350  8         yes       messages
H200-141GB         nvidia  139.72  90   yes  989     4800  8         yes       messages
B200-180GB         nvidia  178.35  100  yes  2250    7700  8         yes       messages
GB200-186GB        nvidia  184.31  100  yes  2450    8000  4         yes       messages
RTX-PRO-6000-96GB  nvidia  94.96   120  yes  500     1597  8         yes       messages
B300-288GB         nvidia  265     103  yes  2250    8000  8         no        sheet
L40                nvidia  44.34   89   yes  181     864   8         no        sheet
A40                nvidia  44.34   86   no   150     696   8         no        sheet
T4                 nvidia  14.5    75   no   65      320   8         no        sheet
V100-32GB          nvidia  31.7    70   no   125     900   8         no        sheet
MI300X-192GB       amd     191.69  94   yes  1307    5300  8         yes       messages
MI325X-256GB       amd     255.69  94   yes  1307    6000  8         yes       sheet
MI355X-288GB       amd     287.6   94   yes  2500    8000  8         no        sheet
TPU-v6e            google  31.25   0    no   918     1640  4         no        sheet
Gaudi3-128GB       intel   127     0    yes  1835    3700  8         no        sheet
CPU                cpu     0       0    no   2       200   1         yes       spec
"""
"""TFLOPS are those of dense BF16, GB/s those of the memory."""
NAMES: Final = {
    "A100-40GB": "NVIDIA-A100-SXM4-40GB NVIDIA-A100-PCIE-40GB nvidia-tesla-a100",
    "A100-80GB": "NVIDIA-A100-SXM4-80GB NVIDIA-A100-80GB-PCIe nvidia-a100-80gb",
    "A10": "NVIDIA-A10 NVIDIA-A10G a10g",
    "L4": "NVIDIA-L4 nvidia-l4",
    "L40S": "NVIDIA-L40S nvidia-l40s",
    "H100-80GB": "NVIDIA-H100-80GB-HBM3 NVIDIA-H100-PCIe nvidia-h100-80gb nvidia-h100-mega-80gb H100",
    "H200-141GB": "NVIDIA-H200 NVIDIA-H200-NVL nvidia-h200-141gb H200",
    "B200-180GB": "NVIDIA-B200 nvidia-b200 B200",
    "GB200-186GB": "NVIDIA-GB200 nvidia-gb200 GB200",
    "RTX-PRO-6000-96GB": "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition "
    "NVIDIA-RTX-PRO-6000-Blackwell-Workstation-Edition nvidia-rtx-pro-6000 RTX-PRO-6000",
    "B300-288GB": "NVIDIA-B300-SXM6-AC B300",
    "L40": "NVIDIA-L40",
    "A40": "NVIDIA-A40",
    "T4": "Tesla-T4 nvidia-tesla-t4",
    "V100-32GB": "Tesla-V100-SXM2-32GB",
    "MI300X-192GB": "AMD_Instinct_MI300X_OAM AMD-Instinct-MI300X-OAM MI300X",
    "MI325X-256GB": "AMD_Instinct_MI325X_OAM AMD-Instinct-MI325X-OAM MI325X",
    "MI355X-288GB": "AMD_Instinct_MI355X_OAM AMD-Instinct-MI355X-OAM MI355X",
    "TPU-v6e": "tpu-v6e-slice TPU v6e",
    "Gaudi3-128GB": "HL-325L Gaudi3",
    "CPU": "cpu",
}
"""Products and aliases by short name, the product first."""


def _row(line: str) -> Accelerator:
    name, vendor, gib, capability, fp8, tflops, bandwidth, per_node, verified, source = line.split()
    product, *also = NAMES[name].split()
    return Accelerator(
        name=name,
        product=product,
        also=tuple(also),
        vendor=vendor,
        memory_gib=float(gib),
        capability=int(capability),
        fp8=fp8 == "yes",
        bf16_tflops=float(tflops),
        bandwidth_gbs=float(bandwidth),
        per_node=int(per_node),
        resource=RESOURCES[vendor],
        verified=verified == "yes",
        source=SOURCES[source],
    )


ROWS: Final = tuple(_row(line) for line in TABLE.strip().splitlines()[1:])
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
    """Accelerators of one node, as its labels say."""

    accelerator: Accelerator
    per_node: int


def find_accelerator(text: str) -> Accelerator | None:
    """Return the row with this product, alias or short name; None without one.

    Case, dashes and underscores do not matter.
    """
    return BY_NAME.get(_plain(text.removesuffix(SHARED)))


def _plain(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())


def known_accelerator(text: str, field: str = "spec.accelerator.product") -> Accelerator:
    """Return the row with this product, alias or short name.

    Raises:
        HardwareError: no row has that name; the message begins with ``field``, which has the name.
    """
    row = find_accelerator(text)
    if row is None:
        names = ", ".join(row.name for row in ROWS)
        raise HardwareError(
            f"{field}: {text!r} is not known; known are {names}. For another one set its memory too: "
            "spec.accelerator.memory"
        )
    return row


def unlisted_accelerator(product: str, memory_gib: float, resource: str = "") -> Accelerator:
    """Return an unverified row for a product that is not in the table."""
    return replace(
        known_accelerator("L40S"),
        name=product,
        product=product,
        also=(),
        memory_gib=memory_gib,
        capability=0,
        fp8=False,
        resource=resource or "nvidia.com/gpu",
        verified=False,
        source=SOURCES["spec"],
    )


def node_facts(labels: Mapping[str, str]) -> NodeFacts | None:
    """Return a node's accelerators by its labels; None if no label names a known product."""
    product = next((labels[name] for name in PRODUCT_LABELS if labels.get(name)), "")
    row = find_accelerator(product) if product else None
    if row is None:
        return None
    count = next((labels[name] for name in COUNT_LABELS if labels.get(name, "").isdigit()), "")
    shared = product.endswith(SHARED)
    return NodeFacts(replace(row, verified=False) if shared else row, int(count or row.per_node))


def node_kinds(nodes: Iterable[Mapping[str, str]]) -> list[NodeFacts]:
    """Return the kinds of accelerator in a cluster, the most numerous first."""
    found = [facts for labels in nodes if (facts := node_facts(labels))]
    return sorted(set(found), key=lambda facts: (-found.count(facts), facts.accelerator.name))


BY_NAME: Final[Mapping[str, Accelerator]] = {
    _plain(name): row for row in ROWS for name in (row.name, row.product, *row.also)
}
