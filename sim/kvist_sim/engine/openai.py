"""Request and answer bodies of vLLM's OpenAI front end. Pure.

Sources: ``vllm/entrypoints/openai/{chat_completion,completion}/protocol.py``,
``.../serve/engine/protocol.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from kvist_epp.errors import BadRequest

COMPLETION_TOKENS: Final = 16
"""Tokens of a completion that asks for no number."""

ROUTE: Final = "route"
"""Kind of errors of vLLM's web framework (no such route or method), which have a shape of their own."""


class ApiError(Exception):
    """Error answer; the text is for the client."""

    def __init__(
        self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        """Return vLLM's error object."""
        if self.kind == ROUTE:
            return msgspec.json.encode({"detail": self.message})
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


class StreamOptions(msgspec.Struct):
    """Options of a streamed answer (``stream_options``)."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Body(msgspec.Struct):
    """Fields of a chat or completion request that concern the engine and not the prompt."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int = 0
    n: int | None = 1
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    temperature: float | None = None
    seed: int | None = None
    echo: bool = False
    cache_salt: str | None = None
    session_id: str | None = None
    vllm_xargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the texts that end the output."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(filter(None, given))

    @property
    def session(self) -> str | None:
        """Session id of the body; the header takes precedence."""
        extra = (self.vllm_xargs or {}).get("session_id")
        return self.session_id or (extra if isinstance(extra, str) else None)

    @property
    def reports_hits(self) -> bool:
        """True if cache hits are published again."""
        return (self.vllm_xargs or {}).get("kv_cache_report_mode") == "full"


_body: Final = msgspec.json.Decoder(Body).decode


def read(raw: bytes) -> Body:
    """Return the parsed body. Raises ApiError 400 for a body that vLLM's validation refuses."""
    try:
        body = _body(raw)
    except msgspec.ValidationError as problem:
        raise ApiError(400, str(problem), "Bad Request") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ApiError(400, "There was an error parsing the body", "Bad Request") from None
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            400,
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
            param="stream_options",
        )
    if body.n not in {None, 1}:
        raise ApiError(400, "n must be 1: the simulator draws one answer per prompt", param="n")
    if body.cache_salt == "":
        raise ApiError(
            400, "Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt"
        )
    _check_positive(body)
    return body


def _check_positive(body: Body) -> None:
    for name, value in (
        ("max_tokens", body.max_tokens),
        ("max_completion_tokens", body.max_completion_tokens),
    ):
        if value is not None and value < 1:
            raise ApiError(
                400, f"{name} must be at least 1, got {value}. (parameter={name}, value={value})", param=name
            )


def output_limit(body: Body, *, chat: bool, prompt: int, longest: int) -> int:
    """Return the largest number of output tokens: that of the request, or what the context leaves.

    Raises ApiError 400 when the prompt alone fills the context.
    """
    if prompt >= longest:
        raise ApiError(
            400,
            f"This model's maximum context length is {longest} tokens. However, your prompt contains "
            f"{prompt} input tokens, which exceeds this limit even without any output tokens. Please reduce "
            f"the length of the input prompt. (parameter=input_tokens, value={prompt})",
            param="input_tokens",
        )
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    asked = limit if limit is not None else longest if chat else COMPLETION_TOKENS
    return min(asked, longest - prompt)


def no_prompt() -> ApiError:
    """Return vLLM's error for a completion without a prompt, or with an empty one."""
    return ApiError(
        400,
        "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
        param="prompt",
    )


def not_found(model: str, served: Sequence[str]) -> ApiError:
    """Return vLLM's error for a model name that it does not serve."""
    aliases = ", ".join(served)
    return ApiError(
        404, f"The model `{model}` does not exist. Valid aliases: {aliases}.", "NotFoundError", "model"
    )


def bad(problem: BadRequest) -> ApiError:
    """Return the error for a prompt that the reader refused."""
    return ApiError(400, problem.message)


def usage(prompt: int, completion: int, cached: int | None) -> dict[str, Any]:
    """Return the usage object; ``cached`` is None without --enable-prompt-tokens-details."""
    details = {"cached_tokens": cached, "created_cache_tokens": None, "multimodal_tokens": None}
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None if cached is None else details,
        "completion_tokens_details": None,
    }


def whole(
    *,
    chat: bool,
    id: str,  # noqa: A002 - the field's own name
    created: int,
    model: str,
    answers: Sequence[tuple[str, str, list[int] | None]],
    counts: Mapping[str, Any],
) -> bytes:
    """Return the answer in one piece; ``answers`` are (text, finish reason, token ids or None)."""
    build = _chat_choice if chat else _text_choice
    return msgspec.json.encode(
        {
            "id": id,
            "object": "chat.completion" if chat else "text_completion",
            "created": created,
            "model": model,
            "choices": [build(index, *answer) for index, answer in enumerate(answers)],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": counts,
            "kv_transfer_params": None,
        }
    )


def _chat_choice(index: int, text: str, finish: str, ids: list[int] | None) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "tool_calls": [],
        "reasoning": None,
    }
    return {
        "index": index,
        "message": message,
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": ids,
    }


def _text_choice(index: int, text: str, finish: str, ids: list[int] | None) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": ids,
        "prompt_logprobs": None,
    }


class Chunks:
    """Encoder of the server-sent events of one stream.

    Fields that are equal in all chunks are encoded once.
    """

    __slots__ = ("_chat", "_head")

    def __init__(self, *, chat: bool, id: str, created: int, model: str) -> None:  # noqa: A002
        self._chat = chat
        fixed = {"id": id, "object": "chat.completion.chunk" if chat else "text_completion"}
        fixed |= {"created": created, "model": model}  # type: ignore[dict-item]
        self._head = b"data: " + msgspec.json.encode(fixed)[:-1] + b',"choices":['

    def role(self, index: int) -> bytes:
        """Return the first chunk of a chat; completions have none."""
        if not self._chat:
            return b""
        return b"%b" % self._head + (
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
            % index
        )

    def text(self, index: int, text: str, finish: str | None, ids: list[int] | None = None) -> bytes:
        """Return a chunk with new text, or with the finish reason."""
        said = msgspec.json.encode(text)
        tokens = b"null" if ids is None else msgspec.json.encode(ids)
        reason = b"null" if finish is None else b'"%b"' % finish.encode()
        if not self._chat:
            form = b'%b{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b,"stop_reason":null,'
            rest = b'"prompt_token_ids":null,"token_ids":%b}]}\n\n'
            return form % (self._head, index, said, reason) + rest % tokens
        reason += b"" if finish is None else b',"stop_reason":null'
        form = (
            b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":%b,"token_ids":%b}]}\n\n'
        )
        return form % (self._head, index, said, reason, tokens)

    def usage(self, counts: Mapping[str, Any]) -> bytes:
        """Return the chunk after the last one, without choices."""
        return self._head + b'],"usage":' + msgspec.json.encode(counts) + b"}\n\n"


DONE: Final = b"data: [DONE]\n\n"
