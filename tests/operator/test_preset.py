"""Presets: fields that a pool leaves to an InferencePoolPreset."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_operator.errors import SpecError
from kvist_operator.models.source import model_facts
from kvist_operator.plan import make_plan
from kvist_operator.spec import Pool, read_pool
from kvist_operator.spec.preset import preset_name, with_preset

Json = dict[str, Any]
API = "kvist.dev/v1alpha1"
MODEL = {"source": "hf://Qwen/Qwen3-8B"}
H100 = {
    "accelerator": {"product": "H100-80GB"},
    "engine": {"image": "registry/vllm:v0.32.0", "maxModelLen": 16_384, "env": [{"name": "A", "value": "1"}]},
    "rollout": {"upgrade": "Automatic"},
    "podTemplate": {"spec": {"nodeSelector": {"pool": "gpu"}, "priorityClassName": "serving"}},
}


def pool(**spec: Any) -> Json:
    """Return a pool that refers to the preset."""
    meta = {"name": "twig", "namespace": "forest"}
    made = {"model": MODEL, "presetRef": {"name": "h100"}, **spec}
    return {"apiVersion": API, "kind": "InferencePool", "metadata": meta, "spec": made}


def preset(spec: Any, namespace: str = "kvist-system") -> Json:
    """Return the preset."""
    meta = {"name": "h100", "namespace": namespace, "generation": 3}
    return {"apiVersion": API, "kind": "InferencePoolPreset", "metadata": meta, "spec": spec}


def read(spec: Any = H100, **own: Any) -> Pool:
    """Return the pool with these fields of its own."""
    return read_pool(pool(**own), preset=preset(spec))


def test_fields_that_the_pool_leaves_out_are_those_of_the_preset() -> None:
    """Accelerator, image and policy are written once; the pool has the model."""
    found = read()

    assert found.accelerator.product == "H100-80GB"
    assert (found.engine.image, found.engine.max_model_len) == ("registry/vllm:v0.32.0", 16_384)
    assert found.rollout.upgrade == "Automatic"
    assert found.pod_template["spec"]["priorityClassName"] == "serving"


def test_fields_of_the_pool_win() -> None:
    """Objects are merged field by field; values and lists of the pool replace those of the preset."""
    found = read(
        engine={"maxModelLen": 8192, "env": [{"name": "B", "value": "2"}]},
        podTemplate={"spec": {"nodeSelector": {"zone": "a"}}},
    )

    assert (found.engine.image, found.engine.max_model_len) == ("registry/vllm:v0.32.0", 8192)
    assert [entry["name"] for entry in found.engine.env] == ["B"]
    assert found.pod_template["spec"]["nodeSelector"] == {"pool": "gpu", "zone": "a"}


def test_null_leaves_a_field_to_the_plan() -> None:
    """A pool without a fixed context gets rid of the preset's by null."""
    assert read(engine={"maxModelLen": None}).engine.max_model_len is None


def test_the_plan_names_the_fields_of_the_preset() -> None:
    """The first choice of the plan has the preset and each field that is its own."""
    found = read(engine={"maxModelLen": 8192})
    first = make_plan(found, model_facts(found.model)).choices[0]

    assert (first.field, first.value) == ("preset", "kvist-system/h100")
    assert "spec.engine.image" in first.reason
    assert "spec.rollout.upgrade" in first.reason
    assert "maxModelLen" not in first.reason


@pytest.mark.parametrize(
    ("spec", "own", "said"),
    [
        ({"replicas": 2}, {}, "preset h100: spec.replicas: is not a part of presets: write one of"),
        ({"model": {"source": "hf://a/b"}}, {}, "preset h100: spec.model.source: is not a part of presets"),
        (["engine"], {}, "preset h100: spec: is not an object"),
        ({"engine": {"maxNumSeqs": 0}}, {}, "preset kvist-system/h100: spec.engine.maxNumSeqs: 0 is not"),
        ({"engine": "fast"}, {}, "preset kvist-system/h100: spec.engine: is a string, not an object"),
        ({}, {"engine": {"maxNumSeqs": 0}}, "spec.engine.maxNumSeqs: 0 is not within"),
        ({}, {"presetRef": "h100"}, "spec.presetRef: is a string, not an object"),
        ({}, {"presetRef": {}}, "spec.presetRef.name: is missing"),
        ({}, {"presetRef": {"name": "h100", "namespace": "a"}}, "spec.presetRef.namespace"),
    ],
)
def test_errors_say_whose_field_it_is(spec: Any, own: Any, said: str) -> None:
    """A bad field of a preset is named with the preset, one of the pool without it."""
    with pytest.raises(SpecError) as caught:
        read(spec, **own)

    assert str(caught.value).startswith(said)


def test_a_preset_that_is_not_there_is_named() -> None:
    """Without the preset the pool is not planned with half of its fields."""
    with pytest.raises(SpecError, match=r"spec\.presetRef: there is no InferencePoolPreset h100: create it"):
        read_pool(pool())


keys = st.sampled_from(["a", "b", "c"])
trees = st.recursive(
    st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=2), lambda inner: st.dictionaries(keys, inner)
)
sections = st.dictionaries(
    st.sampled_from(["engine", "workload", "podTemplate"]), st.dictionaries(keys, trees)
)


@given(own=sections, defaults=sections)
def test_a_merge_loses_nothing_of_the_pool(own: Json, defaults: Json) -> None:
    """Fields of the pool are found again at their place, and every other value is the preset's."""
    merged, used = with_preset({"spec": own}, preset(defaults))

    def check(part: Any, whole: Any) -> None:
        if isinstance(part, dict) and isinstance(whole, dict):
            for key, value in part.items():
                check(value, whole[key])
        else:
            assert part == whole

    check(own, merged["spec"])
    for path in used.fields:
        at, there = merged["spec"], defaults
        for step in path.split(".")[1:]:
            at, there = at[step], there[step]
        assert at == there
    assert with_preset({"spec": own}, preset({}))[0]["spec"] == own
    assert with_preset(merged, preset(defaults))[0]["spec"] == merged["spec"]


def test_only_a_whole_reference_names_a_preset() -> None:
    """Anything else is no name, and the reader says what is wrong with it."""
    assert preset_name(pool()) == "h100"
    specs: list[Any] = [None, {}, {"presetRef": "a"}, {"presetRef": {}}]
    for spec in specs:
        assert preset_name({"spec": spec}) == ""
