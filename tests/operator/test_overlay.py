"""Promises of the overlay: kubectl's strategic merge, as far as pods go."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvist_operator.manifests.overlays import merged

BASE: dict[str, Any] = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "securityContext": {"runAsUser": 2000, "runAsNonRoot": True},
        "tolerations": [{"key": "gpu"}],
        "containers": [
            {"name": "engine", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
        ],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    },
}


def over(**spec: Any) -> dict[str, Any]:
    """The pod's spec under this overlay."""
    found: dict[str, Any] = merged(BASE, {"spec": spec})["spec"]
    return found


def test_lists_of_named_things_are_merged_by_name() -> None:
    """Containers and variables are merged by name; new ones are appended."""
    found = over(
        containers=[
            {"name": "engine", "env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]},
            {"name": "sidecar", "image": "x"},
        ]
    )["containers"]

    assert found == [
        {
            "name": "engine",
            "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}, {"name": "C", "value": "4"}],
        },
        {"name": "sidecar", "image": "x"},
    ]


def test_other_lists_are_replaced() -> None:
    """Lists without a key in the API's types, such as tolerations, are replaced."""
    assert over(tolerations=[{"key": "mine"}])["tolerations"] == [{"key": "mine"}]


def test_null_takes_away() -> None:
    """A null removes a field, which OpenShift needs because it assigns the users of pods."""
    assert over(securityContext={"runAsUser": None})["securityContext"] == {"runAsNonRoot": True}
    assert "securityContext" not in over(securityContext=None)


def test_a_volume_of_another_kind_needs_the_first_to_be_taken_away() -> None:
    """The fields of a volume are merged; ``emptyDir: null`` removes the old source."""
    claim = {"claimName": "fast"}
    found = over(volumes=[{"name": "shm", "emptyDir": None, "persistentVolumeClaim": claim}])["volumes"]

    assert found == [{"name": "shm", "persistentVolumeClaim": claim}]


def test_directives() -> None:
    """``$patch: delete`` removes an item, and ``$patch: replace`` removes what was there before."""
    assert over(volumes=[{"name": "shm", "$patch": "delete"}])["volumes"] == []
    assert over(volumes=[{"name": "gone", "$patch": "delete"}])["volumes"] == BASE["spec"]["volumes"]
    assert over(volumes=[{"$patch": "replace"}, {"name": "x"}])["volumes"] == [{"name": "x"}]
    assert over(securityContext={"$patch": "replace", "runAsUser": 1})["securityContext"] == {"runAsUser": 1}


def test_nothing_is_changed_in_place() -> None:
    """Merging modifies neither base nor overlay."""
    before = repr(BASE)
    over(containers=[{"name": "engine", "env": [{"name": "A", "value": "9"}]}], volumes=None)

    assert repr(BASE) == before


NAMES = st.sampled_from("abc")
LEAF = st.integers(0, 3) | st.text("xy", max_size=2)
TREE = st.recursive(
    LEAF,
    lambda below: (
        st.dictionaries(NAMES, below, max_size=3)
        | st.fixed_dictionaries(
            {"env": st.lists(st.fixed_dictionaries({"name": NAMES, "v": below}), max_size=3)}
        )
    ),
    max_leaves=8,
)


def unique(value: Any) -> Any:
    """Lists without two items of one name, as the API wants them."""
    if isinstance(value, dict):
        return {k: unique(v) for k, v in value.items()}
    if isinstance(value, list):
        return [unique(item) for item in {item["name"]: item for item in value}.values()]
    return value


@given(TREE.map(unique), TREE.map(unique))
def test_merging_is_idempotent_and_says_what_the_overlay_says(base: Any, patch: Any) -> None:
    """Merging twice equals merging once; an empty overlay changes nothing; an overlay on nothing is
    itself."""
    once = merged(base, patch)

    assert merged(once, patch) == once
    if isinstance(base, dict):
        assert merged(base, {}) == base
    assert merged(None, patch) == patch


def test_what_is_not_there_cannot_be_deleted() -> None:
    """A directive for an item of a list that is absent, or empty, adds nothing."""
    gone = {"name": "x", "$patch": "delete"}

    assert over(initContainers=[gone])["initContainers"] == []
    assert over(imagePullSecrets=[gone, {"name": "y"}])["imagePullSecrets"] == [{"name": "y"}]


def test_an_object_is_deleted_by_its_directive() -> None:
    """A directive in an object of the base removes it, as null does; merging is what happens anyway."""
    assert "securityContext" not in over(securityContext={"$patch": "delete"})
    assert over(initContainers=[{"name": "x", "$patch": "merge"}])["initContainers"] == [{"name": "x"}]
