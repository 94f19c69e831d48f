# mypy: disable-error-code="import-not-found, misc, has-type, no-any-return"
"""vLLM's host and disk tiers on its CPU build: an offloading spec whose worker copies between CPU tensors.

vLLM's own specs refuse every platform but CUDA and XPU, because their workers copy with CUDA streams. All
else runs on a CPU: the scheduler's side of the connector, the tiers, their files and their events. An engine
loads this module by name (``spec_module_path``), so its folder has to be on PYTHONPATH; it is imported by
vLLM's interpreter only.

Both tiers wait as long as files in the folder ``$TIER_SPEEDS`` say: ``host`` for loads into the cache,
``files`` for reads of the disk. A file has seconds a block, or ``closed`` while no load may end.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


def wait(tier: str, blocks: int) -> None:
    """Return when a tier may have loaded so many blocks."""
    folder = os.environ.get("TIER_SPEEDS")
    if folder is None:
        return
    while (text := Path(folder, tier).read_text()) == "closed":
        sleep(0.01)
    if seconds := float(text) * blocks:
        sleep(seconds)


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
        if not store:
            wait("host", len(cached))
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


class SlowFiles(FileSystemTierManager):
    """vLLM's tier of files, with reads that wait first; the engine measures the waiting with the reading."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._pool = _SlowReads(self._pool)

    def submit_load(self, job_metadata: Any) -> None:
        """Read the blocks of a job."""
        self._pool.blocks = len(job_metadata.keys)
        super().submit_load(job_metadata)


class _SlowReads:
    """A pool of threads that does all but reads at once."""

    def __init__(self, pool: Any) -> None:
        self.blocks = 0
        """Of the job that is enqueued next."""
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def enqueue_load(self, job_id: int, n_tasks: int, tasks: list[Callable[[], None]]) -> None:
        waiting = partial(wait, "files", self.blocks)
        self._pool.enqueue_load(job_id, n_tasks, [partial(_in_turn, waiting, task) for task in tasks])


def _in_turn(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()
