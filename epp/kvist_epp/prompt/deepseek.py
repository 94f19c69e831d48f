"""Chats of DeepSeek V3.2, V4 and V4.1: vLLM writes them by code, and ignores a template in the model's files.

All begin with the instructions, in which the tools are declared as JSON, and write calls as elements of a
language of their own, ``<｜DSML｜…>``. V3.2 writes the results of calls by themselves; from V4 on they are
parts of the user's turn, in the order of the calls. Sources: ``vllm.tokenizers.deepseek_v32``,
``deepseek_v4`` and ``deepseek_v41`` of vLLM 0.33, each with its ``…_encoding``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from kvist_epp.prompt.chat import (
    MALFORMED,
    UnrenderableError,
    have_media,
    join_prompt,
    ordered_tools,
    parsed_function,
    reasoning_of,
    template_messages,
)
from kvist_epp.prompt.deepseek_tools import (
    CALLS_OF_V4,
    CALLS_OF_V32,
    CALLS_OF_V41,
    THINK,
    THOUGHT,
    CallFormat,
)
from kvist_epp.prompt.request_types import Chat

PICTURE: Final = "<｜deepseek_image｜>"
"""Stands for a picture in prompts of V4 and V4.1."""

_BEGIN: Final = "<｜begin▁of▁sentence｜>"
_END: Final = "<｜end▁of▁sentence｜>"
_SYSTEM: Final = "<｜System｜>"
_USER: Final = "<｜User｜>"
_ASSISTANT: Final = "<｜Assistant｜>"
_REMINDER: Final = "<｜latest_reminder｜>"
_QUESTIONS: Final = ("user", "developer")
"""Roles whose messages the model answers."""


class DeepseekChats(ABC):
    """Renders the chats of engines with one ``--tokenizer-mode``: a key of ``MODES``."""

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        """``defaults``: variables that requests may override."""
        self._defaults = defaults

    def render(self, chat: Chat, size: int = 0) -> str:
        """Return the prompt; ``size`` is that of the request in bytes.

        Raises:
            UnrenderableError: the engine refuses the chat, it has an unknown shape, or takes too much work.
        """
        if chat.refusal:
            raise UnrenderableError(chat.refusal)
        try:
            return join_prompt(self._write(chat, {**self._defaults, **chat.variables}), chat, size)
        except MALFORMED:
            raise UnrenderableError("shape") from None

    def media_text(self, kind: str) -> str:
        """Return what stands for each medium of this kind in the prompt; empty: it does not show."""
        return PICTURE if kind == "image" else ""

    @abstractmethod
    def _write(self, chat: Chat, variables: Mapping[str, Any]) -> Iterator[str]:
        """Yield the parts of the prompt."""


_HIGH_EFFORT: Final = """Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root \
cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial \
scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered \
alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""
_MAX_EFFORT: Final = """Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively \
decompose the problem into its most fundamental components, trace every causal chain to its root, and \
resolve the underlying cause rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are \
certain that no assumption remains unchecked and no error remains undiscovered.

"""
_TASKS: Final = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}
"""What asks V4 to classify instead of to answer."""


