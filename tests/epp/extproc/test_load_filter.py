"""Bodies that keep an engine from loading KV blocks of slow tiers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.extproc.load_filter import without_loads

STORAGE, CPU = {"medium": "STORAGE"}, {"medium": "CPU"}


@pytest.mark.parametrize(
    ("media", "allowed"),
    [
        (["STORAGE"], [CPU]),
        (["SHARED"], [CPU]),
        (["CPU", "SHARED"], []),
        (["CPU"], [STORAGE]),
        (["NEW"], [CPU, STORAGE]),
    ],
)
def test_all_other_tiers_stay_allowed(media: list[str], allowed: list[dict[str, str]]) -> None:
    """The engine gets the tiers that it may load from; none is an empty list, which vLLM takes for none."""
    body = without_loads(b'{"model":"m","prompt":"a"}', media)

    assert body is not None
    assert json.loads(body) == {
        "model": "m",
        "prompt": "a",
        "kv_transfer_params": {"kv_load_tiers": allowed},
    }


@given(st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.text())), st.booleans())
def test_the_rest_of_the_body_stays_as_it_is(body: dict[str, object], spaced: bool) -> None:
    """Byte for byte, whatever the client has sent and however it has written it."""
    text = json.dumps(body, indent=2 if spaced else None).encode()
    changed = without_loads(text, ["CPU"])

    assert changed is not None
    assert changed.endswith(text[1:])
    assert json.loads(changed) == {"kv_transfer_params": {"kv_load_tiers": [STORAGE]}} | body


@pytest.mark.parametrize("body", [b"", b"[]", b"no json", b'{"a":1', b'{"kv_transfer_params":null}'])
def test_other_bodies_are_left_alone(body: bytes) -> None:
    """Bodies stay as they are if they are no JSON object, or have parameters of KV transfer already."""
    assert without_loads(body, ["STORAGE"]) is None
