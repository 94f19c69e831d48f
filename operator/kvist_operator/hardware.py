"""Table of accelerators; rows are found by product or by short name.

``memory_gib`` is what the driver leaves to a process (``torch.cuda.mem_get_info``), not the nominal size,
because vLLM's memory share is a share of that. The figures are the smallest that public CUDA out-of-memory
messages show for the card ("GPU 0 has a total capacity of … GiB"); where none was found, they come from the
total of public ``nvidia-smi`` output, less the driver's part (``process_gib``), or from the data sheet.

Messages by public file id: H100-NVL 70792423305, GH200 57122334058, RTX-4090 66607027437 and 70553351382,
RTX-3090 53699476224, RTX-5090 63098581994, RTX-A6000 47415730043, RTX-6000-Ada 55643204299, B300 66974703316,
GB300 55106805727. ``nvidia-smi``: H20 65846954299, H20-141GB 56324297938, H800 71303046155, A800 63127901954,
A30 48234235656, L20 63349564404, RTX-A5000 890571070, V100-16GB 69095981488.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvist_operator.errors import HardwareError

SOURCES: Final = {
    "messages": "smallest total capacity in public CUDA out-of-memory messages",
    "smi": "total of public nvidia-smi output, less the driver's part",
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
MIG_RESOURCE: Final = "nvidia.com/mig-"
"""Prefix of the resources of MIG slices under the strategy ``mixed``."""


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
    """CUDA compute capability × 10 (90 = SM90); AMD: 90 for gfx90a, 94 for gfx942, 95 for gfx950; otherwise
    0, which also means unknown."""
    bf16_tflops: float
    """Dense peak of the data sheet."""
    bandwidth_gbs: float
    per_node: int
    """Number on a usual node, for nodes without a label that has it."""
    resource: str = "nvidia.com/gpu"
    verified: bool = True
    """vLLM's memory use on it is modelled; otherwise a plan is unverified."""
    source: str = SOURCES["messages"]
    isolated: bool = False
    """Cannot exchange data with others: a MIG slice, or a GPU that several pods share. NCCL connects neither
    (vLLM would not start), so that a replica has one."""
    shared: bool = False
    """Other processes may use its memory (time-slicing)."""
    like: str = ""
    """Row whose speed is assumed for one that is not in the table."""

    @property
    def fp8(self) -> bool:
        """Computes in FP8: compute capability 8.9 on NVIDIA, gfx942 on AMD; Gaudi 3."""
        least = {"nvidia": 89, "amd": 94, "intel": 0}.get(self.vendor)
        return least is not None and self.capability >= least

    @property
    def peak_tflops(self) -> float:
        """Peak in the best dtype for 8-bit weights."""
        return self.bf16_tflops * (2 if self.fp8 else 1)


