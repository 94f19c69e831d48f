"""Promises of the comparison: one field changed, every fact that differs shown."""

import pytest
from tests.operator.pools import known, resource

from kvist_operator.errors import SpecError
from kvist_operator.plan import make_plan
from kvist_operator.plan.plan import differences, override
from kvist_operator.spec import read_pool


def test_one_field_is_changed_and_nothing_else() -> None:
    """The value is YAML; the original stays as it was."""
    before = resource(engine={"maxNumSeqs": 64})
    after = override(before, ["engine.kvCacheDtype=Model", "spec.workload.concurrency=4"])

    assert after["spec"]["engine"] == {"maxNumSeqs": 64, "kvCacheDtype": "Model"}
    assert after["spec"]["workload"] == {"concurrency": 4}
    assert before == resource(engine={"maxNumSeqs": 64})


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("engine.kvCacheDtype", "write it like engine.kvCacheDtype=Model"),
        ("model.source.deeper=1", "is not a field"),
    ],
)
def test_what_is_no_assignment_is_refused(assignment: str, said: str) -> None:
    """With an example, or where it leads."""
    with pytest.raises(SpecError, match=said):
        override(resource(), [assignment])


def test_the_differences_are_the_facts_that_changed() -> None:
    """Twice the bytes a token, half the tokens, another backend, a flag less."""
    first, second = (
        make_plan(read_pool(override(resource(), with_)), known("Qwen/Qwen3-8B"), gpu="H100")
        for with_ in ([], ["engine.kvCacheDtype=Model"])
    )
    found = {d.field: (d.before, d.after) for d in differences(first, second)}

    assert found["memory.kv_bytes_per_token"] == (73_728, 147_456)
    assert found["--kv-cache-dtype"] == ("fp8", None)
    assert found["choice.kvCacheDtype"] == ("fp8", "bfloat16")
    assert "memory.weights_gib" not in found
    assert differences(first, first) == []
