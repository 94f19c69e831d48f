"""The plan: (Pool, model facts, accelerator) → arguments, each choice with its reason. All pure.

``wish`` what is wanted · ``seat`` on which accelerators · ``kv`` in which KV dtype · ``layouts`` which
parallelism is possible · ``size`` the rule of size · ``squeeze`` what gives way first · ``targets``
latency · ``refuse`` what is missing · ``compose`` the arguments and what the pod needs · ``make`` all of
it, in this order · ``compare`` two plans.
"""

from .make import make_plan
from .outcome import Choice, Plan, Verdict

__all__ = ["Choice", "Plan", "Verdict", "make_plan"]