TABLE: Final = """
name               vendor  GiB     SM   TFLOPS  GB/s  per-node  verified  source
A100-40GB          nvidia  39.38   80   312     1555  8         yes       messages
A100-80GB          nvidia  79.14   80   312     2039  8         yes       messages
A800-80GB          nvidia  78.94   80   312     2039  8         yes       smi
A30                nvidia  23.33   80   165     933   4         yes       smi
A10                nvidia  22.03   86   125     600   4         yes       messages
A40                nvidia  44.34   86   150     696   8         no        sheet
RTX-A5000          nvidia  23.32   86   111     768   8         yes       smi
RTX-A6000          nvidia  47.40   86   155     768   8         yes       messages
RTX-3090           nvidia  23.56   86   71      936   8         yes       messages
L4                 nvidia  22.03   89   121     300   8         yes       messages
L20                nvidia  44.17   89   119     864   8         yes       smi
L40                nvidia  44.34   89   181     864   8         no        sheet
L40S               nvidia  44.34   89   362     864   8         yes       messages
RTX-6000-Ada       nvidia  47.37   89   364     960   8         yes       messages
RTX-4090           nvidia  23.49   89   165     1008  8         yes       messages
H100-80GB          nvidia  79.11   90   989     3350  8         yes       messages
H100-NVL-94GB      nvidia  93.09   90   835     3938  8         yes       messages
H800-80GB          nvidia  78.59   90   989     3350  8         yes       smi
H20-96GB           nvidia  94.41   90   148     4000  8         yes       smi
H20-141GB          nvidia  138.92  90   148     4800  8         yes       smi
H200-141GB         nvidia  139.72  90   989     4800  8         yes       messages
GH200-96GB         nvidia  94.50   90   989     4000  1         yes       messages
B200-180GB         nvidia  178.35  100  2250    7700  8         yes       messages
GB200-186GB        nvidia  184.31  100  2450    8000  4         yes       messages
B300-288GB         nvidia  267.69  103  2250    8000  8         no        messages
GB300-288GB        nvidia  276.50  103  2500    8000  4         no        messages
RTX-5090           nvidia  31.34   120  209     1792  8         yes       messages
RTX-PRO-6000-96GB  nvidia  94.96   120  500     1597  8         yes       messages
T4                 nvidia  14.5    75   65      320   8         no        sheet
V100-16GB          nvidia  15.39   70   125     900   8         no        smi
V100-32GB          nvidia  31.7    70   125     900   8         no        sheet
MI300X-192GB       amd     191.69  94   1307    5300  8         yes       messages
MI325X-256GB       amd     255.69  94   1307    6000  8         yes       sheet
MI355X-288GB       amd     287.6   95   2500    8000  8         no        sheet
TPU-v6e            google  31.25   0    918     1640  4         no        sheet
Gaudi3-128GB       intel   127     0    1835    3700  8         no        sheet
CPU                cpu     0       0    2       200   1         yes       spec
"""
"""TFLOPS are those of dense BF16, GB/s those of the memory; both are from data sheets."""
NAMES: Final = {
    "A100-40GB": "NVIDIA-A100-SXM4-40GB NVIDIA-A100-PCIE-40GB A100-SXM4-40GB nvidia-tesla-a100",
    "A100-80GB": "NVIDIA-A100-SXM4-80GB NVIDIA-A100-80GB-PCIe nvidia-a100-80gb",
    "A800-80GB": "NVIDIA-A800-SXM4-80GB NVIDIA-A800-80GB-PCIe A800",
    "A30": "NVIDIA-A30",
    "A10": "NVIDIA-A10 NVIDIA-A10G a10g",
    "A40": "NVIDIA-A40",
    "RTX-A5000": "NVIDIA-RTX-A5000 A5000",
    "RTX-A6000": "NVIDIA-RTX-A6000 A6000",
    "RTX-3090": "NVIDIA-GeForce-RTX-3090",
    "L4": "NVIDIA-L4 nvidia-l4",
    "L20": "NVIDIA-L20",
    "L40": "NVIDIA-L40",
    "L40S": "NVIDIA-L40S nvidia-l40s",
    "RTX-6000-Ada": "NVIDIA-RTX-6000-Ada-Generation",
    "RTX-4090": "NVIDIA-GeForce-RTX-4090",
    "H100-80GB": "NVIDIA-H100-80GB-HBM3 NVIDIA-H100-PCIe nvidia-h100-80gb nvidia-h100-mega-80gb H100",
    "H100-NVL-94GB": "NVIDIA-H100-NVL H100-NVL",
    "H800-80GB": "NVIDIA-H800 H800",
    "H20-96GB": "NVIDIA-H20 H20",
    "H20-141GB": "NVIDIA-H20-3e H20-3e",
    "H200-141GB": "NVIDIA-H200 NVIDIA-H200-NVL nvidia-h200-141gb H200",
    "GH200-96GB": "NVIDIA-GH200-480GB GH200",
    "B200-180GB": "NVIDIA-B200 nvidia-b200 B200",
    "GB200-186GB": "NVIDIA-GB200 nvidia-gb200 GB200",
    "B300-288GB": "NVIDIA-B300-SXM6-AC B300",
    "GB300-288GB": "NVIDIA-GB300 GB300",
    "RTX-5090": "NVIDIA-GeForce-RTX-5090",
    "RTX-PRO-6000-96GB": "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition "
    "NVIDIA-RTX-PRO-6000-Blackwell-Workstation-Edition nvidia-rtx-pro-6000 RTX-PRO-6000",
    "T4": "Tesla-T4 nvidia-tesla-t4",
    "V100-16GB": "Tesla-V100-SXM2-16GB Tesla-V100-PCIE-16GB",
    "V100-32GB": "Tesla-V100-SXM2-32GB Tesla-V100-PCIE-32GB",
    "MI300X-192GB": "AMD_Instinct_MI300X_OAM AMD_Instinct_MI300X AMD_Instinct_MI300X_VF MI300X",
    "MI325X-256GB": "AMD_Instinct_MI325X_OAM AMD-Instinct-MI325X-OAM MI325X",
    "MI355X-288GB": "AMD_Instinct_MI355X_OAM AMD-Instinct-MI355X-OAM MI355X",
    "TPU-v6e": "tpu-v6e-slice TPU v6e",
    "Gaudi3-128GB": "HL-325L Gaudi3",
    "CPU": "cpu",
}
"""Products and aliases by short name, the product first."""


def _row(line: str) -> Accelerator:
    name, vendor, gib, capability, tflops, bandwidth, per_node, verified, source = line.split()
    product, *also = NAMES[name].split()
    return Accelerator(
        name=name,
        product=product,
        also=tuple(also),
        vendor=vendor,
        memory_gib=float(gib),
        capability=int(capability),
        bf16_tflops=float(tflops),
        bandwidth_gbs=float(bandwidth),
        per_node=int(per_node),
        resource=RESOURCES[vendor],
        verified=verified == "yes",
        source=SOURCES[source],
    )


