"""A real server of LMCache on CPU memory, and two engines of vLLM that use it, behind picker and Envoy."""

import asyncio
import json
import signal
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.engine import install
from tests.engine.prefill_decode import EAGERLY
from tests.engine.tiers.record_events import tiered_engine
from tests.engine.tiers.tier_pool import TierMix, TierPool
from tests.engine.vllm import START_METHOD, Process, VllmEngine

from kvist_epp.names import LABEL_KV_STORAGE, LABEL_KV_STORAGE_TOKENS, LMCACHE_TIER, POD_KV_TIERS
from kvist_operator.plan.kv_transfer import ANSWER, HEARTBEAT
from kvist_sim.ports import free_ports

PATIENCE = 120
"""Seconds in which the picker finds an engine that was listed: a few on a quiet machine."""
CHUNK = 64
"""Tokens of LMCache's blocks: two of the engine's."""
TOKENS = 48_000
"""What the server holds, at 1 KiB a token of the tiny model."""
ENGINE_DRIVEN = ("--supported-transfer-mode", "engine_driven")
SERVER_DRIVEN = ("--supported-transfer-mode", "lmcache_driven")
"""The server copies from the engine's memory: on a GPU by CUDA's IPC, on CPU by /dev/shm."""
STORES_ONLY = ("--kv-event-log-size", "0")
"""The server reports nothing, so that engines report what they have stored."""


class LmcacheServer:
    """One ``lmcache server``, from entering to leaving; 10 to 30 seconds to be ready.

    ``stop`` and ``start`` in between are a restart, at the same ports. ``flags`` come last and win.
    """

    def __init__(self, *flags: str, tokens: int = TOKENS) -> None:
        self.port, http = free_ports(2)
        self.url = f"http://127.0.0.1:{http}"
        self._arguments = (
            *("server", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--http-host", "127.0.0.1", "--http-port", str(http), "--chunk-size", str(CHUNK)),
            *("--l1-size-gb", f"{tokens / (1 << 20):.4f}", "--no-l1-use-lazy", "--eviction-policy", "LRU"),
            *(*ENGINE_DRIVEN, *STORES_ONLY, *flags),
        )
        self._process: Process | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start the server, and wait until it answers."""
        site = install.install_lmcache()
        variables = {"PYTHONPATH": str(site), "PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}
        command = ("-P", str(site / "bin" / "lmcache"), *self._arguments)
        self._process = Process(command, variables)
        try:
            await self._process.start([self.url], health="/healthcheck")
        except BaseException:
            await self.stop(signal.SIGKILL)
            raise

    async def stop(self, kind: signal.Signals = signal.SIGTERM) -> None:
        """End the server; ``SIGKILL`` for a crash. Does nothing when it has ended."""
        if self._process is not None:
            await self._process.stop(kind)
            self._process = None

    def log(self) -> str:
        """The end of what the server wrote."""
        return "" if self._process is None else self._process.log()


def transfer_config(server: LmcacheServer, **extra: Any) -> str:
    """Return ``--kv-transfer-config`` for this server, as the operator renders it."""
    settings = {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": server.port,
        "lmcache.mp.heartbeat_interval": HEARTBEAT,
        "lmcache.mp.mq_timeout": ANSWER,
        **extra,
    }
    return json.dumps(
        {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": settings,
        }
    )


def variables(mode: str = "engine_driven") -> dict[str, str]:
    """Return the environment of an engine that uses a server, as the operator renders it; its processes are
    not forked, since LMCache's library fails to start in a fork."""
    return {
        START_METHOD: "spawn",
        "PYTHONPATH": str(install.install_lmcache()),
        "PYTHONHASHSEED": "0",
        "LMCACHE_MP_TRANSFER_MODE": mode,
        "LMCACHE_TRACK_USAGE": "false",
    }


class LmcachePool(TierPool):
    """``TierPool`` with one server of LMCache in place of host memory and folder."""

    def __init__(self, folder: Path, server: LmcacheServer, *, mode: str = "engine_driven") -> None:
        super().__init__(folder)
        self.server = server
        self.mix = TierMix(7, adapted=0)  # LMCache does not tell adapters apart
        self._lmcache_mode = mode

    async def _start(self) -> None:
        self._stack.push_async_callback(self.server.stop)
        await self.server.start()  # engines that start do not wait long for it
        await super()._start()

    def _mount(self) -> None:
        """Need no volume."""

    async def only(self, *numbers: int) -> None:
        """List these engines, and wait until the picker trusts its index of them and has no others."""
        self.listed(*numbers)
        for number, engine in enumerate(self.engines):
            metric = f'kvist_epp_index_trust{{endpoint="{engine.hostport}"'
            await asyncio.wait_for(self.until(metric, int(number in numbers)), PATIENCE)

    def _engine(self, number: int, ports: tuple[int, ...] = ()) -> VllmEngine:
        config, environment = transfer_config(self.server), {**variables(self._lmcache_mode), **EAGERLY}
        return tiered_engine(self.model, config, *self._weights, ports=ports, environment=environment)

    def _endpoint(self, number: int) -> dict[str, Any]:
        found = super()._endpoint(number)
        labels = {POD_KV_TIERS: LMCACHE_TIER, LABEL_KV_STORAGE: "n1", LABEL_KV_STORAGE_TOKENS: str(TOKENS)}
        found["labels"] |= labels
        return found
