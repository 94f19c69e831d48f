"""(Pool, plan or error, observed, old, now) → status. ``make`` puts it together, ``conditions`` keeps their
rules, ``judged`` says what each condition is, ``views`` reads numbers off objects. Pure."""

from .conditions import Condition
from .make import Subject, status
from .views import Observed, Trouble, plan_status

__all__ = ["Condition", "Observed", "Subject", "Trouble", "plan_status", "status"]
