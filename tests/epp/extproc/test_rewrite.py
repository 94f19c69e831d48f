"""The model's name in a request and in a response: nothing else changes."""

import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvist_epp.extproc.rewrite import ModelNameRestorer, rename_model, requested_model

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
KEYS = st.sampled_from(["model", "Model", "models", "a", '"model"', "mo\\del", 'x": {"model'])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | KEYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(), inner, max_size=4),
    max_leaves=12,
)
STYLES: list[dict[str, Any]] = [
    {},
    {"separators": (",", ":")},
    {"indent": 3},
    {"ensure_ascii": False},
    {"separators": (" , ", "\t:\r\n")},
]


def _encoded(document: Any, **style: Any) -> bytes:
    return json.dumps(document, **style).encode(errors="surrogatepass")


@given(st.dictionaries(KEYS | st.text(), VALUES), VALUES, NAMES, st.sampled_from(STYLES))
def test_only_the_model_changes(
    document: dict[str, Any], model: Any, name: str, style: dict[str, Any]
) -> None:
    """After a rewrite the document is the same but for its top-level model, whatever else is in it."""
    document |= {"model": model}

    found = rename_model(_encoded(document, **style), name)

    assert found is not None
    assert json.loads(found.body) == document | {"model": name}
    assert found.client == (model if isinstance(model, str) else None)


@given(st.dictionaries(KEYS.filter(lambda key: key != "model") | st.just("a"), VALUES), NAMES)
def test_a_document_without_a_model_is_left_alone(document: dict[str, Any], name: str) -> None:
    """Nested models and texts that look like one are no model of the request."""
    assert rename_model(_encoded(document), name) is None


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b'{"model":"a","model" : "b"}', b'{"model":"n","model" : "n"}'),
        (b' {\n"x":1 ,"model"\t:\r\n"a\\"b" }\n', b' {\n"x":1 ,"model"\t:\r\n"n" }\n'),
        (b'{"mod\\u0065l":"a"}', b'{"mod\\u0065l":"n"}'),
        (b'{"m":{"model":"a"},"l":[{"model":"b"}],"model":"c"}', None),
        (b'{"model":{"model":["a"]},"x":{"y":{}}}', b'{"model":"n","x":{"y":{}}}'),
        (b'{"t":NaN,"model":"a"}', b'{"t":NaN,"model":"n"}'),
        (b'\xef\xbb\xbf{"model":"a"}', b'{"model":"n"}'),
        ('{"model":"ä"}'.encode("utf-16"), b'{"model":"n"}'),
    ],
)
def test_bytes_around_the_name_stay(body: bytes, wanted: bytes | None) -> None:
    """Spaces, escapes, duplicates and lax numbers arrive as they were sent; other encodings become UTF-8."""
    found = rename_model(body, "n")

    assert found is not None
    assert found.body == (wanted or body.replace(b'"c"', b'"n"'))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"GIF89a",
        b'"model"',
        b'["model","a"]',
        b'{"model":"a"',
        b'{"model":',
        b'--x\r\nname="model"\r\n{"model":"a"}\r\n--x--',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b',"model":"a"}',
        b"\xff\xfe\x00",
    ],
    ids=range(10),
)
def test_what_is_no_object_is_left_alone(body: bytes) -> None:
    """Other bodies, cut ones and ones nested without end pass as they are."""
    assert rename_model(body, "n") is None


@given(st.binary())
@example(b'{"\\q":1,"model":"a"}')
@example(b'{"model":"\xff"}')
@example(b'{"model":"\\ud800"}')
@example(b'{"model":"a"}}')
def test_arbitrary_bytes_raise_nothing(body: bytes) -> None:
    """Whatever a client sends, a rewrite is made or it is not."""
    rename_model(body, "n")
    rename_model(b'{"model":"a","b":' + body + b"}", "n")


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({}, ""),
        ({"x-llm-d-model-name-rewrite": "a", "x-gateway-model-name-rewrite": "b"}, "a"),
        ({"x-gateway-model-name-rewrite": " b "}, "b"),
        ({"x-llm-d-model-name-rewrite": "", "x-gateway-model-name-rewrite": "b"}, "b"),
        ({"x-llm-d-model-name-rewrite": "ä".encode().decode("latin-1")}, "ä"),
    ],
)
def test_the_header_that_asks(headers: dict[str, str], name: str) -> None:
    """The canonical name wins over its alias; header bytes are UTF-8."""
    assert requested_model(headers) == name


RESPONSES = [
    b'{"id":"x","model":"engine/lora-1","choices":[{"message":{"content":"\\"model\\":\\"engine/lora-1\\""}}]}',
    b'data: {"model": "engine/lora-1"}\n\ndata: {"model": "engine/lora-1", "x": "mod"}\n\ndata: [DONE]\n\n',
    b'event: a\ndata: {"response":{"model":"engine/lora-1"},"model":"another"}\n\n{"model":"engine/lora-1',
    b'{"model":{"model":"engine/lora-1"},"models":"engine/lora-1","a":"model","engine/lora-1":"model"}',
]


@pytest.mark.parametrize("response", RESPONSES)
def test_a_response_cut_anywhere_is_written_back(response: bytes) -> None:
    """Cut in two at any byte, or into single bytes, the engine's name becomes the client's and no byte is
    lost."""
    wanted = re.sub(rb'("model": ?)"engine/lora-1"', rb'\1"my \\"model\\""', response)
    cuts = [[response[:at], response[at:]] for at in range(len(response) + 1)]
    for chunks in [*cuts, [response[i : i + 1] for i in range(len(response))]]:
        back = ModelNameRestorer("engine/lora-1", 'my "model"')
        out = [back.feed(chunk) for chunk in chunks]
        assert b"".join((*out, back.feed(b"", last=True))) == wanted


@given(
    st.lists(st.sampled_from([b'"mo', b'del"', b":", b" ", b'"e"', b'"', b"x", b'"model":"e"']), max_size=12)
)
def test_pieces_of_a_name_are_neither_lost_nor_kept(pieces: list[bytes]) -> None:
    """However a stream is made of parts of the pattern, the outcome is that of the whole, and little is
    kept."""
    back = ModelNameRestorer("e", "client")
    whole = b"".join(pieces)
    out = []
    for fed, piece in enumerate(pieces, 1):
        out.append(back.feed(piece))
        assert sum(map(len, pieces[:fed])) - len(b"".join(out)) < len(b'"model" : "e"')
    out.append(back.feed(b"", last=True))

    assert b"".join(out) == re.sub(rb'("model" ?: ?)"e"', rb'\1"client"', whole)


def test_names_beyond_ascii_are_found_in_both_forms() -> None:
    """Engines write such names raw or escaped."""
    back = ModelNameRestorer("größe", "m")
    text = '{"model":"größe"}'.encode() + json.dumps({"model": "größe"}).encode()

    assert back.feed(text, last=True) == b'{"model":"m"}{"model": "m"}'
