"""A general plugin of vLLM for these tests: several engines on two cores.

How often vLLM's processes look for work is changed, and how they start; what they compute is not:

* vLLM's worker asks for its next step without a pause for a second after each step, and NIXL's thread asks
  for messages without a pause at all: three engines would keep three cores busy that have nothing to do. Both
  sleep for a moment.
* The engine's core and its worker are started as ``VLLM_WORKER_MULTIPROC_METHOD`` says. vLLM's CPU platform
  overrides that and lets each import everything again, half of the CPU time of a start.

``tests.engine.vllm`` puts this folder on the path of each engine, where vLLM finds the plugin by its entry
point.

Tried and not kept: no loop in vLLM's worker at all (``busy_loop_s = 0``). Some of its notifications are lost
then, and engine and worker wait for each other for many seconds.
"""

import os
import time
from typing import Any

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
PAUSE_SECONDS = 0.0005
PAUSE_MICROSECONDS = 1000
"""Between two looks of NIXL's thread."""


def register() -> None:
    """Change all three; vLLM calls this once or more in each of its processes."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms.cpu import CpuPlatform

    shm_broadcast.sched_yield = _pause
    _keep_start_method(CpuPlatform)
    try:
        from nixl._api import nixlBind
    except ImportError:  # an engine without NIXL on its path
        return
    if not isinstance(nixlBind.nixlAgent, _WaitingAgents):
        nixlBind.nixlAgent = _WaitingAgents(nixlBind.nixlAgent)


def _pause() -> None:
    time.sleep(PAUSE_SECONDS)


def _keep_start_method(platform: Any) -> None:
    """Take back what the platform's checks write into the environment."""
    check = platform.check_and_update_config.__func__
    if check.__module__ == __name__:
        return

    def check_and_update_config(cls: Any, config: Any) -> None:
        asked = os.environ[START_METHOD]
        check(cls, config)
        os.environ[START_METHOD] = asked

    platform.check_and_update_config = classmethod(check_and_update_config)


class _WaitingAgents:
    """Makes NIXL's agents with a pause."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __call__(self, name: str, config: Any) -> Any:
        config.pthrDelay = PAUSE_MICROSECONDS
        return self._make(name, config)
