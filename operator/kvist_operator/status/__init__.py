"""The status of a pool, from its plan or error, what was observed, the old status and the time. Pure.

- ``status_builder``: the status object.
- ``conditions``: the rules that all conditions follow.
- ``conditions_builder``: what each condition says.
- ``views``: numbers and states read from the pool's objects.
- ``diagnosis``: why components do not run, and the remedy.
- ``pod_diagnosis``: the same for one pod.
- ``containers``: the same for one container.
- ``scheduling_diagnosis``: remedies for a pod that no node takes.
- ``termination_message``: the last error of an engine.
- ``known_errors``: what is known of such errors.
- ``spec_fields``: the fields that remedies name.
- ``advice``: advice on a running pool.
"""

from .conditions import Condition
from .status_builder import Subject, status
from .views import ObservedPool, Trouble, plan_status

__all__ = ["Condition", "ObservedPool", "Subject", "Trouble", "plan_status", "status"]
