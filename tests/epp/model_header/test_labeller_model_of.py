"""A body's model: found as engines find it, and used only where a header can carry it."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvist_epp.model_header.labeller import MAX_NAME_BYTES, header_value, model_of

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.just("model"), inner, max_size=4)
    ),
    max_leaves=20,
)
OBJECTS = st.dictionaries(
    st.sampled_from(["model", "Model", "models", '"model"', "messages"]) | st.text(), VALUES
)


def same(found: object, expected: object) -> bool:
    """Equal, NaN being equal to itself."""
    return repr(found) == repr(expected)


@given(OBJECTS, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_the_model_is_what_an_engine_reads(document: dict[str, Any], ascii_only: bool, indent: Any) -> None:
    """For any JSON object, nested and spaced at will, it is the value of its own ``model``."""
    body = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode(errors="surrogatepass")
    try:
        expected = json.loads(body).get("model")
    except UnicodeDecodeError:  # half a surrogate pair in UTF-8 is no JSON
        return
    assert same(model_of(body), expected)


@given(
    st.lists(st.tuples(st.sampled_from(["model", "mod\\u0065l", "\\u006dodel", "n"]), SCALARS), min_size=1)
)
def test_the_last_of_two_keys_counts(pairs: list[tuple[str, Any]]) -> None:
    """However a key is spelled, the last one is the one that engines obey: no second one can be hidden."""
    body = ("{" + ",".join(f'"{key}":{json.dumps(value)}' for key, value in pairs) + "}").encode()
    assert same(model_of(body), json.loads(body).get("model"))


@given(st.binary() | st.text().map(str.encode) | VALUES.map(lambda v: json.dumps(v).encode()))
@example(b'{"model":"a"')
@example(b'{"model":"a"} {}')
@example(b"\xff\xfe{\x00")
@example(b'{"model":"m","x":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}")
@example(b'--boundary\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n')
def test_what_is_no_object_has_no_model(body: bytes) -> None:
    """Nothing raises, and what Python's ``json`` does not take for an object has no model."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    expected = document.get("model") if isinstance(document, dict) else None
    assert same(model_of(body), expected)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_other_encodings_are_read(encoding: str) -> None:
    """UTF-16 and UTF-32, which engines take, are taken here too."""
    assert model_of('{"model": "qwen-ü"}'.encode(encoding)) == "qwen-ü"


@given(st.text())
@example("a\r\nx-admin: yes")
@example("a\x00")
@example("\x7f")
@example(" a")
@example("a\u2003")
@example("\ud800")
@example("モデル")
def test_a_header_says_the_name_unchanged_or_nothing(name: str) -> None:
    """No name ends a header or changes on its way; any other arrives as UTF-8."""
    value = header_value(name)
    if value is None:
        return
    assert value.encode("latin-1").decode() == name
    assert value == value.strip(" \t")
    assert not any(character < " " or character == "\x7f" for character in value)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-32B", "a b", "org:model@sha256=1", "é", "x" * MAX_NAME_BYTES])
def test_usual_names_can_be_used(name: str) -> None:
    """Names as they occur go into the header."""
    assert header_value(name) == name.encode().decode("latin-1")


@pytest.mark.parametrize("name", [None, 7, ["m"], {"model": "m"}, "", "x" * (MAX_NAME_BYTES + 1)])
def test_other_values_are_refused(name: object) -> None:
    """A value that is not a string, empty, or too long for a header is not used."""
    assert header_value(name) is None
