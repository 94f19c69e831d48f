"""The argument lists of plans for every model of the catalogue on accelerators that take turns."""

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from tests.operator.pools import known, pool

from kvist_operator.errors import OperatorError
from kvist_operator.hardware import CPU, ROWS
from kvist_operator.models.catalogue import catalogue
from kvist_operator.plan import make_plan
from kvist_operator.plan.engine_args import LEADER, RANK

COMMON: Final = "H100-80GB"
"""Accelerator of the further variants."""
SOME: Final = 4
"""Each fourth model has the further variants, since a plan takes up to a tenth of a second."""
PLAIN: Final[dict[str, Any]] = {}
VARIANTS: Final[tuple[dict[str, Any], ...]] = (
    PLAIN,
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
FURTHER: Final[tuple[dict[str, Any], ...]] = (
    {"workload": {"concurrency": 512}},
    {"engine": {"speculative": {"method": "MTP", "tokens": 1}, "quantization": "FP8"}},
    {"engine": {"tensorParallelSize": 8, "decodeContextParallelSize": 2, "pipelineParallelSize": 2}},
    {"engine": {"speculative": {"method": "Suffix", "tokens": 8}, "extraArgs": ["-ep", "--seed=1"]}},
)
"""Pools of which the plans span nodes, or spread caches and experts."""


@cache
def argument_lists(step: int = 4) -> tuple[tuple[str, ...], ...]:
    """Return the different lists after ``serve``, with the variables that Kubernetes would fill in; ``step``:
    for each model only each so many-th accelerator, another one to begin with than for the model before."""
    return tuple(dict.fromkeys(_all(step)))


def _all(step: int) -> Iterator[tuple[str, ...]]:
    filled = {RANK: "0", LEADER: "127.0.0.1"}
    for number, name in enumerate(sorted(catalogue())):
        stretched = {"engine": {"maxModelLen": 2 * known(name).shape.max_len}}
        usual = COMMON, CPU.name
        for row in [row for i, row in enumerate(ROWS) if (i + number) % step == 0 or row.name in usual]:
            for variant in (
                *VARIANTS,
                *((*FURTHER, stretched) if row.name == COMMON and number % SOME == 0 else ()),
            ):
                spec = {**variant, "accelerator": {"memory": "64Gi"}} if row.vendor == "cpu" else variant
                try:
                    found = make_plan(pool(f"hf://{name}", **spec), known(name), gpu=row.name)
                except OperatorError:
                    continue  # fields that do not go together on this accelerator
                if found.argv:
                    yield tuple(filled.get(word, word) for word in found.argv[1:])