class _V32(DeepseekChats):
    """Thinks if it is asked to; the results of calls stand by themselves."""

    _KEPT: Final = ("user", "system", "tool", "assistant")
    """Roles of messages that are kept before the last question, where a model that thinks is asked."""

    def _write(self, chat: Chat, variables: Mapping[str, Any]) -> Iterator[str]:
        thinking = bool(variables.get("thinking") or variables.get("enable_thinking"))
        messages = template_messages(chat.messages, "string", reorder_calls=chat.reorder_calls)
        if have_media(messages):
            raise UnrenderableError("shape")
        if chat.tools:
            messages.insert(0, {"role": "system", "content": "", "tools": chat.tools})
        if thinking and messages[-1]["role"] == "user":
            last = self._last_question(messages)
            messages = [
                message for at, message in enumerate(messages) if at >= last or message["role"] in self._KEPT
            ]
        last = self._last_question(messages)
        # a result at the beginning is taken for one of the last message's calls, as Python's index -1 has it
        calls, results = len(messages[-1].get("tool_calls") or ()), 0
        yield _BEGIN
        for at, message in enumerate(messages):
            opening = THINK if thinking and at >= last else THOUGHT
            if message["role"] == "tool":
                results += 1
                yield self._result(message["content"], results, calls, opening)
                continue
            calls, results = len(message.get("tool_calls") or ()), 0
            yield self._message(message, opening, thought=thinking and at > last)

    @staticmethod
    def _last_question(messages: list[dict[str, Any]]) -> int:
        return max((at for at, one in enumerate(messages) if one["role"] in _QUESTIONS), default=-1)

    @staticmethod
    def _result(content: str, number: int, calls: int, opening: str) -> str:
        """Return the result of one of the ``calls`` before it; the last one opens an answer."""
        if number > calls:
            raise UnrenderableError("shape")
        begin = "\n\n<function_results>" if number == 1 else ""
        end = f"\n</function_results>\n\n{opening}" if number == calls else ""
        return f"{begin}\n<result>{content}</result>{end}"

    def _message(self, message: dict[str, Any], opening: str, *, thought: bool) -> str:
        """Return a message; ``opening`` is that of an answer to it, ``thought``: with its own reasoning."""
        role, tools = message["role"], message.get("tools")
        content: str = message["content"]
        if role == "assistant":
            calls, reasoning = message.get("tool_calls"), message.get("reasoning") or ""
            if thought and not (reasoning or calls):
                raise UnrenderableError("shape")
            before = reasoning + THOUGHT if thought else ""
            return before + content + CALLS_OF_V32.write(calls) + _END
        if role == "user":
            return _USER + content + _ASSISTANT + opening
        declared = CALLS_OF_V32.declare(tools) if tools else ""
        if role == "system":
            return content + declared
        if role == "developer" and content:
            return f"{_USER}{declared}\n\n# The user's message is: {content}{_ASSISTANT}{opening}"
        raise UnrenderableError("shape")


class _Block(msgspec.Struct):
    """A part of a user's turn: a text, or the result of a call."""

    text: str
    is_result: bool = False
    call: Any = None
    """Identifier of the call of a result."""


class _Turn(msgspec.Struct):
    """A message of V4 and V4.1, where questions and results that follow one another are one turn."""

    role: str
    text: str = ""
    blocks: list[_Block] = []
    """Of a user's turn, which has no ``text``."""
    tools: Any = None
    calls: Sequence[dict[str, Any]] = ()
    reasoning: str = ""
    task: Any = None
    """A key of ``_TASKS``: the answer is a classification."""


