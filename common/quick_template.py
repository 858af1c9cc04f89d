"""The chat template called without the library's wrapping, for conversations in which that changes nothing.

For each prompt transformers' apply_chat_template looks up again what is the same for all, copies the messages, drops
what is null in them and gives reasoning its other names: 17 us of the 60 that a question of 60 tokens takes to render.
None of it matters where every turn is a role and a text, and there are no tools. That it does not is tried when the
tokenizer is loaded; otherwise, and for all other conversations, the library's own way is taken.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Mapping[str, Any]], str]

_ROLES = frozenset({"system", "developer", "user", "assistant"})
_USER = {"role": "user", "content": " 1 + 1 = ?\n"}
_ANSWER = {"role": "assistant", "content": "It is\n\n2. "}
_PROBES: tuple[list[dict[str, str]], ...] = (
    [_USER],
    [{"role": "system", "content": "Be exact."}, _USER],
    [_USER, _ANSWER, _USER],
    [{"role": "system", "content": ""}, _USER, {"role": "assistant", "content": "<think>\na\n</think>\n\nb"}, _USER],
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
        render = _compile_jinja_template(tokenizer.get_chat_template()).render
        given = {**tokenizer.special_tokens_map, "tools": None, "documents": None, "add_generation_prompt": True}
        its_own = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
    except Exception:  # noqa: BLE001 - the function is the library's own: it may be another in the next version
        return None

    def quick(messages: Messages, kwargs: Mapping[str, Any]) -> str:
        if not its_own.isdisjoint(kwargs):  # not for the template, such as another `chat_template`
            return library(messages, kwargs)
        return str(render({**given, **kwargs, "messages": messages}))

    tried = [(probe, more) for probe in _PROBES for more in ({}, kwargs)]
    return quick if all(_outcome(quick, *one) == _outcome(library, *one) for one in tried) else None


def _outcome(render: Render, messages: Messages, kwargs: Mapping[str, Any]) -> str | type[Exception]:
    """The text, or what is raised: a template may refuse a system turn."""
    try:
        return render(messages, kwargs)
    except Exception as error:  # noqa: BLE001 - compared, not handled
        return type(error)
