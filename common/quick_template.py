"""The chat template called without the library's wrapping, for conversations in which that changes nothing.

For each prompt transformers' apply_chat_template looks up again what is the same for all, copies messages and tools,
drops what is null in a turn and gives reasoning its other names: 17 us of the 60 that a question of 60 tokens takes to
render, and 120 of 280 with tools and their calls. None of it matters where nothing is null, there is no reasoning, and
all is of the types of JSON. That it does not is tried when the tokenizer is loaded; otherwise, and for all other
conversations, the library's own way is taken.

Where every turn is a role and a text, what the template does is seen once for all conversations of one shape, and done
without it (template_shapes.py).
"""

import hashlib
import inspect
import marshal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jinja2

from common.errors import TokenizerUnavailable
from common.template_kwargs import PROBES
from common.template_shapes import MOST_TURNS, Shape, WatchedTemplate

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None
Render = Callable[[Messages, Tools, Mapping[str, Any]], str]

# Shapes that are kept, characters that these have together, and of how many uses of one the library's text is compared.
_MOST_SHAPES, _MOST_CHARACTERS, _COMPARED = 512, 4_000_000, 1000
# To watch the template takes ten times as long as to run it, and many a shape never comes again.
_FIRST_WATCHED, _LAST_WATCHED = 2, 4
# The names of reasoning: the library puts it under the others, too.
_REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})
_ROLES = frozenset({"system", "developer", "user", "assistant"})
_USER = {"role": "user", "content": " 1 + 1 = ?\n"}
_ANSWER = {"role": "assistant", "content": "It is\n\n2. "}
_PROBES: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]] | None], ...] = (
    ([_USER], None),
    ([{"role": "system", "content": "Be exact."}, _USER], None),
    ([_USER, _ANSWER, _USER], None),
    (
        [
            {"role": "system", "content": ""},
            _USER,
            {"role": "assistant", "content": "<think>\na\n</think>\n\nb"},
            _USER,
        ],
        None,
    ),
    *(
        ([{key: value for key, value in turn.items() if key not in _REASONING} for turn in messages], tools)
        for messages, tools in PROBES
        if tools
    ),
)


def is_plain(messages: Messages) -> bool:
    """Whether every turn is a known role and a text and nothing else; then nothing is wrong with it, either."""
    return bool(messages) and all(
        len(turn) == 2 and turn.get("role") in _ROLES and type(turn.get("content")) is str for turn in messages
    )


def quick_render(tokenizer: Any, library: Render, kwargs: Mapping[str, Any]) -> Render | None:
    """A way to render plain conversations; None unless it gives what `library` gives, with `kwargs` and without."""
    try:
        from transformers import PreTrainedTokenizerBase  # noqa: PLC0415 - as in chat_template.py
        from transformers.utils.chat_template_utils import _compile_jinja_template  # noqa: PLC0415

        if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            return None  # a class of the model's own, which may do more
        source = tokenizer.get_chat_template()
        template = _compile_jinja_template(source)
        of_tools = tokenizer.get_chat_template(tools=[{}]) == source
        given = {**tokenizer.special_tokens_map, "tools": None, "documents": None, "add_generation_prompt": True}
        its_own = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
    except Exception:  # noqa: BLE001 - the function is the library's own: it may be another in the next version
        return None

    def usual(messages: Messages, tools: Tools, kwargs: Mapping[str, Any]) -> str:
        if not _is_as_the_template_sees_it(messages, tools, kwargs):
            return library(messages, tools, kwargs)
        return str(template.render({**given, **kwargs, "messages": list(messages), "tools": tools}))

    shapes = Shapes(template, source, given, usual)

    def quick(messages: Messages, tools: Tools, kwargs: Mapping[str, Any]) -> str:
        # Some arguments are not for the template, such as another `chat_template`.
        if not its_own.isdisjoint(kwargs) or (tools is not None and not of_tools):
            return library(messages, tools, kwargs)
        return (shapes.render if is_plain(messages) else usual)(messages, tools, kwargs)

    tried = [(*probe, more) for probe in _PROBES for more in ({}, kwargs)]
    return quick if all(_outcome(quick, *one) == _outcome(library, *one) for one in tried) else None


