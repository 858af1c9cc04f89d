"""Arguments of a chat template that change nothing: a misspelt one passes without a word, and so do its prompts."""

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, Mapping[str, Any]], str]

_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number", "description": "a number"}}},
        },
    }
]
_USER: dict[str, Any] = {"role": "user", "content": "1 + 1 = ?"}
_CALL = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
_LOOP: list[dict[str, Any]] = [
    {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "functions.add:0", "name": "add", "content": "2"},
]
_ANSWER: dict[str, Any] = {"role": "assistant", "content": "2", "reasoning_content": "It is 2."}
# Between them they reach what a template does: a question, a system prompt, old reasoning, tools, a tool loop.
PROBES: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]] | None], ...] = (
    ([_USER], None),
    ([{"role": "system", "content": "Be exact."}, _USER, _ANSWER, _USER], None),
    ([_USER], _TOOLS),
    ([_USER, *_LOOP], _TOOLS),
    ([_USER, *_LOOP, _ANSWER, _USER], _TOOLS),
)
# What a template raises that cannot render a conversation.
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
# What the library gives to every template; no argument of a configuration.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "tools_ts_str", "raise_exception", "strftime_now"}
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # a tag of transformers' own


def unread_kwargs(
    render: Render,
    template: str,
    kwargs: Mapping[str, Any],
    own: Mapping[str, Any] | None = None,
    where: str = "[tokenizer]",
) -> list[str]:
    """A sentence for each argument that changes no prompt, though it may name the one that was meant.

    `own` are those of `kwargs` that are asked for, by default all; `where` is the place where they stand. One that the
    template reads is let alone where it says what holds anyway, as `thinking = true` does.
    """
    known = template_variables(template)
    return [
        _sentence(where, key, value, known)
        for key, value in (kwargs if own is None else own).items()
        if not _changes(render, kwargs, key) and not (key in known and _is_default(render, kwargs, key))
    ]


def _changes(render: Render, kwargs: Mapping[str, Any], key: str) -> bool:
    without = {name: value for name, value in kwargs.items() if name != key}
    return _probed(render, kwargs) != _probed(render, without)


def _is_default(render: Render, kwargs: Mapping[str, Any], key: str) -> bool:
    """Whether another value of the same kind changes something. Only a switch has one that can be tried."""
    value = kwargs[key]
    return not isinstance(value, str) or not any(_changes(render, {**kwargs, key: one}, key) for one in (True, False))


def _probed(render: Render, kwargs: Mapping[str, Any]) -> list[str | None]:
    texts: list[str | None] = []
    for messages, tools in PROBES:
        try:
            texts.append(render(messages, tools, kwargs))
        except TEMPLATE_ERRORS:  # it may refuse tools, or a system prompt: that is an answer, too
            texts.append(None)
    return texts


def _sentence(where: str, key: str, value: Any, known: set[str]) -> str:
    start = f"{where} chat_template_kwargs: {key} = {value!r} changes no prompt"
    if key in known:
        return f"{start}; its template reads it, but not as a text: write true or false without quotes"
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.6)
    if near:
        return f"{start}; did you mean {near[0]}, which this chat template reads?"
    rest = f"it reads {', '.join(sorted(known))}" if known else "it reads none"
    return f"{start}; this chat template does not know it ({rest})"


def template_variables(template: str) -> set[str]:
    """The arguments that a chat template reads; empty if it cannot be parsed."""
    environment = jinja2.Environment(extensions=[jinja2.ext.loopcontrols], autoescape=True)
    try:
        parsed = environment.parse(_GENERATION.sub("", template))
    except jinja2.TemplateError:
        return set()
    # What is set within a branch counts as undeclared, too. It is an argument if the template asks whether it is given.
    stored = {name.name for name in parsed.find_all(jinja2.nodes.Name) if name.ctx == "store"}
    tests = (test for test in parsed.find_all(jinja2.nodes.Test) if test.name in {"defined", "undefined"})
    asked_for = {test.node.name for test in tests if isinstance(test.node, jinja2.nodes.Name)}
    found = jinja2.meta.find_undeclared_variables(parsed) - (stored - asked_for) - _GIVEN - set(environment.globals)
    return {name for name in found if not name.endswith("_token")}
