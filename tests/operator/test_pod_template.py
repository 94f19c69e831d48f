"""Promises of ``spec.podTemplate``: fields are those of Kubernetes, misspellings are found, patches pass."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator import pod_fields
from tests.operator.manifested import CASES, rendered

from kvist_operator.spec.pod_template import FILE, PATH, check_template, problems, remarks


def test_the_table_of_fields_is_that_of_kubernetes() -> None:
    """The file is what the generator writes."""
    assert pod_fields.FILE.name == FILE
    assert pod_fields.FILE.read_text() == pod_fields.text()


@pytest.mark.parametrize("case", CASES)
def test_every_rendered_pod_is_a_pod(case: str) -> None:
    """The pods of the operator itself have no problem, so the table is complete for them."""
    templates = [made["spec"]["template"] for made in rendered(case).objects if made["kind"] == "Deployment"]

    assert [list(problems(template)) for template in templates] == [[] for _ in templates]


@pytest.mark.parametrize(
    "spec",
    [
        {"nodeSelector": None},
        {"containers": [{"name": "engine", "env": [{"name": "A", "$patch": "delete"}]}]},
        {"containers": [{"name": "sidecar", "image": "a:1", "resources": {"limits": {"cpu": 1}}}]},
        {"volumes": [{"name": "a", "emptyDir": {"sizeLimit": "1Gi"}}]},
        {"tolerations": [{"$patch": "replace"}]},
        {"containers": [{"name": "engine", "livenessProbe": {"httpGet": {"port": "http"}}}]},
        {"securityContext": {"runAsUser": 1000, "sysctls": []}},
    ],
)
def test_patches_pass(spec: dict[str, Any]) -> None:
    """Nulls, directives of a strategic merge, sidecars and valid values have no problem."""
    assert list(problems({"spec": spec})) == []


@pytest.mark.parametrize(
    ("spec", "path", "said"),
    [
        ({"containers": [{"name": "engine", "envv": []}]}, "containers[0].envv", "did you mean env?"),
        ({"containers": {"name": "engine"}}, "containers", "is an object, not a list"),
        ({"containers": ["engine"]}, "containers[0]", "is a string, not an object"),
        ({"hostNetwork": "yes"}, "hostNetwork", "is a string, not a boolean"),
        ({"priority": "high"}, "priority", "is a string, not a whole number"),
        ({"priority": True}, "priority", "is a boolean, not a whole number"),
        ({"initContainers": [{"name": "a"}]}, "initContainers[0].image", "is missing"),
        ({"volumes": [{"name": "a", "hostpath": {}}]}, "volumes[0].hostpath", "did you mean hostPath?"),
    ],
)
def test_a_mistake_has_its_path(spec: dict[str, Any], path: str, said: str) -> None:
    """The first problem names the field down to the item of a list."""
    [first, *_] = problems({"spec": spec})

    assert first.path == f"{PATH}.spec.{path}"
    assert said in first.text
    assert first.certain


def test_a_field_that_resembles_none_is_no_error() -> None:
    """A newer Kubernetes may have it: it is a remark, and the pool is read."""
    template = {"spec": {"quantumLink": 1}}
    check_template(template)

    assert remarks(template)[0].startswith("spec.podTemplate.spec.quantumLink: is not a field of pods")


NAMES = st.sampled_from(
    ["spec", "containers", "name", "env", "resources", "limits", "$patch", "odd", "volumes"]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(NAMES, below, max_size=4),
    max_leaves=20,
)


@given(st.fixed_dictionaries({}, optional={"spec": st.dictionaries(NAMES, ANYTHING, max_size=4)}))
def test_any_overlay_is_judged(template: dict[str, Any]) -> None:
    """Whatever a user writes has problems or none, each with its path; nothing else is raised."""
    for problem in problems(template):
        assert problem.path.startswith(PATH)
        assert problem.text
