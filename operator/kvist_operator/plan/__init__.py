"""The plan: from a pool, the facts of its model and an accelerator to vLLM's arguments, each choice with its
reason. Pure.

- ``planner``: makes the plan with the modules below, in their order.
- ``requirements``: what the pool asks for: context, sequences, latency.
- ``accelerator``, ``pod``: the GPUs of one pod, and the pod's own resources.
- ``kv``, ``layouts``, ``size``: KV cache dtype, possible parallelism, and the layout that fits.
- ``fallbacks``: what is reduced first when memory is short.
- ``targets``: the latency to expect.
- ``rejection``: what is missing when nothing fits.
- ``engine_args``: the arguments and the environment of the engine.
- ``plan``, ``compare``: the plan's record, and the difference of two.
"""

from .plan import Choice, Plan, Verdict
from .planner import make_plan

__all__ = ["Choice", "Plan", "Verdict", "make_plan"]
