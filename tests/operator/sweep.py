"""The argument lists of plans for every model of the catalogue on every accelerator."""

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from tests.operator.pools import known, pool

from kvist_operator.errors import OperatorError
from kvist_operator.hardware import ROWS
from kvist_operator.models.source import catalogue
from kvist_operator.plan import make_plan
from kvist_operator.plan.engine_args import LEADER, RANK

VARIANTS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {
        "model": {"revision": "main", "adapters": [{"name": "sql", "source": "hf://acme/sql", "rank": 64}]},
        "engine": {
            "prefixCaching": "Disabled",
            "schedulingPolicy": "Priority",
            "speculative": {"method": "NGram", "tokens": 2},
            "attentionBackend": "FLASHINFER",
            "kvCacheDtype": "Model",
        },
        "workload": {"imagesPerRequest": 0},
        "offload": {"cpu": "8Gi", "disk": "64Gi"},
    },
)
"""A plain pool, and one whose fields set most of the other flags."""


@cache
def argument_lists() -> tuple[tuple[str, ...], ...]:
    """Return the different lists after ``serve``, with the variables that Kubernetes would fill in."""
    return tuple(dict.fromkeys(_all()))


def _all() -> Iterator[tuple[str, ...]]:
    filled = {RANK: "0", LEADER: "127.0.0.1"}
    for name in sorted(catalogue()):
        for row in ROWS:
            for variant in VARIANTS:
                spec = {**variant, "accelerator": {"memory": "64Gi"}} if row.vendor == "cpu" else variant
                try:
                    found = make_plan(pool(f"hf://{name}", **spec), known(name), gpu=row.name)
                except OperatorError:
                    continue  # fields that do not go together on this accelerator
                if found.argv:
                    yield tuple(filled.get(word, word) for word in found.argv[1:])
