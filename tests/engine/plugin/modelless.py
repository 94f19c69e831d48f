# mypy: disable-error-code="import-not-found, misc, no-any-return"
"""An executor of vLLM without a model: everything of the engine is real but the numbers.

Scheduler, KV cache manager, events and API decide what is cached and see no weights. So models that no CPU
runs, such as those that mix attention with states, can be tested: the KV cache groups are those of the
environment variable ``KVIST_KV_GROUPS``, a JSON list of kinds, one for each layer: ``full``, ``state``,
``draft`` for a layer of a draft model with full attention, or a number, the tokens of a sliding window. The
generated tokens are drawn, or those of ``KVIST_ANSWER``, a JSON list with which every answer begins.

``--distributed-executor-backend modelless.Modelless`` starts an engine with it.
"""

import json
import os
import random
from concurrent.futures import Future
from typing import Any

import torch
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput

HEAD_SIZE = 16
MEMORY = 1 << 26


class Modelless(Executor):
    """Answers what vLLM asks of its workers."""

    def _init_executor(self) -> None:
        self._kinds: list[str | int] = json.loads(os.environ["KVIST_KV_GROUPS"])
        if "state" in self._kinds:
            self.cache_config.mamba_cache_mode = "align"  # as for models that have states
            self.cache_config.mamba_block_size = self.cache_config.block_size
        self._random = random.Random(1)
        self._answer: list[int] = json.loads(os.environ.get("KVIST_ANSWER", "[]"))
        self._known: dict[str, int] = {}
        """Tokens of each request, those generated included."""
        self._generated: dict[str, int] = {}
        """Of these, those generated."""

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Return the answer of the only worker; of most methods there is nothing to say."""
        answer = getattr(self, f"_{method}", lambda *_given: None)
        return _given([answer(*args)], non_block)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Return a token for each request whose known tokens are all computed after this step."""
        return _given(self._run(scheduler_output), non_block)

    def compile_or_warm_up_model(self) -> None:
        """There is nothing to compile."""

    def check_health(self) -> None:
        """Return without an exception: nothing can be wrong."""

    def _get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def _get_supported_kv_cache_layouts(self) -> list[str]:
        return [layout.name for layout in get_supported_kv_cache_layouts([])]

    def _determine_available_memory(self) -> int:
        return MEMORY

    def _get_kv_cache_spec(self) -> dict[str, Any]:
        return {f"model.layers.{number}.attn": self._spec(kind) for number, kind in enumerate(self._kinds)}

    def _spec(self, kind: str | int) -> Any:
        size, speculative = self.cache_config.block_size, self.speculative_config
        page = 2 * size * HEAD_SIZE * 4
        if kind == "state":
            return MambaSpec(
                block_size=size,
                shapes=((page // 4,),),
                dtypes=(torch.float32,),
                page_size_padded=page,
                mamba_cache_mode=self.cache_config.mamba_cache_mode,
                num_speculative_blocks=0 if speculative is None else speculative.num_speculative_tokens,
            )
        common = {"block_size": size, "num_kv_heads": 1, "head_size": HEAD_SIZE, "dtype": torch.float32}
        if kind in ("full", "draft"):
            return FullAttentionSpec(**common, is_draft=kind == "draft")
        return SlidingWindowSpec(**common, sliding_window=kind)

    def _run(self, step: Any) -> ModelRunnerOutput:
        computed = dict(
            zip(
                step.scheduled_cached_reqs.req_ids,
                step.scheduled_cached_reqs.num_computed_tokens,
                strict=True,
            )
        )
        for new in step.scheduled_new_reqs:
            self._known[new.req_id] = len(new.prompt_token_ids)
            computed[new.req_id] = new.num_computed_tokens
        names = list(step.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in names:
            complete = computed[name] + step.num_scheduled_tokens[name] >= self._known[name]
            sampled.append([self._next_token(name)] if complete else [])
            self._known[name] += complete
        for name in step.finished_req_ids:
            self._known.pop(name, None)
            self._generated.pop(name, None)
        return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)

    def _next_token(self, name: str) -> int:
        at = self._generated.get(name, 0)
        self._generated[name] = at + 1
        return self._answer[at] if at < len(self._answer) else self._random.randrange(1000)


def _given(answer: Any, non_block: bool) -> Any:
    """Return an answer as vLLM wants it: itself, or a future that has it."""
    if not non_block:
        return answer
    future: Future[Any] = Future()
    future.set_result(answer)
    return future
