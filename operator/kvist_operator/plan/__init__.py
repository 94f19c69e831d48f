"""The plan: from a pool, the facts of its model and an accelerator to vLLM's arguments, each choice with its
reason. Pure.

- ``planner``: makes the plan with the modules below, in their order.
- ``requirements``: what the pool asks for: context, sequences, latency.
- ``accelerator``: the GPUs of one pod.
- ``kv``: KV cache dtype.
- ``layouts``: possible parallelism.
- ``size``: the layout that fits.
- ``fallbacks``: what is reduced first when memory is short.
- ``targets``: the latency to expect.
- ``rejection``: what is missing when nothing fits.
- ``engine_args``: the arguments and the environment of the engine.
- ``pod``: the pod's own resources.
- ``plan``: the plan's record.
- ``compare``: the difference of two plans.
"""

from .plan import Choice, Plan, PlanVerdict
from .planner import make_plan

__all__ = ["Choice", "Plan", "PlanVerdict", "make_plan"]
