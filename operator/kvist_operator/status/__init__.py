"""The status of a pool, from its plan or error, what was observed, the old status and the time. Pure.

- ``status_builder``: the status object and its conditions.
- ``condition``: one condition.
- ``known_model``: facts and commit of the model, kept in the status.
- ``pairs``: whether engines for prefill and for decode find each other.
- ``views``: numbers and states read from the pool's objects.
- ``referrers``: Gateways with routes of the user's own, by the status of the InferencePool.
- ``diagnosis``: why components do not run, the most urgent fault first.
- ``pod_diagnosis``: the fault of one pod, and its remedy.
- ``container_diagnosis``: the fault of one container, and the fields that remedies name.
- ``termination_message``: the last error of an engine, and the table of known errors.
- ``advice``: advice on a running pool.
- ``mesh``: advice on pods in a service mesh.
- ``reasons``: what each reason of a condition means, and what to do.
"""

from .condition import Condition
from .status_builder import Subject, status
from .views import ObservedPool, Trouble, plan_status

__all__ = ["Condition", "ObservedPool", "Subject", "Trouble", "plan_status", "status"]
