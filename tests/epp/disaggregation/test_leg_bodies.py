"""Bodies of both legs: what is added to a client's body, and which requests cannot be split."""

import json
from typing import Any

import pytest

from kvist_epp.disaggregation import leg_bodies
from kvist_epp.disaggregation.leg_bodies import MAX_TOKEN_IDS, Prefilled

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PARAMS = b'{"do_remote_prefill":true,"remote_engine_id":"e1","remote_block_ids":[[1,2]], "new": {"x": null}}'


def body(**members: Any) -> bytes:
    """Return a body with these members."""
    return json.dumps({"model": "m", **members}).encode()


@pytest.mark.parametrize(
    ("path", "limits"),
    [
        (CHAT, {"max_tokens", "max_completion_tokens", "min_tokens", "n"}),
        (COMPLETION, {"max_tokens", "min_tokens", "n"}),
        ("/v1/responses", {"max_output_tokens"}),
        ("/v1/messages", {"max_tokens"}),
        ("/pool-a/v1/messages", {"max_tokens"}),
    ],
)
def test_leg_1_is_one_token_of_the_same_prompt(path: str, limits: set[str]) -> None:
    """Leg 1 asks for one token without streaming, and keeps what decides the prompt."""
    sent = body(messages=[{"role": "user", "content": "ä\\n"}], stream=True, max_tokens=900, cache_salt="s")
    leg = json.loads(leg_bodies.prefill_body(path, sent))

    assert {name for name in leg if leg[name] == 1 and type(leg[name]) is int} >= limits
    assert leg["stream"] is False
    assert leg["messages"] == [{"role": "user", "content": "ä\\n"}]
    assert leg["cache_salt"] == "s"
    assert leg["kv_transfer_params"]["do_remote_decode"] is True


def test_stream_options_are_not_sent_in_leg_1() -> None:
    """Engines refuse stream options without a stream, so leg 1 has none."""
    sent = body(prompt="x", stream=True, stream_options={"include_usage": True}, logprobs=3)
    leg = json.loads(leg_bodies.prefill_body(COMPLETION, sent))
    assert (leg["stream_options"], leg["logprobs"]) == (None, None)


def test_leg_2_has_the_description_as_it_came() -> None:
    """The client's members stay as they are, and the description of the blocks is passed on byte for byte."""
    sent = b' {"model": "m", "prompt": "\\u00e4",  "stream": true } \n'
    leg = leg_bodies.decode_body(COMPLETION, sent, Prefilled(PARAMS, b"[5,6]"))
    assert leg.startswith(b' {"model": "m", "prompt": "\\u00e4",  "stream": true')
    assert b'"kv_transfer_params":' + PARAMS in leg
    assert json.loads(leg)["prompt"] == "ä"


def test_chats_get_the_token_ids() -> None:
    """A chat without media gets the prompt's token ids; empty parameters stay valid JSON."""
    sent = body(messages=[{"role": "user", "content": "x"}])
    leg = json.loads(leg_bodies.decode_body(CHAT, sent, Prefilled(PARAMS, b"[5,6]")))
    assert leg["kv_transfer_params"]["prompt_token_ids"] == [5, 6]
    assert leg["kv_transfer_params"]["new"] == {"x": None}
    leg = json.loads(leg_bodies.decode_body(CHAT, sent, Prefilled(b"{ }", b"[5]")))
    assert leg["kv_transfer_params"] == {"prompt_token_ids": [5]}


