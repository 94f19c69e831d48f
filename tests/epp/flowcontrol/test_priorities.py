"""Priorities and tenants, as headers and flags have them."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvist_epp.errors import BadRequest, SettingsError
from kvist_epp.flowcontrol.priorities import (
    MAX_PRIORITY,
    MAX_TENANT,
    Priorities,
    engine_priority,
    named_priorities,
    tenant,
)
from kvist_epp.names import OBJECTIVE_HEADERS, PRIORITY_HEADER, TENANT_HEADERS


@given(st.integers(-MAX_PRIORITY, MAX_PRIORITY), st.sampled_from(["{}", " {}", "{:+}"]))
def test_any_whole_number_of_32_bits_is_a_priority(number: int, form: str) -> None:
    """A 32-bit priority survives formatting, and the engine receives it with the opposite sign."""
    found = Priorities().of({PRIORITY_HEADER: form.format(number)})
    assert found == number
    assert int(engine_priority(number)) == -number


@given(st.text(max_size=60))
@example("0\x1f")
@example(" 7\t")
def test_a_header_is_a_priority_or_refused(text: str) -> None:
    """Nothing else comes out of it, and the refusal quotes little of it."""
    found: int | str
    try:
        found = Priorities().of({PRIORITY_HEADER: text}) or 0
    except BadRequest as error:
        found = error.message

    assert len(found) < 400 if isinstance(found, str) else found == int(text)


def test_objectives_are_looked_up_flags_first() -> None:
    """A name of --priorities, else an object's; canonical header before alias; unknown ones are 0."""
    priorities = Priorities({"a": 3})
    priorities.objectives = {"a": 7, "b": -2}.get
    canonical, alias = OBJECTIVE_HEADERS

    assert [priorities.of({canonical: name}) for name in ("a", "b", "c", " b ", "")] == [3, -2, 0, -2, 0]
    assert (priorities.of({alias: "b"}), priorities.of({alias: "b", canonical: "a"})) == (-2, 3)
    assert priorities.of({}) is None


def test_a_tenant_is_named_by_either_header() -> None:
    """The canonical tenant header overrides the alias; an empty or missing one is the empty tenant; long ones
    are cut."""
    canonical, alias = TENANT_HEADERS
    assert tenant({alias: "b", canonical: "a"}) == "a"
    assert tenant({alias: "b", canonical: " "}) == "b"
    assert tenant({}) == ""
    assert len(tenant({alias: "x" * 5000})) == MAX_TENANT


def test_the_flag_reads_names_and_numbers() -> None:
    """Commas and spaces as one likes; a name may have an equals sign in it."""
    assert named_priorities(" interactive=10, batch = -1,, a=b=2 ") == {
        "interactive": 10,
        "batch": -1,
        "a=b": 2,
    }
    assert named_priorities("") == {}


@pytest.mark.parametrize("text", ["a", "a=", "=1", "a=x", "a=1.0", "a=1,a=2", "a=2147483648"])
def test_the_flag_names_what_is_wrong(text: str) -> None:
    """With the flag, the entry and an example."""
    with pytest.raises(SettingsError, match=r"--priorities: '.+'"):
        named_priorities(text)
