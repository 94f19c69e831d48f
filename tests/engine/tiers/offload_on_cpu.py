# mypy: disable-error-code="import-not-found, misc, has-type, no-any-return"
"""vLLM's host and disk tiers on its CPU build: an offloading spec whose worker copies between CPU tensors.

vLLM's own specs refuse every platform but CUDA and XPU, because their workers copy with CUDA streams. All
else runs on a CPU: the scheduler's side of the connector, the tiers, their files and their events. An engine
loads this module by name (``spec_module_path``), so its folder has to be on PYTHONPATH; it is imported by
vLLM's interpreter only.
"""

from time import perf_counter
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyWorker(OffloadingWorker):
    """Copies blocks between the engine's cache and the region that the tiers share, at once."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._region = region
        self._done: list[TransferResult] = []
        self._pairs = []
        for tensor in kv_caches.tensors:
            cache = tensor.tensor.view(torch.int8).view(-1, tensor.page_size_bytes)
            self._pairs.append((cache, region.create_next_worker_view(tensor.page_size_bytes)))

    def submit_store(self, job_id: Any, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks of the cache to the host tier."""
        return self._copy(job_id, src_spec.block_ids, dst_spec.block_ids, store=True)

    def submit_load(self, job_id: Any, src_spec: Any, dst_spec: Any) -> bool:
        """Copy blocks of the host tier to the cache."""
        return self._copy(job_id, dst_spec.block_ids, src_spec.block_ids, store=False)

    def get_finished(self) -> list[TransferResult]:
        """Return the copies since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """Return at once: copies are done when they are submitted."""

    def shutdown(self) -> None:
        """Free the region."""
        self._pairs = []
        self._region.cleanup()

    def _copy(self, job_id: Any, cached: Any, hosted: Any, *, store: bool) -> bool:
        started, size = perf_counter(), 0
        ours, theirs = (torch.from_numpy(ids.astype("int64")) for ids in (cached, hosted))
        for cache, host in self._pairs:
            if store:
                host[theirs] = cache[ours]
            else:
                cache[ours] = host[theirs]
            size += len(ours) * cache.shape[1]
        seconds = perf_counter() - started
        self._done.append(
            TransferResult(job_id=job_id, success=True, transfer_size=size, transfer_time=seconds)
        )
        return True


class HostTiers(TieringOffloadingSpec):
    """A host tier in CPU memory and the secondary tiers that the configuration names."""

    def get_worker(self, kv_caches: Any) -> CopyWorker:
        """Return the worker of this engine, made at the first call."""
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyWorker(kv_caches, region)
        return self._worker
