"""Loops of a chat template that run over the messages, found in its tree."""

from collections.abc import Iterator
from typing import Final

from jinja2 import nodes

from kvist_epp.prompt.chat import ContentFormat

_BY_VALUE: Final = frozenset({"eq", "ne", "in", "notin"})
"""Comparisons that are true for equal messages."""
_PARTS: Final = frozenset({"first", "last", "list", "reverse"})
"""Filters that return messages of those that they are given."""

# A template that loops over a message's content takes a list of parts (``openai``), any other one text
# (``string``). vLLM decides so for ``--chat-template-content-format auto``, a wrong decision changes every
# prompt. The rules for what counts as such a loop are those of ``vllm.renderers.hf``.


def detect_content_format(tree: nodes.Template) -> ContentFormat:
    """Return ``openai`` if a loop runs over a message's content, else ``string``."""
    try:
        message_names = {loop.target.name for loop in _message_loops(tree)}  # type: ignore[attr-defined]
    except AttributeError:  # the loop unpacks its messages: vLLM gives up the analysis as well
        return "string"
    inner = {id(loop) for macro in tree.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    loops = list(tree.find_all(nodes.For))
    if any(_reads(loop.iter, name, "content") for loop in loops for name in message_names):
        return "openai"
    named = [loop for loop in loops if isinstance(loop.iter, nodes.Name)]
    if any(_variable_name(loop.iter) == "content" and id(loop) not in inner for loop in named):
        return "openai"
    return "openai" if _macro_loops(tree, message_names) else "string"


def main_loop(tree: nodes.Template) -> nodes.For | None:
    """Return the loop that writes the messages, if its output goes straight into the prompt.

    That is the largest loop over the messages outside of macros, blocks and other loops, whose items are
    not filtered one by one. None: the template has no such loop, or uses what earlier rounds left in a
    ``loop`` variable.
    """
    names = _aliases(tree, "messages")
    found = [
        loop
        for loop in _outermost_loops(tree.body)
        if any(_reads(loop.iter, name) for name in names)
        and isinstance(loop.target, nodes.Name)
        and loop.find(nodes.Output) is not None
        and not (loop.test or loop.recursive or loop.else_)
    ]
    largest = max(found, key=lambda loop: sum(1 for _ in loop.find_all(nodes.Node)), default=None)
    looks_back = any(read.attr == "changed" for read in tree.find_all(nodes.Getattr))
    return None if looks_back else largest


def compares_messages(tree: nodes.Template) -> bool:
    """Return whether a template tells messages apart by their values: ``message == user_messages[-1]`` is
    true for each message that is equal to the last one."""
    names = {_variable_name(loop.target) for loop in _message_loops(tree)} | {"messages"}
    names = set[str]().union(*(_aliases(tree, name) for name in names if name))
    found = False
    for compared in tree.find_all(nodes.Compare):
        operands = (compared.expr, *(operand.expr for operand in compared.ops))
        known = any(isinstance(operand, nodes.Const) for operand in operands)
        if not known and not _BY_VALUE.isdisjoint(operand.op for operand in compared.ops):
            found = found or any(_is_message(operand, names) for operand in operands)
    return found or any(
        isinstance(call.node, nodes.Getattr)
        and call.node.attr in {"index", "count"}
        and any(_is_message(given, names) for given in call.args)
        for call in tree.find_all(nodes.Call)
    )


def _is_message(node: nodes.Node, names: set[str]) -> bool:
    """Return whether a node is one of these variables, an item of one by its number, or a part of one."""
    while _is_part(node):
        node = node.node  # type: ignore[attr-defined]
    return _variable_name(node) in names


def _is_part(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getitem):
        return not (isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str))
    return isinstance(node, nodes.Filter) and node.name in _PARTS and node.node is not None


def _outermost_loops(body: list[nodes.Node]) -> Iterator[nodes.For]:
    for node in body:
        if isinstance(node, nodes.For):
            yield node
        elif isinstance(node, nodes.If):
            for branch in (node.body, *(other.body for other in node.elif_), node.else_):
                yield from _outermost_loops(branch)


def _message_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    names = _aliases(tree, "messages")
    return (loop for loop in tree.find_all(nodes.For) if any(_reads(loop.iter, name) for name in names))


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    """Return the name and every variable that is set to it, to a slice of it or to a filter of it."""
    known = {name}
    assigns = [node for node in tree.find_all(nodes.Assign) if isinstance(node.target, nodes.Name)]
    while True:
        found = {
            _variable_name(node.target)
            for node in assigns
            if any(_reads(node.node, alias) for alias in known)
        }
        if found <= known:
            return known
        known |= found


def _macro_loops(tree: nodes.Template, message_names: set[str]) -> bool:
    """Return whether a macro loops over a parameter that receives a message's content."""
    for macro in tree.find_all(nodes.Macro):
        given = _content_parameters(tree, macro, message_names)
        loops = (loop.iter for loop in macro.find_all(nodes.For))
        if any(isinstance(over, nodes.Name) and over.name in given for over in loops):
            return True
    return False


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, message_names: set[str]) -> set[str]:
    names = [argument.name for argument in macro.args]
    calls = [call for call in tree.find_all(nodes.Call) if _variable_name(call.node) == macro.name]
    given = [pair for call in calls for pair in zip(names, call.args, strict=False)]
    given += [(item.key, item.value) for call in calls for item in call.kwargs]
    return {
        name
        for name, value in given
        if name in names and any(_reads(value, m, "content") for m in message_names)
    }


def _reads(node: nodes.Node, name: str, key: str | None = None) -> bool:
    """Return whether a node reads the variable (or its ``key``), also filtered, tested or sliced."""
    node = _bare(node)
    if key is None:
        return _variable_name(node) == name
    if isinstance(node, nodes.Getitem):
        return (
            _variable_name(node.node) == name and isinstance(node.arg, nodes.Const) and node.arg.value == key
        )
    return isinstance(node, nodes.Getattr) and _variable_name(node.node) == name and node.attr == key


def _bare(node: nodes.Node) -> nodes.Node:
    while isinstance(node, (nodes.Filter, nodes.Test)) or _is_slice(node):
        inner = node.node  # type: ignore[attr-defined]
        if inner is None:
            return node
        node = inner
    return node


def _is_slice(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)


def _variable_name(node: nodes.Node) -> str:
    return node.name if isinstance(node, nodes.Name) else ""
