"""Write the declarations of tools once: agents send the same tools with each turn.

Templates that declare tools in another language than JSON go through their parameters: 30 tools take 3 to 17
ms. Loops over ``tools`` and macros that depend on nothing else have their text kept with the tools, which
``tools.parse_tools`` keeps by their bytes.

Example: ``{% for tool in tools %}{{ declared(tool) }}{% endfor %}`` is run once for a list of tools, if the
macro ``declared`` uses its parameter only.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final

from jinja2 import nodes, pass_context, runtime, visitor

from kvist_epp.prompt.template_environment import HIDDEN, TemplateEnvironment
from kvist_epp.prompt.tools import Tool
from kvist_epp.prompt.traced_values import LITERALS

_FUNCTIONS: Final = frozenset(("namespace", "range", "dict", "raise_exception"))
"""Functions of templates that give the same for the same arguments."""
_LONG: Final = 256
"""Longest text that a macro may get besides tools so that what it writes is kept, in characters."""
_numbers: Final = itertools.count()
_HIDDEN_NAMES: Final = frozenset(("caller", "varargs", "kwargs"))
"""Arguments of a macro that it does not declare."""
_NEVER: Final = _HIDDEN_NAMES | {
    *("messages", "tools", "documents", "add_generation_prompt", "strftime_now", "random"),
    *("lipsum", "cycler", "joiner", "self"),
}
"""Variables that each render has, and functions and filters that give something else each time."""


class ToolTextEnvironment(TemplateEnvironment):
    """An environment that keeps what loops and macros write about tools alone."""

    def __init__(self) -> None:
        super().__init__()
        self._number = next(_numbers)
        """Of the environment, which texts are kept under: a template that is gone is not kept with them."""
        self._uses = _Uses(nodes.Template([], lineno=1))
        self.filters["_has_text"] = self._has_text
        self.filters["_text"] = self._text
        self.filters["_keep_text"] = self._keep_text

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        self._uses = _Uses(source)
        changed: nodes.Template = _ToolLoops(self._uses).visit(source)
        return super()._generate(changed, name, filename, defer_init)

    def call(self, context: runtime.Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call as usual; a macro that depends on tools alone writes its text once."""
        if type(callee) is not runtime.Macro or callee.name not in self._uses.pure:
            return super().call(context, callee, *args, **kwargs)
        named = [(name, value) for name, value in kwargs.items() if name not in HIDDEN]
        values = [*args, *(value for _, value in named)]
        tool = next((found for found in map(_first_tool, values) if found is not None), None)
        shown = [_identity(value) for value in values]
        if tool is None or None in shown or not self._uses.are_absent(context):
            return super().call(context, callee, *args, **kwargs)
        key = (self._number, callee.name, *shown, *(name for name, _ in named))
        text = tool.texts.get(key)
        return tool.texts.keep(key, super().call(context, callee, *args, **kwargs)) if text is None else text

    @pass_context
    def _has_text(self, context: runtime.Context, tools: Any, loop: int) -> bool:
        """Return whether the text of a loop is kept, which is then to be written."""
        tool = _first_tool(tools)
        kept = None if tool is None else tool.texts.get((self._number, loop, _identity(tools)))
        return kept is not None and self._uses.are_absent(context)

    def _text(self, tools: list[Tool], loop: int) -> str | None:
        return tools[0].texts.get((self._number, loop, _identity(tools)))

    @pass_context
    def _keep_text(self, context: runtime.Context, text: str, tools: Any, loop: int) -> str:
        tool, identity = _first_tool(tools), _identity(tools)
        if tool is not None and identity is not None and self._uses.are_absent(context):
            tool.texts.keep((self._number, loop, identity), text)
        return text


class _Uses:
    """The variables that macros and loops of a template use from around them.

    A variable that is not set in all branches of a macro is looked for outside. If the template sets none of
    that name there it is *absent*: the text is the same as long as no request brings such a variable.
    """

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        macros = list(tree.find_all(nodes.Macro))
        self._inside = {id(name) for macro in macros for name in macro.find_all(nodes.Name)}
        names = [macro.name for macro in macros]
        outermost = [node.name for node in tree.body if isinstance(node, nodes.Macro)]
        self._macros = set(names)
        self._absent: set[str] = set()
        self.pure: frozenset[str] = frozenset(
            name for name in outermost if names.count(name) == 1 and name not in self._set_beside(())
        )
        """Macros whose text depends on their arguments alone."""
        while True:
            pure = frozenset(
                macro.name for macro in macros if macro.name in self.pure and self._is_pure(macro)
            )
            if pure == self.pure:
                break
            self.pure = pure

    def is_pure(self, loop: nodes.For) -> bool:
        """Return whether the text of a loop depends on its items alone."""
        return self._is_pure(loop, loop.iter.name)  # type: ignore[attr-defined]

    def are_absent(self, context: runtime.Context) -> bool:
        """Return whether this render has none of the variables that were taken for absent."""
        return not any(name in context for name in self._absent)

    def _is_pure(self, node: nodes.Macro | nodes.For, *known: str) -> bool:
        used = _outer_names(node) - self.pure - _FUNCTIONS - set(known)
        if used & (_NEVER | self._macros | self._set_beside(node.find_all(nodes.Name))):
            return False
        self._absent |= used
        return True

    def _set_beside(self, inside: Iterable[nodes.Name]) -> set[str]:
        """Return the names that are set outside of macros and of these places."""
        left_out = self._inside | {id(name) for name in inside}
        found = self._tree.find_all(nodes.Name)
        return {name.name for name in found if name.ctx != "load" and id(name) not in left_out}


