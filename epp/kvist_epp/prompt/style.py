"""Which style of content a chat template takes, found in its syntax tree.

A template that loops over a message's content takes a list of parts (``openai``), any other one text
(``string``). vLLM decides so for ``--chat-template-content-format auto``, and a wrong guess changes every
prompt; the rules here are those of ``vllm.renderers.hf`` for what counts as such a loop.
"""

from collections.abc import Iterator

from jinja2 import nodes

from kvist_epp.prompt.chat import Style


def content_style(tree: nodes.Template) -> Style:
    """``openai`` when some loop runs over the content of a message."""
    try:
        message_names = {loop.target.name for loop in _message_loops(tree)}  # type: ignore[attr-defined]
    except AttributeError:  # unpacks its messages: the engine gives up the analysis as well
        return "string"
    inner = {id(loop) for macro in tree.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    loops = list(tree.find_all(nodes.For))
    if any(_is(loop.iter, name, "content") for loop in loops for name in message_names):
        return "openai"
    named = [loop for loop in loops if isinstance(loop.iter, nodes.Name)]
    if any(_name(loop.iter) == "content" and id(loop) not in inner for loop in named):
        return "openai"
    return "openai" if _macro_loops(tree, message_names) else "string"


def _message_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    names = _aliases(tree, "messages")
    return (loop for loop in tree.find_all(nodes.For) if any(_is(loop.iter, name) for name in names))


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    """The name and every variable set to it, or to a slice or a filter of it."""
    known = {name}
    assigns = [node for node in tree.find_all(nodes.Assign) if isinstance(node.target, nodes.Name)]
    while True:
        found = {_name(node.target) for node in assigns if any(_is(node.node, alias) for alias in known)}
        if found <= known:
            return known
        known |= found


def _macro_loops(tree: nodes.Template, message_names: set[str]) -> bool:
    """Whether a macro that is given a message's content loops over that parameter."""
    for macro in tree.find_all(nodes.Macro):
        given = _content_parameters(tree, macro, message_names)
        loops = (loop.iter for loop in macro.find_all(nodes.For))
        if any(isinstance(over, nodes.Name) and over.name in given for over in loops):
            return True
    return False


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, message_names: set[str]) -> set[str]:
    names = [argument.name for argument in macro.args]
    calls = [call for call in tree.find_all(nodes.Call) if _name(call.node) == macro.name]
    given = [pair for call in calls for pair in zip(names, call.args, strict=False)]
    given += [(item.key, item.value) for call in calls for item in call.kwargs]
    return {
        name
        for name, value in given
        if name in names and any(_is(value, m, "content") for m in message_names)
    }


def _is(node: nodes.Node, name: str, key: str | None = None) -> bool:
    """Whether a node reads the variable (or its ``key``), perhaps filtered, tested or sliced."""
    node = _bare(node)
    if key is None:
        return _name(node) == name
    if isinstance(node, nodes.Getitem):
        return _name(node.node) == name and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _name(node.node) == name and node.attr == key


def _bare(node: nodes.Node) -> nodes.Node:
    while isinstance(node, (nodes.Filter, nodes.Test)) or _is_slice(node):
        inner = node.node  # type: ignore[attr-defined]
        if inner is None:
            return node
        node = inner
    return node


def _is_slice(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)


def _name(node: nodes.Node) -> str:
    return node.name if isinstance(node, nodes.Name) else ""
