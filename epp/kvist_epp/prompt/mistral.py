"""Chats of engines that use Mistral's own tokenizer (``--tokenizer-mode mistral``), which has no template.

The library mistral-common merges messages of one role that follow one another, and writes each as tokens:
instructions, questions with the declarations of tools, answers with their calls, results. ``tekken.json``
names the version of the format, 3 to 15. Sources: ``vllm.tokenizers.mistral`` of vLLM 0.33, and
``normalize`` and ``instruct`` of mistral-common 1.13. Requests that these refuse may be rendered here.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, Final, Self

import msgspec

from kvist_epp.errors import ModelFilesError
from kvist_epp.prompt.chat import (
    MALFORMED,
    UnrenderableError,
    call_arguments,
    join_prompt,
    reasoning_of,
)
from kvist_epp.prompt.request_types import Chat
from kvist_epp.prompt.tiktoken_vocab import BEGIN
from kvist_epp.prompt.tools import kept_text

VERSIONS: Final = (3, 7, 11, 13, 15)

_END: Final = "</s>"
_BETWEEN: Final = "\n\n"
_ID_SIZE: Final = 9
"""vLLM leaves the last characters of the identifiers of calls: more are not allowed up to version 11."""
_CUTS: Final = frozenset(("max_length", "padding", "truncation"))
"""Template variables by which engines cut a prompt (the Responses API), or refuse it."""
_TOOLS_KEY: Final = ("mistral",)


class _Merged(msgspec.Struct):
    """Messages of one role that follow one another, or one of several instructions or results."""

    role: str
    text: str
    calls: list[dict[str, Any]] = []
    call: str = ""
    """Identifier of the call of a result."""
    thoughts: bool = False
    """The text has thoughts."""
    is_open: bool = False
    """The answer is to be continued."""


class MistralChats:
    """Renders the chats of a model with a ``tekken.json``."""

    def __init__(self, version: int, efforts: Iterable[str] = (), effort: str | None = None) -> None:
        """``version``: one of ``VERSIONS``; ``efforts``: those that the model knows, ``effort``: the one of
        requests that name none.
        """
        self._version = version
        self._efforts, self._effort = tuple(efforts), effort
        # before version 7 instructions are part of the last question; later they are messages
        self._tells = version >= 7
        # of two texts of one message
        self._between = _BETWEEN if version < 15 else ""

    @classmethod
    def load(cls, described: Mapping[str, Any], defaults: Mapping[str, Any]) -> Self | None:
        """Read a ``tekken.json``; ``defaults``: variables that requests may override.

        Returns None for a version that is not known here. Raises ModelFilesError if none can be read.
        """
        try:
            version = int(described["config"]["version"].removeprefix("v"))
            efforts = (described.get("model_settings_builder") or {}).get("reasoning_effort") or {}
            default = defaults.get("reasoning_effort") or efforts.get("default")
            return cls(version, efforts.get("values", ()), default) if version in VERSIONS else None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ModelFilesError("tekken.json has no version of its format: fetch it again") from error

    def render(self, chat: Chat, size: int = 0) -> str:
        """Return the prompt; ``size`` is that of the request in bytes.

        Raises:
            UnrenderableError: the engine refuses the chat, or it has media or an unknown shape, or takes too
                much work.
        """
        if chat.refusal or not _CUTS.isdisjoint(chat.variables):
            raise UnrenderableError(chat.refusal or "shape")
        try:
            return join_prompt(self._write(chat), chat, size)
        except MALFORMED:
            raise UnrenderableError("shape") from None

    def media_text(self, kind: str) -> str:  # noqa: ARG002 - chats with media are not rendered
        """Return what stands for a medium in a prompt: nothing."""
        return ""

    def _write(self, chat: Chat) -> Iterator[str]:
        turns = list(self._turns(chat))
        if not turns or not (self._tells or turns[0].role == "user"):
            turns.insert(0, _Merged("user", ""))
        if chat.continue_final_message:
            turns[-1].is_open = True
        told = "" if self._tells else self._told(chat.messages)
        questions = [at for at, turn in enumerate(turns) if turn.role == "user"]
        declaring = questions[0 if self._version >= 13 else -1] if questions else None
        yield BEGIN
        for at, turn in enumerate(turns):
            if turn.role == "user":
                yield self._before_question(chat) if at == declaring else ""
                yield f"[INST]{told if at == questions[-1] else ''}{turn.text}[/INST]"
            elif turn.role == "assistant":
                yield self._answer(turn)
            elif turn.role == "tool":
                yield self._result(turn)
            else:
                yield f"[SYSTEM_PROMPT]{turn.text}[/SYSTEM_PROMPT]"

    def _turns(self, chat: Chat) -> Iterator[_Merged]:
        # the Responses API leaves identifiers as they are
        identified = _identifier if chat.items is None else str
        called: list[str] = []
        for role, group in groupby(chat.messages, _role):
            if role == "system":
                if self._tells:
                    yield from (_Merged(role, self._joined([message["content"]])[0]) for message in group)
            elif role == "user":
                yield _Merged(role, self._joined([message["content"] for message in group])[0])
            elif role == "assistant":
                yield (turn := self._answers(list(group)))
                called += [identified(call["id"]) for call in turn.calls]
            elif role == "tool":
                texts = [(self._joined([one["content"]])[0], one["tool_call_id"]) for one in group]
                results = [_Merged(role, text, call=identified(call)) for text, call in texts]
                yield from _by_call(results, called) if self._version >= 11 else results
                called.clear()
            else:
                raise UnrenderableError("shape")

    def _answers(self, messages: list[dict[str, Any]]) -> _Merged:
        text, thoughts = self._joined([_with_reasoning(message) for message in messages])
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        if not (text or thoughts or calls) or (thoughts and self._version < 13):
            raise UnrenderableError("shape")
        if not self._tells and calls and text:
            raise UnrenderableError("shape")
        return _Merged("assistant", text, calls, thoughts=thoughts)

    def _joined(self, contents: list[Any]) -> tuple[str, bool]:
        """Join the texts and thoughts of contents that are one; also return whether there are thoughts.

        Texts have an empty line between them, but not beside a thought. Empty texts are left out.
        """
        joined: list[str] = []
        behind_text = thoughts = False
        for content in contents:
            begins = behind_text
            for part in _parts(content):
                if part["type"] == "thinking":
                    closed = part.get("closed", True)
                    if type(closed) is not bool:
                        raise UnrenderableError("content")
                    end = "[/THINK]" if closed else ""
                    joined.append(f"[THINK]{part['thinking']}{end}")
                    behind_text, thoughts = False, True
                elif text := _text(part):
                    between = _BETWEEN if begins else self._between
                    joined.append(between + text if behind_text else text)
                    behind_text, begins = True, False
        return "".join(joined), thoughts

    def _told(self, messages: list[dict[str, Any]]) -> str:
        contents = [message["content"] for message in messages if _role(message) == "system"]
        told = _BETWEEN.join([self._joined([content])[0] for content in contents if content])
        return told + _BETWEEN if told else ""

    def _before_question(self, chat: Chat) -> str:
        tools = chat.tools
        declared = kept_text(tools, _TOOLS_KEY, lambda: _declaration(tools)) if tools else ""
        if self._version < 15 or not self._efforts:
            return declared
        effort = chat.variables.get("reasoning_effort") or self._effort
        if effort not in self._efforts:
            raise UnrenderableError("effort")
        return f"{declared}[MODEL_SETTINGS]{_json({'reasoning_effort': effort})}[/MODEL_SETTINGS]"

    def _answer(self, turn: _Merged) -> str:
        text = turn.text if turn.thoughts else turn.text.rstrip(" ")
        return f"{text}{self._calls(turn.calls) if turn.calls else ''}{'' if turn.is_open else _END}"

    def _calls(self, calls: list[dict[str, Any]]) -> str:
        functions = [call["function"] for call in calls]
        names = [function["name"] for function in functions]
        arguments = [call_arguments(function["arguments"]) for function in functions]
        if self._version >= 13:
            written = zip(names, arguments, strict=True)
            return "".join([f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in written])
        identifiers = [_identifier(call["id"]) for call in calls]
        every = list(zip(names, arguments, identifiers, strict=True))
        if self._version == 11:
            return "".join([f"[TOOL_CALLS]{n}[CALL_ID]{i}[ARGS]{_json(a)}" for n, a, i in every])
        return "[TOOL_CALLS]" + _json([{"name": n, "arguments": a, "id": i} for n, a, i in every])

    def _result(self, turn: _Merged) -> str:
        if self._version == 3:
            content = _json({"content": _parsed(turn.text or "{}"), "call_id": turn.call})
        elif self._version < 13:
            content = f"{turn.call}[TOOL_CONTENT]{turn.text}"
        else:
            content = turn.text
        return f"[TOOL_RESULTS]{content}[/TOOL_RESULTS]"


def _role(message: dict[str, Any]) -> str:
    role: str = message["role"]
    return "system" if role == "developer" else role


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if type(content) is str else content or ()


def _text(part: dict[str, Any]) -> str:
    if part["type"] != "text":
        raise UnrenderableError("content")
    text: str = part["text"]
    return text


def _with_reasoning(message: dict[str, Any]) -> Any:
    """Return the content of an answer, with its reasoning as the first part."""
    content, reasoning = message.get("content"), reasoning_of(message)
    if reasoning is None:
        return content
    thought = {"type": "thinking", "thinking": reasoning}
    return [thought, *_parts(content)]


def _identifier(identifier: str) -> str:
    return identifier[-_ID_SIZE:]


def _by_call(results: list[_Merged], called: list[str]) -> list[_Merged]:
    """Return the results in the order of their calls, those of no call last."""
    places = {identifier: at for at, identifier in enumerate(called)}
    sent = {result.call: at for at, result in enumerate(results)}
    return sorted(results, key=lambda one: (places.get(one.call, len(called)), sent[one.call]))


def _declaration(tools: list[dict[str, Any]]) -> str:
    shown = [
        {
            "type": "function",
            "function": {
                "name": function["name"],
                "description": function.get("description") or "",
                "parameters": function.get("parameters") or {},
            },
        }
        for function in [tool["function"] for tool in tools]
    ]
    return f"[AVAILABLE_TOOLS]{_json(shown)}[/AVAILABLE_TOOLS]"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
