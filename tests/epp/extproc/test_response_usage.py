"""Token counts of responses, however they are cut into chunks."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.extproc.response import MAX_USAGE_BYTES, Usage, UsageReader

CHAT = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
STREAM = (
    b'data: {"choices":[{"delta":{"content":"the \\"usage\\": {\\"prompt_tokens\\": 1}"}}],"usage":null}\n\n'
    b'data: {"choices":[],"usage" : ' + json.dumps(CHAT).encode() + b"}\n\ndata: [DONE]\n\n"
)
RESPONSES = (
    b'event: response.completed\ndata: {"response":{"usage":{"input_tokens":9,"input_tokens_details":'
    b'{"cached_tokens":8,"per_turn":[1,{"a":{}}]},"output_tokens":3}}}\n\n'
)
ANTHROPIC = (
    b'data: {"type":"message_start","message":{"usage":{"input_tokens":9,"output_tokens":0,'
    b'"cache_read_input_tokens":8}}}\n\ndata: {"type":"message_delta","usage":{"output_tokens":3}}\n\n'
)
DOCUMENT = json.dumps({"usage": "usage", "choices": ["usage", {"text": '"usage":{}'}], "x": 1}).encode()[:-1]
WHOLE = DOCUMENT + b',"usage":' + json.dumps(CHAT, indent=1).encode() + b"}"


def _read(*chunks: bytes) -> Usage:
    reader = UsageReader()
    for chunk in chunks:
        reader.feed(chunk)
    return reader.usage


@pytest.mark.parametrize(
    "text", [STREAM, RESPONSES, ANTHROPIC, WHOLE], ids=["sse", "responses", "anthropic", "json"]
)
def test_usage_is_read_wherever_it_is_cut(text: bytes) -> None:
    """Every dialect gives the same counts, whether cut in two at any byte or into single bytes."""
    cuts = [(text[:at], text[at:]) for at in range(len(text) + 1)]
    single = tuple(text[i : i + 1] for i in range(len(text)))

    assert {str(_read(*chunks)) for chunks in (*cuts, single)} == {str(Usage(9, 3, 8))}


@given(
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.none() | st.integers(0, 10**9),
    st.text(),
    st.sampled_from([None, (",", ":")]),
    st.data(),
)
def test_usage_of_any_split(
    prompt: int,
    completion: int,
    cached: int | None,
    content: str,
    separators: tuple[str, str] | None,
    data: st.DataObject,
) -> None:
    """Any counts after any generated text, cut at any places, are read exactly."""
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    usage["prompt_tokens_details"] = None if cached is None else {"cached_tokens": cached}
    text = json.dumps({"choices": [{"text": content}], "usage": usage}, separators=separators).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))

    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    assert _read(*chunks) == Usage(prompt, completion, cached)


def test_the_last_usage_counts() -> None:
    """With usage in every chunk the counts grow, and the last ones stay."""
    texts = [b'data: {"usage":{"prompt_tokens":5,"completion_tokens":%d}}\n\n' % n for n in range(4)]

    assert _read(*texts) == Usage(5, 3, None)


@pytest.mark.parametrize(
    "usage",
    [
        b"null",
        b'"usage"',
        b"[]",
        b"7",
        b'{"prompt_tokens":-1}',
        b'{"prompt_tokens":true}',
        b'{"prompt_tokens":1e3}',
        b'{"prompt_tokens":99999999999999999999}',
        b'{"prompt_tokens_details":{"cached_tokens":"8"}}',
        b"{:}",
        b"{,}",
    ],
)
def test_what_is_no_count_is_not_read(usage: bytes) -> None:
    """Counts of wrong types, negative and absurd ones, and broken objects tell nothing."""
    assert _read(b'{"usage":' + usage + b"}") == Usage()


def test_the_carry_is_bounded() -> None:
    """A usage object without an end is given up, and the next one is read."""
    reader = UsageReader()
    for _ in range(MAX_USAGE_BYTES):
        reader.feed(b'{"usage":{"a":"')
        assert len(reader._carry) <= 2 * MAX_USAGE_BYTES
    reader.feed(b'"}}' + b" " * MAX_USAGE_BYTES + STREAM)

    assert reader.usage == Usage(9, 3, 8)


@given(st.lists(st.binary() | st.sampled_from([b'"usage"', b":", b"{", b"}", b'"', b"\\"])))
def test_arbitrary_bytes_raise_nothing(chunks: list[bytes]) -> None:
    """Whatever an engine sends, reading goes on."""
    assert _read(*chunks).known in (True, False)
