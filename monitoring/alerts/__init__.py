"""Every alert and recording rule.

- ``cache``: use of the engines' KV cache, preemptions, hit rate.
- ``latency``: time to the first token, time per output token.
- ``pickers``: whether pickers run, what they refuse, and endpoints.
- ``accuracy``: what pickers know, certificates, the gateway.
- ``operators``: the operator.
"""

from typing import Final

from monitoring.alerts.accuracy import ACCURACY
from monitoring.alerts.cache import CACHE
from monitoring.alerts.latency import LATENCY
from monitoring.alerts.operators import OPERATORS
from monitoring.alerts.pickers import PICKERS
from monitoring.rules import Group

GROUPS: Final[tuple[Group, ...]] = (CACHE, LATENCY, PICKERS, ACCURACY, OPERATORS)
