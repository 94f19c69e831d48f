"""The plan: from a pool, the facts of its model and an accelerator to vLLM's arguments, with reasons. Pure.

- ``pool_plan``: the plan of a pool, whose engines may have roles.
- ``nixl``: the connector between roles: refusals, configuration, and who pairs.
- ``planner``: makes the plan of engines with the modules below, in their order; explains a refusal.
- ``checks``: what is refused before a size is chosen, what makes a plan unverified, and warnings.
- ``resources``: accelerators, memory and times of the pods of a replica.
- ``requirements``: context, concurrency and latency targets of a pool.
- ``prompt_batch``: batches of embedding, rerank and classification models.
- ``kv``: dtype of the KV cache.
- ``kv_transfer``: the KV connector for offloaded blocks, and which engines may share them.
- ``tiers``: tokens that each place for blocks holds, and for how long.
- ``layouts``: possible parallelism.
- ``size``: the layout that fits, and the settings reduced for it.
- ``latency``: times of steps, and the step for a TPOT target.
- ``selection``: the kind of accelerator among those of a cluster, and cheaper neighbours.
- ``sequences``: the number of sequences in a step, by the memory of the layout.
- ``shared_cache``: data-parallel attention and decode context parallelism for MLA models.
- ``engine_args``: arguments and environment of the engine.
- ``plan``: the plan as a record and as JSON; the comparison of two plans.
"""

from .plan import Choice, Plan, PlanVerdict
from .pool_plan import make_plan

__all__ = ["Choice", "Plan", "PlanVerdict", "make_plan"]
