"""The five dashboards.

- ``pool``: one pool at a glance.
- ``endpoint``: its endpoints side by side.
- ``picker``: its pickers.
- ``engine``: its engines, by vLLM's metrics.
- ``operators``: the operator, and what it made of its pools.
"""

from typing import Final

from monitoring.dashboards.endpoint import ENDPOINT
from monitoring.dashboards.engine import ENGINE
from monitoring.dashboards.operators import OPERATOR
from monitoring.dashboards.picker import PICKER
from monitoring.dashboards.pool import POOL
from monitoring.panels import Dashboard

DASHBOARDS: Final[tuple[Dashboard, ...]] = (POOL, ENDPOINT, PICKER, ENGINE, OPERATOR)