def _is_as_the_template_sees_it(messages: Messages, tools: Tools, kwargs: Mapping[str, Any]) -> bool:
    """Whether all that the library would change, but for making copies, is not there."""
    if tools is None and not kwargs and is_plain(messages):
        return True
    for turn in messages:
        if None in turn.values() or not _REASONING.isdisjoint(turn):
            return False
    try:
        marshal.dumps(cast("Any", (messages, tools, kwargs)), 2)  # takes the types of JSON, and none made of them
    except ValueError:
        return False
    return True


class Shapes:
    """Renders plain conversations by what a template was seen to do with another of the same shape, else by `usual`."""

    def __init__(self, template: jinja2.Template, source: str, given: Mapping[str, Any], usual: Render) -> None:
        self._given, self._usual = given, usual
        self._known: dict[Any, _Known] = {}
        self._characters = 0
        try:
            self._watched: WatchedTemplate | None = WatchedTemplate(template, source)
        except Exception:  # noqa: BLE001 - how templates are compiled is Jinja's own affair, and may change
            self._watched = None

    def render(self, messages: Messages, tools: Tools, kwargs: Mapping[str, Any]) -> str:
        """The text of a plain conversation. Raises what the template raises, and TokenizerUnavailable."""
        texts: list[str] = []
        shape: list[Any] = []
        for turn in messages:
            text = turn["content"]
            texts.append(text)
            shape += (turn["role"], text == "")
        known = self._look_up(shape, tools, kwargs)
        if known is None:
            return self._usual(messages, tools, kwargs)
        text = None if known.shape is None else known.shape.fill(texts)
        if text is None:
            usual = self._usual(messages, tools, kwargs)
            if known.shape is None and _FIRST_WATCHED <= known.uses <= _LAST_WATCHED:
                self._watch(known, messages, tools, kwargs, usual)
            return usual
        if known.uses % _COMPARED == 0 and text != self._usual(messages, tools, kwargs):
            raise TokenizerUnavailable(
                "the chat template made of a conversation what was not foreseen from another with the same roles; "
                "report this as a fault of tokenmill, with the template"
            )
        return text

    def _look_up(self, shape: list[Any], tools: Tools, kwargs: Mapping[str, Any]) -> "_Known | None":
        """What is known of a shape, counted as used once more; None if it was never seen, or cannot be known."""
        if self._watched is None or len(shape) > 2 * MOST_TURNS:
            return None
        if tools is not None or kwargs:
            try:
                # Unlike JSON it tells apart what Python does, 1 from 1.0 and None from NaN.
                shape.append(hashlib.blake2b(marshal.dumps(cast("Any", (tools, kwargs)), 2), digest_size=16).digest())
            except ValueError:
                return None
        known = self._known.get(key := tuple(shape))
        if known is None:
            if len(self._known) >= _MOST_SHAPES or self._characters >= _MOST_CHARACTERS:
                self._known.clear()
                self._characters = 0
            known = self._known[key] = _Known()
        known.uses += 1
        return known

    def _watch(self, known: "_Known", messages: Messages, tools: Tools, kwargs: Mapping[str, Any], usual: str) -> None:
        """See what the template does with the shape; if that gives the `usual` text here, it is kept."""
        assert self._watched is not None
        roles, texts = [turn["role"] for turn in messages], [turn["content"] for turn in messages]
        given = {**self._given, **kwargs, "tools": tools}
        try:
            shape = self._watched.shape(roles, [text == "" for text in texts], given)
        except Exception:  # noqa: BLE001 - unproven: whatever the template itself refuses, it has refused before
            return
        if shape.fill(texts) == usual:
            known.shape = shape
            self._characters += len(usual)


@dataclass(slots=True)
class _Known:
    uses: int = 0
    shape: Shape | None = None


def _outcome(render: Render, messages: Messages, tools: Tools, kwargs: Mapping[str, Any]) -> str | type[Exception]:
    """The text, or what is raised: a template may refuse a system turn."""
    try:
        return render(messages, tools, kwargs)
    except Exception as error:  # noqa: BLE001 - compared, not handled
        return type(error)
