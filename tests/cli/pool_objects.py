"""InferencePools with the status that the operator writes, for tests of ``kvist why`` and ``kvist pools``."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from tests.crd.cases import planned
from tests.operator import golden
from tests.operator.manifested import rendered, resource

from kvist_operator.errors import OperatorError
from kvist_operator.spec import read_pool
from kvist_operator.status import ObservedPool, Subject, Trouble, status

Json = dict[str, Any]
NOW: Final = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
REFUSED: Final = {
    "status": "False",
    "reason": "DoesNotFit",
    "message": "8192 tokens lack 28.3 GiB on each GPU",
}
"""Parts of a condition Accepted of a new spec that does not fit."""


def workload(wanted: int = 2, **counts: int) -> Json:
    """Return a Deployment; by default all its replicas are ready."""
    made = {"replicas": wanted, "readyReplicas": wanted, "updatedReplicas": wanted, "observedGeneration": 5}
    return {
        "kind": "Deployment",
        "metadata": {"name": "twig", "generation": 5},
        "spec": {"replicas": wanted},
        "status": made | counts,
    }


WELL: Final = ObservedPool(workload=workload(), picker=workload(), envoy=workload())


def unready() -> ObservedPool:
    """Return a pool whose second engine cannot pull its image, with advice about the first."""
    return replace(
        WELL,
        workload=workload(updatedReplicas=1, readyReplicas=1),
        troubles=[Trouble("ImagePull", "pod twig-5d9c7b9f4-x7k2p: pull access denied for acme/vllm")],
        kv_tokens=140_000,
        advice=("Preemptions: 3 % of requests lost their cache. Set spec.engine.maxNumSeqs to 128.",),
    )


def pool(
    case: str, observed: ObservedPool, *, error: OperatorError | None = None, refused: bool = False
) -> Json:
    """Return a pool of tests/crd/valid with the status of what was observed; ``refused``: with a plan that
    does not fit."""
    found: Json = json.loads(json.dumps(resource(case)))
    plan = golden.made("llama-405b-a10-refused") if refused else None if error else planned(found)
    subject = Subject(
        name=found["metadata"]["name"],
        generation=3,
        pool=None if error else read_pool(found),
        plan=plan,
        error=error,
        notes=[] if error or refused else rendered(case).notes,
    )
    observed = replace(observed, workload=None) if refused else observed
    found["metadata"]["generation"] = 3
    found["status"] = json.loads(json.dumps(status(subject, observed, {}, NOW)))
    return found
