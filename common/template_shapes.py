"""A chat template run once for all conversations of one shape, where it can be proven that it treats them alike.

A shape is what a template may decide by: the roles of the turns, which of them are empty, tools, and arguments. The
template is run with one character in the place of each text, and every operation of it is watched. Where it only writes
texts, what it wrote is its text for every conversation of this shape, with other texts in place of the characters.
Jinja takes 45 us for a question, this 3 us.

What a template may ask of a text is whether a method of str does the same to it as to the character: that `strip`
leaves it as it is, that it has no `</think>` to be split at. Each such question is a condition that is tried on each
row. Anything else that a template does with a text, such as to take its length or to write it as JSON, or a call of
what is not the same each time, such as the date, leaves the shape to Jinja; so do conditions that do not hold.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import jinja2.runtime
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

# One character stands for each text: private ones of plane 15, so that no text of a template has them.
_FIRST = 0xF0000
MOST_TURNS = 64
_STAND_IN = re.compile(f"[{chr(_FIRST)}-{chr(_FIRST + MOST_TURNS - 1)}]")
_PLANE = re.compile(f"[{chr(_FIRST)}-{chr(0xFFFFF)}]")

# Methods of str that answer by their arguments alone. (`format` of a text could reach what is not in the arguments.)
_ASKED = frozenset(
    {"strip", "lstrip", "rstrip", "split", "rsplit", "startswith", "endswith", "removeprefix", "removesuffix"}
    | {"find", "count", "replace"}
)
# Tests and filters that look at the type of a value, or at the length of a list, and filters that hand it on.
_TESTS = frozenset({"string", "none", "defined", "undefined", "mapping", "iterable", "sequence", "boolean", "number"})
_HANDED_ON = frozenset({"default", "d"})
_OF_LISTS = frozenset({"length", "count", "list", "first", "last"})
_SCALARS = (type(None), bool, int, float, range, jinja2.Undefined)
# Whatever else a template is made of, such as an include or a filtered block, is left to Jinja.
_KNOWN_NODES = frozenset(
    {nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Macro, nodes.CallBlock, nodes.With}
    | {nodes.ExprStmt, nodes.Assign, nodes.AssignBlock, nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple, nodes.List}
    | {nodes.Dict, nodes.Pair, nodes.Keyword, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem}
    | {nodes.Getattr, nodes.Slice, nodes.Concat, nodes.Compare, nodes.Operand, nodes.Mul, nodes.Div, nodes.FloorDiv}
    | {nodes.Add, nodes.Sub, nodes.Mod, nodes.Pow, nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Pos}
    | {nodes.Continue, nodes.Break, nodes.Scope, nodes.ExtensionAttribute}
)


class Unproven(Exception):
    """The template does with a text what need not be the same with another one."""


class _Condition(NamedTuple):
    """What a row's text must answer: `wanted`, or with None itself, or itself alone in a list."""

    number: int
    method: Any
    arguments: tuple[Any, ...]
    wanted: Any
    alone: bool

    def holds(self, text: str) -> bool:
        answer = self.method(text, *self.arguments)
        if self.wanted is not None:
            return bool(answer == self.wanted)
        return bool(answer == [text] if self.alone else answer == text)


class Shape(NamedTuple):
    """The text of every conversation of one shape: `parts` are what the template wrote, and the numbers of texts."""

    parts: tuple[str | int, ...]
    conditions: tuple[_Condition, ...]

    def fill(self, texts: Sequence[str]) -> str | None:
        """The text with these contents of the turns; None if they are not such as the shape was proven for."""
        for condition in self.conditions:
            if not condition.holds(texts[condition.number]):
                return None
        return "".join([texts[part] if type(part) is int else part for part in self.parts])  # type: ignore[misc]