class _V4(DeepseekChats):
    """Thinks unless it is asked not to; what precedes an answer is one turn of the user."""

    _CALLS: CallFormat = CALLS_OF_V4
    _BEFORE_SYSTEM: str = ""
    """With it, instructions between turns are questions, too."""
    _KEPT: Final = ("user", "system", "latest_reminder", "direct_search_results", "assistant")
    """Roles of turns that are kept before the last question, where a model that thinks is asked."""

    def _write(self, chat: Chat, variables: Mapping[str, Any]) -> Iterator[str]:
        effort = variables.get("reasoning_effort")
        settings = [variables[name] for name in ("thinking", "enable_thinking") if name in variables]
        thinking = effort != "none" and (any(settings) or not settings)
        turns = _turns(self._messages(chat), chat.tools)
        keeps = not variables.get("drop_thinking", True) or any(turn.tools for turn in turns)
        if thinking and not keeps:
            last = self._last_question(turns)
            turns = [turn for at, turn in enumerate(turns) if at >= last or turn.role in self._KEPT]
        last = self._last_question(turns)
        yield _BEGIN + (self._effort(effort, thinking) if turns else "")
        for at, turn in enumerate(turns):
            classifies = at > 0 and turns[at - 1].task is not None
            if turn.role == "system":
                yield "" if at == 0 and thinking else self._BEFORE_SYSTEM
            yield self._turn(turn, thought=thinking and not classifies and (keeps or at > last))
            following = turns[at + 1].role if at + 1 < len(turns) else ""
            if following not in ("", "assistant", "latest_reminder"):
                continue
            if turn.task is not None:
                opening = THINK if thinking else THOUGHT
                yield _ASSISTANT + opening if turn.task == "action" else ""
                yield _TASKS[turn.task]
            elif turn.role in _QUESTIONS or (turn.role == "system" and self._system_asks(at, following)):
                yield _ASSISTANT + (THINK if thinking and (keeps or at >= last) else THOUGHT)

    def _messages(self, chat: Chat) -> list[dict[str, Any]]:
        return template_messages(chat.messages, "openai", reorder_calls=chat.reorder_calls)

    def _last_question(self, turns: list[_Turn]) -> int:
        return max((at for at, turn in enumerate(turns) if self._is_question(turn, at)), default=-1)

    def _is_question(self, turn: _Turn, at: int) -> bool:  # noqa: ARG002 - V4.1 asks for the place
        """Return whether the reasoning of earlier answers ends here."""
        return turn.role in _QUESTIONS

    def _effort(self, effort: Any, thinking: bool) -> str:
        if not thinking or effort in ("low", "minimal", "medium"):
            return ""
        return _MAX_EFFORT if effort == "max" else _HIGH_EFFORT

    def _turn(self, turn: _Turn, *, thought: bool) -> str:
        """Return a turn; ``thought``: with the reasoning of an answer."""
        if turn.role == "system":
            return turn.text + self._declared(turn)
        if turn.role == "user":
            return _USER + "\n\n".join([block.text for block in turn.blocks])
        if turn.role == "assistant":
            before = turn.reasoning + THOUGHT if thought else ""
            return before + turn.text + self._CALLS.write(turn.calls) + _END
        if turn.role == "developer" and turn.text:
            return _USER + turn.text + self._declared(turn)
        if turn.role == "latest_reminder":
            return _REMINDER + turn.text
        raise UnrenderableError("shape")

    def _declared(self, turn: _Turn) -> str:
        return self._CALLS.declare(turn.tools) if turn.tools else ""

    def _system_asks(self, at: int, following: str) -> bool:
        """Return whether instructions are answered by what follows."""
        return at > 0 if self._BEFORE_SYSTEM else following in ("", "assistant")


