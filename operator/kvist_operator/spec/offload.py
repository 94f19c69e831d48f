"""``spec.offload`` as frozen data: the places for KV cache blocks beyond the GPU."""

from dataclasses import dataclass
from typing import Final

LMCACHE_IMAGE: Final = "lmcache/standalone:v0.5.6"
SHARED_PATH: Final = "kv-blocks"
LMCACHE_PORT: Final = 5555
"""Port on which LMCache's server listens for engines, by its own default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedVolume:
    """Fields of ``spec.offload.shared``: a volume that many pods write to and read from."""

    claim: str
    size_bytes: int
    """What all blocks in the folder may take."""
    path: str = SHARED_PATH
    """Folder of the claim. Never its root: there may be other files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LmCache:
    """Fields of ``spec.offload.lmcache``: servers that the operator runs, or the address of one."""

    memory_bytes: int = 0
    """Memory of the server on each node; 0 = there is a server at ``address``."""
    image: str = ""
    address: str = ""
    """``tcp://host:port``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Fields of ``spec.offload``: bytes for each replica and node; 0 = none."""

    cpu_bytes: int = 0
    disk_bytes: int = 0
    storage_class: str = ""
    """Of the volume that each pod claims for the blocks on disk."""
    host_path: str = ""
    """Folder of the node for the blocks on disk, which outlives the pods. Without this and a class the blocks
    are in a volume of the pod on the node's own disk."""
    eviction: str = ""
    """``LRU`` or ``ARC``: which blocks leave the memory first; empty = left to vLLM."""
    generated: bool = False
    """Blocks of generated tokens are kept, too, not only those of prompts."""
    shared: SharedVolume | None = None
    lmcache: LmCache | None = None

    @property
    def needs_connector(self) -> bool:
        """Whether engines need a KV connector for any of these places."""
        return bool(self.cpu_bytes or self.lmcache)

    @property
    def node_disk_bytes(self) -> int:
        """Bytes on the node's own disk that count as the pod's, because they are in an emptyDir."""
        return 0 if self.storage_class or self.host_path else self.disk_bytes
