"""Bodies of both legs of a disaggregated request, made from the client's body without decoding its prompt.

Source: vLLM 0.32, ``NixlConnector`` (``distributed/kv_transfer/kv_connector/v1/nixl``) and the protocols of
its APIs (``entrypoints/openai``, ``entrypoints/anthropic``). Members are added at the end of a JSON object:
of a key that occurs twice engines take the last value."""

from typing import Any, Final

import msgspec

TRANSFER: Final = "kv_transfer_params"
_NAME: Final = TRANSFER.encode()
_ASK: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_CHATS: Final = "/chat/completions"
_ONE_TOKEN: Final = {
    _CHATS: (
        b'"max_tokens":1,"max_completion_tokens":1,"min_tokens":1,"stream":false,"stream_options":null,"n":1,'
        b'"logprobs":null,"top_logprobs":null'
    ),
    "/completions": (
        b'"max_tokens":1,"min_tokens":1,"stream":false,"stream_options":null,"n":1,"logprobs":null'
    ),
    "/responses": b'"max_output_tokens":1,"stream":false,"store":false',
    "/messages": b'"max_tokens":1,"stream":false',
}
"""Members that make a request of each API one for a single token, and an answer that is not streamed."""
_BLOCKING: Final = {
    "prompt_logprobs": "prompt-logprobs",
    "echo": "echo",
    "use_beam_search": "beam-search",
    "previous_response_id": "stored-response",
    "background": "stored-response",
    TRANSFER: "client-parameters",
}
"""Members with which a request is not disaggregated, unless they are null or false: each needs what the
engine that answers has computed, or what one engine alone has stored."""
_UNSET: Final = (b"", b"null", b"false")
_MEDIA: Final = (b"_url", b"input_audio", b"_embeds", b'"image', b'"audio', b'"video')
MAX_TOKEN_IDS: Final = 256 * 1024
"""Bytes of token ids that are sent on at most: gateways limit the bodies that they hold (Envoy: 1 MiB)."""
ID_BYTES: Final = 4
"""Bytes of a token's id and its comma, on average, at least: a prompt whose ids are surely too long to be
sent on is not asked for them, since the picker would read them for nothing (650 KB for 450 KB of text)."""


class Prefilled(msgspec.Struct, frozen=True):
    """The result of leg 1: blocks that another engine can fetch."""

    params: bytes
    """A JSON object for leg 2, opaque but for what ``engine`` is read from."""
    token_ids: bytes = b""
    """The prompt as a JSON list of token ids; empty: the engine did not return it."""
    engine: str = ""
    """Id of the engine, which changes when it restarts; empty: not known."""


class _Members(msgspec.Struct):
    """Members of a body that decide whether it can be split."""

    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    best_of: Any = None
    prompt_logprobs: msgspec.Raw = msgspec.Raw()
    echo: msgspec.Raw = msgspec.Raw()
    use_beam_search: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    background: msgspec.Raw = msgspec.Raw()
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    prompt_token_ids: msgspec.Raw = msgspec.Raw()


class _Params(msgspec.Struct):
    do_remote_prefill: Any = None
    remote_engine_id: Any = None


_members: Final = msgspec.json.Decoder(_Members)
_answer: Final = msgspec.json.Decoder(_Answer)
_params: Final = msgspec.json.Decoder(_Params)


def obstacle(path: str, body: bytes) -> str:
    """Return why a request cannot be split, in a word or two; empty if it can.

    ``path``: without the query. ``body``: empty if it was not seen whole. It is read once, without its prompt
    being decoded.
    """
    if _one_token(path) is None:
        return "api"
    try:
        found = _members.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "body"
    for name, reason in _BLOCKING.items():
        if bytes(getattr(found, name)) not in _UNSET:
            return reason
    most = next(
        (
            one
            for one in (found.max_completion_tokens, found.max_tokens, found.max_output_tokens)
            if one is not None
        ),
        None,
    )
    if most == 1:
        return "one-token"
    if found.n not in (None, 1) or found.best_of not in (None, 1):
        return "several-answers"
    return ""


def prefill_body(path: str, body: bytes, tokens: int = 0) -> bytes:
    """Return the body of leg 1: the same prompt, for one token, whose blocks another engine will fetch.

    ``tokens``: of the prompt, as far as known; the ids of many are not asked for.
    """
    changes = _one_token(path)
    assert changes is not None, "obstacle() names such paths"
    ids = b""
    if path.endswith(_CHATS):
        ids = b',"return_token_ids":%s' % (b"true" if ID_BYTES * tokens <= MAX_TOKEN_IDS else b"false")
    return _with(body, changes, ids, b',"%s":%s' % (_NAME, _ASK))


def decode_body(path: str, body: bytes, prefilled: Prefilled) -> bytes:
    """Return the body of leg 2: the client's, with the description of the blocks.

    For chats it has the prompt's token ids as well, so that the engine need not render and tokenise it again
    (``renderers/online_renderer.py``). Ids of prompts with media are never sent: they are only placeholders.
    """
    name, params = b'"%s":' % _NAME, prefilled.params.rstrip()
    if not _forwards(path, body, prefilled):
        return _with(body, name, params)
    separator = b"," if b'"' in params else b""
    head = memoryview(params)[:-1]
    return _with(body, name, head, separator, b'"prompt_token_ids":', prefilled.token_ids, b"}")


def read_answer(data: bytes) -> Prefilled | None:
    """Return what an answer to leg 1 says; None if there is nothing to fetch, such as from an engine without
    a connector."""
    try:
        answer = _answer.decode(data)
        params = bytes(answer.kv_transfer_params)
        known = _params.decode(params or b"null")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if known.do_remote_prefill is not True:
        return None
    ids = bytes(answer.prompt_token_ids)
    engine = known.remote_engine_id
    return Prefilled(params, ids if ids[:1] == b"[" else b"", engine if isinstance(engine, str) else "")


def _forwards(path: str, body: bytes, prefilled: Prefilled) -> bool:
    if not path.endswith(_CHATS) or not 2 < len(prefilled.token_ids) <= MAX_TOKEN_IDS:
        return False
    return not any(name in body for name in _MEDIA)


def _one_token(path: str) -> bytes | None:
    return next((changes for end, changes in _ONE_TOKEN.items() if path.endswith(end)), None)


def _with(body: bytes, *members: bytes | memoryview) -> bytes:
    """Return a JSON object with members added at its end; the body is copied once."""
    text = body.rstrip()  # the same object where there is nothing to remove
    separator = b"," if b'"' in text else b""  # a member has a name
    return b"".join((memoryview(text)[:-1], separator, *members, b"}"))