ROWS: Final = tuple(_row(line) for line in TABLE.strip().splitlines()[1:])
CPU: Final = ROWS[-1]

SHARED: Final = "-SHARED"
_SLICE: Final = re.compile(r"(?P<gpu>.+)-MIG-(?P<profile>\d+g\.(?P<gb>\d+)gb[\w.]*)")
SLICE_PART: Final = 0.88
"""GiB that a MIG slice has at least for each GB in the name of its profile: 10 GB are 9.5 GiB on an A100,
12 GB 10.75 GiB on an H100 NVL, 18 GB 16 GiB on an H200 (``nvidia-smi mig -lgip``). The node's label has the
exact figure."""


def process_gib(total_gib: float) -> float:
    """Return the GiB that a process gets of the total that ``nvidia-smi`` shows.

    The driver keeps at most 0.5 GiB and 0.7 % in public pairs of such a total and a CUDA out-of-memory
    message: 0.46 of 22.5 GiB (L4), 0.54 of 79.65 (H100), 1.08 of 95.58 (GH200), 0.71 of 179.06 (B200).
    """
    return round(max(0.0, 0.993 * total_gib - 0.5), 2)


def find_accelerator(text: str) -> Accelerator | None:
    """Return the row with this product, alias or short name; None without one.

    Case, dashes and underscores do not matter. A MIG slice (``NVIDIA-H200-MIG-1g.18gb``) and a shared GPU
    (``NVIDIA-L4-SHARED``) are rows of their own, made from that of the GPU.
    """
    whole = text.removesuffix(SHARED)
    if whole != text:
        row = find_accelerator(whole)
        return shared_accelerator(row) if row else None
    match = _SLICE.fullmatch(whole)
    if match:
        row = BY_NAME.get(_plain(match["gpu"]))
        return slice_of(row, match["profile"], int(match["gb"]) * SLICE_PART) if row else None
    return BY_NAME.get(_plain(whole))


def slice_of(row: Accelerator, profile: str, memory_gib: float, source: str = "") -> Accelerator:
    """Return the MIG slice of a GPU with this profile (``1g.10gb``)."""
    compute = int(profile.partition("g")[0]) / 7
    return replace(
        row,
        name=f"{row.name}-MIG-{profile}",
        product=f"{row.product}-MIG-{profile}",
        also=tuple(f"{name}-MIG-{profile}" for name in row.also),
        memory_gib=memory_gib,
        bf16_tflops=row.bf16_tflops * compute,
        bandwidth_gbs=row.bandwidth_gbs * memory_gib / row.memory_gib,
        per_node=1,
        isolated=True,
        source=source or "GB in the name of the profile, less the driver's part",
    )


def shared_accelerator(row: Accelerator) -> Accelerator:
    """Return a GPU whose time several pods share; each sees its whole memory."""
    return replace(
        row,
        name=row.name + SHARED,
        product=row.product + SHARED,
        also=tuple(name + SHARED for name in row.also),
        per_node=1,
        verified=False,
        isolated=True,
        shared=True,
        source="memory of the whole GPU, which other pods use too",
    )


def _plain(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())


def is_called(row: Accelerator, value: str) -> bool:
    """Return whether a node's label or a price names this accelerator; for a MIG slice that has a resource of
    its own also the label with the product of the whole GPU."""
    names = {_plain(name) for name in (row.name, row.product, *row.also)}
    if row.resource.startswith(MIG_RESOURCE):
        names |= {_plain(name.partition("-MIG-")[0]) for name in (row.product, *row.also)}
    return _plain(value) in names


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


def unlisted_accelerator(
    product: str,
    memory_gib: float,
    *,
    capability: int = 0,
    resource: str = "",
    source: str = SOURCES["spec"],
) -> Accelerator:
    """Return an unverified row for a product that is not in the table, with the speed of the row that is most
    like it: of the same vendor and architecture, and with the nearest memory. Without a known capability that
    is an L40S."""
    vendor = next((name for name, own in RESOURCES.items() if own == resource), "nvidia")
    rows = [row for row in ROWS if row.vendor == vendor]
    like = known_accelerator("L40S")
    if rows and (capability or vendor != like.vendor):

        def distance(row: Accelerator) -> tuple[int, float]:
            return abs(row.capability // 10 - capability // 10), abs(row.memory_gib - memory_gib)

        like = min(rows, key=distance)
    return replace(
        like,
        like=like.name,
        name=product,
        product=product,
        also=(),
        vendor=vendor,
        memory_gib=memory_gib,
        capability=capability,
        resource=resource or "nvidia.com/gpu",
        verified=False,
        source=source,
    )


BY_NAME: Final[Mapping[str, Accelerator]] = {
    _plain(name): row for row in ROWS for name in (row.name, row.product, *row.also)
}
