"""The status of a pool, from its plan or error, what was observed, the old status and the time. Pure.

- ``status_builder``: the status object.
- ``conditions``, ``conditions_builder``: the rules that all conditions follow, and what each one says.
- ``views``: numbers and states read from the pool's objects.
- ``diagnosis``, ``pod_diagnosis``, ``scheduling_diagnosis``: why a pod does not run, and the remedy.
- ``termination_message``, ``known_errors``: the last error of an engine, and what is known of it.
- ``spec_fields``, ``advice``: the fields that remedies name, and advice on a running pool.
"""

from .conditions import Condition
from .status_builder import Subject, status
from .views import ObservedPool, Trouble, plan_status

__all__ = ["Condition", "ObservedPool", "Subject", "Trouble", "plan_status", "status"]
