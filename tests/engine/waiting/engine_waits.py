"""A general plugin of vLLM for these tests: its threads sleep for a moment where they ask in a loop.

vLLM's worker asks for its next step without a pause for a second after each step, and NIXL's thread asks for
messages without a pause at all: three engines would keep three cores busy that have nothing to do, and there
are two. Only how often they look is changed. ``tests.engine.vllm`` puts this folder on the path of each
engine, where vLLM finds the plugin by its entry point.

Tried and not kept: no loop in vLLM's worker at all (``busy_loop_s = 0``). Some of its notifications are lost
then, and engine and worker wait for each other for many seconds.
"""

import time
from typing import Any

PAUSE_SECONDS = 0.0005
PAUSE_MICROSECONDS = 1000
"""Between two looks of NIXL's thread."""


def register() -> None:
    """Change both; vLLM calls this once or more in each of its processes."""
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = _pause
    try:
        from nixl._api import nixlBind
    except ImportError:  # an engine without NIXL on its path
        return
    if not isinstance(nixlBind.nixlAgent, _WaitingAgents):
        nixlBind.nixlAgent = _WaitingAgents(nixlBind.nixlAgent)


def _pause() -> None:
    time.sleep(PAUSE_SECONDS)


class _WaitingAgents:
    """Makes NIXL's agents with a pause."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __call__(self, name: str, config: Any) -> Any:
        config.pthrDelay = PAUSE_MICROSECONDS
        return self._make(name, config)