@pytest.mark.parametrize(
    ("content", "ids"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:,"}}], b"[5]"),
        ([{"type": "input_audio", "input_audio": {}}], b"[5]"),
        ("x", b""),
        ("x", b"[]"),
        ("x", b"[" + b"1," * (MAX_TOKEN_IDS // 2) + b"1]"),
    ],
)
def test_token_ids_are_left_out(content: Any, ids: bytes) -> None:
    """Neither media, nor an engine without ids, nor more ids than gateways take give token ids."""
    sent = body(messages=[{"role": "user", "content": content}])
    leg = json.loads(leg_bodies.decode_body(CHAT, sent, Prefilled(PARAMS, ids)))
    assert leg["kv_transfer_params"] == json.loads(PARAMS)


@pytest.mark.parametrize(
    ("path", "members", "reason"),
    [
        (CHAT, {"messages": []}, ""),
        (COMPLETION, {"prompt": "x", "n": 1, "max_tokens": 2}, ""),
        (COMPLETION, {"prompt": "x", "max_tokens": 1}, "one-token"),
        (CHAT, {"max_completion_tokens": 1, "max_tokens": 50}, "one-token"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1}, "one-token"),
        (COMPLETION, {"prompt": "x", "n": 2}, "several-answers"),
        (COMPLETION, {"prompt": "x", "best_of": 3}, "several-answers"),
        (COMPLETION, {"prompt": "x", "echo": True}, "echo"),
        (COMPLETION, {"prompt": "x", "prompt_logprobs": 1}, "prompt-logprobs"),
        (COMPLETION, {"prompt": "x", "use_beam_search": True}, "beam-search"),
        ("/v1/responses", {"input": "x", "previous_response_id": "r"}, "stored-response"),
        (COMPLETION, {"prompt": "x", "kv_transfer_params": {}}, "client-parameters"),
        (COMPLETION, {"prompt": "x", "prompt_logprobs": 0}, "prompt-logprobs"),
        (COMPLETION, {"prompt": '"echo": true', "echo": False, "prompt_logprobs": None}, ""),
        (CHAT, {"messages": [{"role": "user", "content": "x", "echo": True}]}, ""),
        ("/v1/embeddings", {"input": "x"}, "api"),
        ("/inference/v1/generate", {"token_ids": [1]}, "api"),
    ],
)
def test_requests_that_cannot_be_split(path: str, members: dict[str, Any], reason: str) -> None:
    """Requests whose answer needs what one engine alone has are named; all others can be split."""
    assert leg_bodies.obstacle(path, body(**members)) == reason


def test_members_are_found_however_they_are_written() -> None:
    """A member counts under an escaped name and among equal ones; a body that is no JSON object is named."""
    assert leg_bodies.obstacle(COMPLETION, b'{"prompt":"x","\\u0065cho":true}') == "echo"
    assert leg_bodies.obstacle(COMPLETION, b'{"echo":false,"prompt":"x","echo":true}') == "echo"
    for text in (b"", b"[]", b'{"prompt":', b'{"temperature":NaN}', b"[" * 100_000):
        assert leg_bodies.obstacle(COMPLETION, text) == "body"


def test_ids_that_would_not_be_sent_on_are_not_asked_for() -> None:
    """Leg 1 of a chat asks for token ids, unless there are so many that they could not be sent on; leg 1 of a
    completion never does."""
    sent = body(messages=[], return_token_ids=True)
    most = MAX_TOKEN_IDS // 4
    for tokens, asked in ((0, True), (most, True), (most + 1, False)):
        assert json.loads(leg_bodies.prefill_body(CHAT, sent, tokens))["return_token_ids"] is asked
    assert b"token_ids" not in leg_bodies.prefill_body(COMPLETION, body(prompt="x"))


@pytest.mark.parametrize("sent", [b"{}", b" { } ", b'{"a":1 }\n'])
def test_members_are_added_to_any_object(sent: bytes) -> None:
    """Objects without members and with space at their end stay valid JSON."""
    leg = json.loads(leg_bodies.decode_body(COMPLETION, sent, Prefilled(PARAMS)))
    assert leg == json.loads(sent) | {"kv_transfer_params": json.loads(PARAMS)}


def test_an_answer_is_read_without_its_parameters_being_changed() -> None:
    """Parameters are kept byte for byte, with the token ids and the engine's id beside them."""
    data = b'{"id":"x","choices":[],"prompt_token_ids":[1, 2],"kv_transfer_params": ' + PARAMS + b"}"
    assert leg_bodies.read_answer(data) == Prefilled(PARAMS, b"[1, 2]", "e1")


def test_token_ids_may_be_null() -> None:
    """An engine that was not asked for token ids answers null, which is not sent on."""
    data = b'{"prompt_token_ids":null,"kv_transfer_params":' + PARAMS + b"}"
    assert leg_bodies.read_answer(data) == Prefilled(PARAMS, b"", "e1")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"kv_transfer_params":null}',
        b'{"kv_transfer_params":{}}',
        b'{"kv_transfer_params":{"do_remote_prefill":false}}',
        b'{"kv_transfer_params":[1]}',
        b'\xff{"kv_transfer_params":{"do_remote_prefill":true}}',
    ],
)
def test_answers_without_blocks(data: bytes) -> None:
    """An engine without a connector, or an answer that cannot be read, leaves nothing to fetch."""
    assert leg_bodies.read_answer(data) is None


def test_unknown_engine_ids_are_no_error() -> None:
    """An engine id of another type is not known, but its parameters are passed on."""
    found = leg_bodies.read_answer(b'{"kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":7}}')
    assert found is not None
    assert found.engine == ""