class _V41(_V4):
    """Marks instructions with a token, takes numbers as efforts, and sees messages as they were sent."""

    _CALLS = CALLS_OF_V41
    _BEFORE_SYSTEM = _SYSTEM
    _BUDGETS: Final = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
    """Numbers of efforts that have names."""
    _UNKNOWN: Final = frozenset(("content_blocks", "mask", "response_format", "wo_eos"))
    """Fields of messages that the engine reads and that are not known here."""

    def _messages(self, chat: Chat) -> list[dict[str, Any]]:
        return [self._message(message) for message in chat.messages]

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message as sent, but with parsed arguments, and its parts joined by empty lines."""
        role = message["role"]
        content = message.get("content", "" if role == "tool" else None)
        known = role in ("system", "developer", "user", "assistant", "tool")
        if not known or not self._UNKNOWN.isdisjoint(message) or ("tools" in message and role != "developer"):
            raise UnrenderableError("shape")
        if type(content) is list:
            content = "\n\n".join([self._part(part) for part in content])
        elif type(content) is str and PICTURE in content:
            raise UnrenderableError("shape")
        seen = {**message, "content": content, "reasoning": reasoning_of(message)}
        if tools := message.get("tools"):
            seen["tools"] = ordered_tools(tools)
        if calls := message.get("tool_calls"):
            seen["tool_calls"] = [{**call, "function": parsed_function(call["function"])} for call in calls]
        return seen

    @staticmethod
    def _part(part: dict[str, Any]) -> str:
        kind, text = part["type"], part.get("text", "")
        if kind in ("image_url", "input_image", "image_pil"):
            return PICTURE
        if kind not in ("text", "input_text", "output_text") or PICTURE in text:
            raise UnrenderableError("shape")
        return str(text)

    def _is_question(self, turn: _Turn, at: int) -> bool:
        """Return whether reasoning ends here: not with results alone, but with instructions in between."""
        if turn.role == "user":
            return any(not block.is_result for block in turn.blocks)
        return turn.role == "developer" or (turn.role == "system" and at > 0)

    def _effort(self, effort: Any, thinking: bool) -> str:
        if effort is None or not thinking:
            effort = "high"
        budget = effort if type(effort) is int else self._BUDGETS[effort]
        if not 1 <= budget <= 100:
            raise UnrenderableError("effort")
        scale = "(range 1-100, the higher the value, the more thorough the reasoning)"
        return f"{_SYSTEM}Reasoning Effort: {budget} {scale}\n\n" if thinking else ""


MODES: Final[Mapping[str, type[DeepseekChats]]] = {
    "deepseek_v32": _V32,
    "deepseek_v4": _V4,
    "deepseek_v41": _V41,
}
"""What renders the chats, by vLLM's ``--tokenizer-mode``."""


def _turns(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[_Turn]:
    """Return the turns of a chat; its tools belong to the first instructions, empty ones if there are none.

    Example: behind calls ``a`` and ``b``, the messages result of ``b``, text, result of ``a`` are one turn:
    result of ``a``, text, result of ``b``.
    """
    turns: list[_Turn] = []
    for message in messages:
        role, content, task = message["role"], message.get("content"), message.get("task")
        before = turns[-1] if turns and turns[-1].role == "user" else None
        if role == "tool":
            block = _Block(_result(content), True, message.get("tool_call_id", ""))
            if before is None:
                turns.append(before := _Turn("user"))
            before.blocks.append(block)
        elif role == "user":
            if before is None or before.task is not None:
                turns.append(before := _Turn("user", task=task))
            before.blocks.append(_Block(_text(content)))
        else:
            turn = _Turn(role, _text(content or ""), tools=message.get("tools"), task=task)
            turn.calls, turn.reasoning = message.get("tool_calls") or (), message.get("reasoning") or ""
            turns.append(turn)
    _sort_results(turns)
    if tools:
        system = next((turn for turn in turns if turn.role == "system"), None)
        if system is None:
            turns.insert(0, system := _Turn("system"))
        system.tools = tools
    return turns


def _sort_results(turns: list[_Turn]) -> None:
    """Put the results in each turn in the order of the last calls, in their places among the texts."""
    order: dict[Any, int] = {}
    for turn in turns:
        if turn.role == "assistant" and turn.calls:
            order = {call["id"]: at for at, call in enumerate(turn.calls) if call.get("id")}
        places = [at for at, block in enumerate(turn.blocks) if block.is_result]
        results = sorted((turn.blocks[at] for at in places), key=lambda block: order.get(block.call, 0))
        for at, block in zip(places, results, strict=True):
            turn.blocks[at] = block


def _text(content: Any) -> str:
    """Join the parts of a content by empty lines."""
    if type(content) is str:
        return content
    return "\n\n".join([PICTURE if part["type"] == "image" else part["text"] for part in content])


def _result(content: Any) -> str:
    if type(content) is list:
        content = "\n\n".join(
            [part["text"] if part["type"] == "text" else f"[Unsupported {part['type']}]" for part in content]
        )
    return f"<tool_result>{content}</tool_result>"