class _ToolLoops(visitor.NodeTransformer):
    """Lets loops over the tools write the text that is kept."""

    def __init__(self, uses: _Uses) -> None:
        self._uses = uses
        self._found = 0

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802 jinja2 calls it so
        """Leave loops in macros as they are: they use parameters and variables of the macro."""
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 as above
        over_tools = isinstance(node.iter, nodes.Name) and node.iter.name == "tools"
        if not over_tools or not self._uses.is_pure(node):
            return self.generic_visit(node)
        self._found += 1
        line = node.lineno

        def filtered(value: nodes.Expr | None, name: str, *arguments: nodes.Expr) -> nodes.Filter:
            number = nodes.Const(self._found)
            return nodes.Filter(value, name, [*arguments, number], [], None, None, lineno=line)

        tools = nodes.Name("tools", "load", lineno=line)
        kept = nodes.Output([filtered(tools, "_text")], lineno=line)
        written = nodes.FilterBlock([node], filtered(None, "_keep_text", tools), lineno=line)
        return nodes.If(filtered(tools, "_has_text"), [kept], [], [written], lineno=line)


def _outer_names(node: nodes.Macro | nodes.For) -> set[str]:
    """Return the variables that a loop or a macro may read before it sets them."""
    filters = {used.name for used in node.find_all(nodes.Filter)}
    random = (filters | {text.value for text in node.find_all(nodes.Const) if type(text.value) is str}) & {
        "random"
    }
    if isinstance(node, nodes.For):
        return _read_by([node], set()) | random
    defaults = _loaded(node.defaults, set())
    return defaults | _read_by(node.body, {argument.name for argument in node.args}) | random


def _read_by(body: Sequence[nodes.Node], known: set[str]) -> set[str]:
    """Return the variables that statements read before they are set; adds to ``known`` what is set then.

    What one branch or one round of a loop sets is known there only, and behind a condition what all its
    branches set.
    """
    read: set[str] = set()
    for node in body:
        if isinstance(node, nodes.Assign):
            read |= _loaded([node.node], known)
            read |= {name.name for name in _names(node.target) if isinstance(name, nodes.NSRef)} - known
            known |= {name.name for name in _names(node.target) if isinstance(name, nodes.Name)}
        elif isinstance(node, nodes.If):
            read |= _loaded([node.test, *(other.test for other in node.elif_)], known)
            branches = [node.body, *(other.body for other in node.elif_), node.else_]
            sets = [set(known) for _ in branches]
            for branch, of_branch in zip(branches, sets, strict=True):
                read |= _read_by(branch, of_branch)
            known |= set.intersection(*sets)
        elif isinstance(node, nodes.For):
            read |= _loaded([node.iter], known)
            of_round = known | {name.name for name in _names(node.target)} | {"loop"}
            read |= _loaded([node.test] if node.test is not None else [], of_round)
            read |= _read_by(node.body, of_round) | _read_by(node.else_, set(known))
        elif isinstance(node, nodes.AssignBlock):
            read |= _read_by(node.body, set(known))
            read |= _loaded([node.filter] if node.filter is not None else [], known)
            read |= {name.name for name in _names(node.target) if isinstance(name, nodes.NSRef)} - known
            known |= {name.name for name in _names(node.target) if isinstance(name, nodes.Name)}
        else:
            read |= _loaded([node], known)
    return read


def _loaded(expressions: Iterable[nodes.Node], known: set[str]) -> set[str]:
    """Return the variables that expressions read, and all that other statements name."""
    return {name.name for node in expressions for name in _names(node)} - known


def _names(node: nodes.Node) -> list[nodes.Name | nodes.NSRef]:
    found = [node, *node.find_all((nodes.Name, nodes.NSRef))]
    return [name for name in found if isinstance(name, (nodes.Name, nodes.NSRef))]


def _first_tool(value: Any) -> Tool | None:
    """Return a tool, or the first of a list of tools."""
    if type(value) is list and value:
        value = value[0]
    return value if type(value) is Tool else None


def _identity(value: Any) -> Any:
    """Return what tells a tool, tools or a literal from others; None: the value is something else."""
    kind = type(value)
    if kind is float:
        return kind, repr(value)
    if kind in LITERALS:
        return (kind, value) if kind is not str or len(value) <= _LONG else None
    if kind is Tool:
        return kind, id(value)
    if kind is list and all(type(item) is Tool for item in value):
        return (kind, *map(id, value))
    return None