class WatchedTemplate:
    """A template as Jinja would run it, each operation watched. Raises Unproven where it cannot be."""

    def __init__(self, template: jinja2.Template, source: str) -> None:
        environment: Any = template.environment
        if environment.autoescape or environment.finalize is not None:
            raise Unproven("texts are not written as they are")
        own = environment.overlay()
        parsed = own.parse(source)
        for node in parsed.find_all(nodes.Node):
            text = node.data if isinstance(node, nodes.TemplateData) else getattr(node, "value", "")
            if type(node) not in _KNOWN_NODES or (isinstance(text, str) and _PLANE.search(text)):
                raise Unproven(f"there is a {type(node).__name__}")
        self._watch = _Watch(environment.globals)
        own.filters = {**environment.filters, **self._watch.filters()}
        watched = _Rewriter().visit(parsed).set_environment(own).set_lineno(1)
        self._template = own.from_string(watched, globals={"_method": self._watch.method, "_call": self._watch.call})

    def shape(self, roles: Sequence[str], empty: Sequence[bool], given: Mapping[str, Any]) -> Shape:
        """What the template makes of turns with these roles. Raises Unproven, and whatever the template raises."""
        texts = ["" if none else chr(_FIRST + number) for number, none in enumerate(empty)]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        if len(roles) > MOST_TURNS or _has_stand_in(roles) or _has_stand_in(list(given.values())):
            raise Unproven("it is too long, or holds what stands for its texts")
        self._watch.conditions.clear()
        text = self._template.render({**given, "messages": messages})
        parts: list[str | int] = []
        at = 0
        for found in _STAND_IN.finditer(text):
            parts += (text[at : found.start()], ord(found[0]) - _FIRST)
            at = found.end()
        parts.append(text[at:])
        return Shape(tuple(part for part in parts if part != ""), tuple(dict.fromkeys(self._watch.conditions)))


def _has_stand_in(value: Any) -> bool:
    """Whether a text stands in `value`; of what cannot be looked into, yes."""
    if isinstance(value, str):
        return _PLANE.search(value) is not None
    if isinstance(value, Mapping):
        return any(_has_stand_in(one) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple):
        return any(map(_has_stand_in, value))
    return not isinstance(value, _SCALARS)


class _Watch:
    """What the operations of a watched template go through."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.conditions: list[_Condition] = []
        self._callable = tuple(names[name] for name in ("range", "raise_exception", "namespace") if name in names)

    def filters(self) -> dict[str, Any]:
        """By the name that _Rewriter writes."""
        mine = (self._known, self._written, self._opened, self._listed, self._plus, self._equals, self._within)
        return {f"_{one.__name__}": one for one in (*mine, self._trim)}

    def _ask(self, text: str, name: str, *arguments: Any) -> Any:
        """The answer of a method of a text; a condition, if the text is a row's."""
        self._known(arguments)
        answer = getattr(text, name)(*arguments)
        if not _has_stand_in(text):
            return answer
        if len(text) > 1:
            raise Unproven(f"{name} of more than one text")
        same, alone = answer == text, answer == [text]
        if not same and not alone:
            self._known(answer)
            if answer is None:
                raise Unproven(f"{name} answers nothing")
        wanted = None if same or alone else answer
        self.conditions.append(_Condition(ord(text) - _FIRST, getattr(str, name), arguments, wanted, alone))
        return answer

    def _known(self, value: Any) -> Any:
        if _has_stand_in(value):
            raise Unproven("a text is looked at")
        return value

    def _written(self, value: Any) -> Any:
        return value if type(value) is str else self._known(value)

    def _opened(self, value: Any) -> Any:
        """What a part of is taken: of a list or an object any, of a text none."""
        return self._known(value) if isinstance(value, str) else value

    def _listed(self, value: Any) -> Any:
        return value if isinstance(value, list) else self._known(value)

    def _plus(self, left: Any, right: Any) -> Any:
        if not (type(left) is type(right) and type(left) in (str, list)):
            self._known([left, right])
        return left + right

    def _equals(self, left: Any, right: Any) -> Any:
        if left is None or right is None:
            return left == right
        if type(left) is str and type(right) is str and _has_stand_in(left) != _has_stand_in(right):
            return self._ask(left, "__eq__", right) if _has_stand_in(left) else self._ask(right, "__eq__", left)
        return self._known(left) == self._known(right)

    def _within(self, left: Any, right: Any) -> Any:
        self._known(left)
        if type(right) is str and type(left) is str:
            return self._ask(right, "__contains__", left)
        return left in right if isinstance(right, dict) else left in self._known(right)

    def _trim(self, value: Any, chars: str | None = None) -> Any:
        return self._ask(value if type(value) is str else str(self._known(value)), "strip", chars)

    @jinja2.pass_context
    def method(self, context: Any, base: Any, name: str, *arguments: Any, **more: Any) -> Any:
        """A call of a method by name."""
        if type(base) is str and name in _ASKED and not more:
            return self._ask(base, name, *arguments)
        if isinstance(base, dict) and name == "get":
            self._known(arguments[:1])
        elif not isinstance(base, jinja2.runtime.LoopContext):
            self._known([base, *arguments, more])
        else:
            self._known([*arguments, more])
        found = context.environment.getattr(base, name)
        return context.environment.call(context, found, *arguments, **more)

    @jinja2.pass_context
    def call(self, context: Any, function: Any, *arguments: Any, **more: Any) -> Any:
        """A call of a function: a macro, or one whose answer is the same each time."""
        if not isinstance(function, jinja2.runtime.Macro) and not any(function is one for one in self._callable):
            raise Unproven(f"{function!r} is called")
        return context.environment.call(context, function, *arguments, **more)


