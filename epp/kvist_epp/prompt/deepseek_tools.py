"""The declarations of tools that models of DeepSeek read, and the calls that they write, for ``deepseek``."""

import json
from collections.abc import Sequence
from typing import Any, Final

from kvist_epp.prompt.chat import UnrenderableError
from kvist_epp.prompt.tools import kept_text

THINK: Final = "<think>"
THOUGHT: Final = "</think>"
MAX_ARGUMENTS: Final = 20_000
"""Most arguments of the calls of one message, at some 2 us each."""

_MARK: Final = "｜DSML｜"


class CallFormat:
    """The calls of one version: names of their elements, and what declares tools."""

    def __init__(
        self, declaration: str, calls: str, call: str = "invoke", argument: str = "parameter"
    ) -> None:
        """``declaration``: a text with the names in braces, and ``{tools}`` for the declared functions."""
        self._calls, self._call, self._argument = _MARK + calls, _MARK + call, _MARK + argument
        text = declaration.format(
            calls=self._calls, call=self._call, argument=self._argument, tools=(here := "\0")
        )
        self._begin, _, self._end = text.partition(here)

    def declare(self, tools: list[dict[str, Any]]) -> str:
        """Return the declaration of tools, which is kept with them."""
        return kept_text(tools, ("deepseek", self._calls), lambda: self._declaration(tools))

    def write(self, calls: Sequence[dict[str, Any]] | None) -> str:
        """Return the calls of an answer, whose arguments are objects; empty if there are none.

        Raises UnrenderableError if they have too many arguments.
        """
        if not calls:
            return ""
        if sum([len(call["function"]["arguments"]) for call in calls]) > MAX_ARGUMENTS:
            raise UnrenderableError("work")
        written = "\n".join([self._written(call["function"]) for call in calls])
        return f"\n\n<{self._calls}>\n{written}\n</{self._calls}>"

    def _declaration(self, tools: list[dict[str, Any]]) -> str:
        return self._begin + "\n".join([_json(tool["function"]) for tool in tools]) + self._end

    def _written(self, function: dict[str, Any]) -> str:
        arguments = "\n".join([self._given(*argument) for argument in function["arguments"].items()])
        return f'<{self._call} name="{function["name"]}">\n{arguments}\n</{self._call}>'

    def _given(self, name: str, value: Any) -> str:
        is_text = type(value) is str
        attributes = f'name="{name}" string="{"true" if is_text else "false"}"'
        return f"<{self._argument} {attributes}>{value if is_text else _json(value)}</{self._argument}>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_V32: Final = f"""

## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{{calls}}>" block like the following as part of your reply to the \
user:
<{{calls}}>
<{{call}} name="$FUNCTION_NAME">
<{{argument}} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{{argument}}>
...
</{{call}}>
<{{call}} name="$FUNCTION_NAME2">
...
</{{call}}>
</{{calls}}>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and \
objects should use JSON format. The "string" attribute should be set to "true" for string type parameters \
and "false" for other types (numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a \
thinking block. Here is an example:
<{{calls}}>
...
</{{calls}}>
<function_results>
...
</function_results>
{THINK}...thinking about results{THOUGHT}
Here are the functions available in JSONSchema format:
<functions>
{{tools}}
</functions>
"""
_V4: Final = f"""

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{{calls}}>" block like the following:

<{{calls}}>
<{{call}} name="$TOOL_NAME">
<{{argument}} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{{argument}}>
...
</{{call}}>
<{{call}} name="$TOOL_NAME2">
...
</{{call}}>
</{{calls}}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, \
arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside \
{THINK}...{THOUGHT} BEFORE any tool calls or final response.

Otherwise, output directly after {THOUGHT} with tool calls or final response.

### Available Tool Schemas

{{tools}}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

CALLS_OF_V32: Final = CallFormat(_V32, "function_calls")
CALLS_OF_V4: Final = CallFormat(_V4, "tool_calls")
CALLS_OF_V41: Final = CallFormat(_V4, " calls", " invoke", " parameter")