class _Rewriter(NodeTransformer):
    """Puts _Watch between a template and all that it does with a value.

    Nothing is put where truth is asked for: a text that is not empty is true, whatever it says.
    """

    def generic_visit(self, node: nodes.Node, *_args: Any, **_kwargs: Any) -> nodes.Node:
        """The node with its parts rewritten, and then itself."""
        rewrite = getattr(self, f"of_{type(node).__name__.lower()}", None)
        made: nodes.Node = super().generic_visit(node)
        return rewrite(made) if rewrite else made

    def of_output(self, node: nodes.Output) -> nodes.Node:
        node.nodes = [one if isinstance(one, nodes.TemplateData) else _through("written", one) for one in node.nodes]
        return node

    def of_concat(self, node: nodes.Concat) -> nodes.Node:
        node.nodes = [_through("written", one) for one in node.nodes]
        return node

    def of_add(self, node: nodes.Add) -> nodes.Node:
        return _through("plus", node.left, node.right)

    def _arithmetic(self, node: Any) -> nodes.Node:
        for name in ("left", "right", "node"):
            if hasattr(node, name):
                setattr(node, name, _through("known", getattr(node, name)))
        made: nodes.Node = node
        return made

    of_mul = of_div = of_floordiv = of_sub = of_mod = of_pow = of_neg = of_pos = _arithmetic

    def of_compare(self, node: nodes.Compare) -> nodes.Node:
        if len(node.ops) == 1 and node.ops[0].op in {"eq", "ne", "in", "notin"}:
            op, right = node.ops[0].op, node.ops[0].expr
            made = _through("equals" if op in {"eq", "ne"} else "within", node.expr, right)
            return nodes.Not(made) if op in {"ne", "notin"} else made
        node.expr = _through("known", node.expr)
        for one in node.ops:
            one.expr = _through("known", one.expr)
        return node

    def of_test(self, node: nodes.Test) -> nodes.Node:
        if node.name not in _TESTS:
            node.node = _through("known", node.node)
            node.args = [_through("known", one) for one in node.args]
        return self._plain_call(node)

    def of_filter(self, node: nodes.Filter) -> nodes.Node:
        if node.node is None or node.name == "random":
            raise Unproven(f"the filter {node.name} is of a block, or not the same each time")
        if node.name == "trim" and not node.kwargs:
            return _through("trim", node.node, *node.args)
        if node.name == "string":
            node.node = _through("written", node.node)
            return self._plain_call(node)
        if node.name not in _HANDED_ON:
            node.node = _through("listed" if node.name in _OF_LISTS else "known", node.node)
            node.args = [_through("known", one) for one in node.args]
            for one in node.kwargs:
                one.value = _through("known", one.value)
        return self._plain_call(node)

    def of_call(self, node: nodes.Call) -> nodes.Node:
        self._plain_call(node)
        if isinstance(node.node, nodes.Getattr):
            base: Any = node.node.node  # through `opened`, which is for parts of it
            node.args = [base.node, nodes.Const(node.node.attr), *node.args]
            node.node = nodes.Name("_method", "load")
        else:
            node.args = [node.node, *node.args]
            node.node = nodes.Name("_call", "load")
        return node

    def of_getattr(self, node: nodes.Getattr) -> nodes.Node:
        node.node = _through("opened", node.node)
        return node

    def of_getitem(self, node: nodes.Getitem) -> nodes.Node:
        node.node = _through("opened", node.node)
        parts = ("start", "stop", "step") if isinstance(node.arg, nodes.Slice) else ()
        for name in parts:
            if getattr(node.arg, name) is not None:
                setattr(node.arg, name, _through("known", getattr(node.arg, name)))
        if not parts:
            node.arg = _through("known", node.arg)
        return node

    def of_pair(self, node: nodes.Pair) -> nodes.Node:
        node.key = _through("known", node.key)
        return node

    def of_for(self, node: nodes.For) -> nodes.Node:
        node.iter = _through("listed", node.iter)
        return node

    def of_assignblock(self, node: nodes.AssignBlock) -> nodes.Node:
        if node.filter is not None:
            raise Unproven("a filtered block")
        return node

    def _plain_call(self, node: Any) -> nodes.Node:
        if node.dyn_args or node.dyn_kwargs:
            raise Unproven("arguments in a list")
        made: nodes.Node = node
        return made


def _through(name: str, value: Any, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, f"__{name}", list(arguments), [], None, None)
