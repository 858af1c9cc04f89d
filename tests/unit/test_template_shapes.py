"""What a template was seen to do with one conversation is its text for all of that shape, or is not taken."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import _compile_jinja_template

from common.errors import TokenizerUnavailable
from common.quick_template import Messages, Shapes, Tools
from common.template_shapes import MOST_TURNS, Unproven, WatchedTemplate
from tests.conftest import REPO, SHARED

EXAMPLE = (REPO / "examples" / "tokenizer" / "chat_template.jinja").read_text(encoding="utf-8")
REAL = sorted((SHARED / "data" / "templates").glob("*.jinja"))
ROLES = ["user", "assistant", "user"]
GIVEN = {"tools": None, "documents": None, "add_generation_prompt": True, "bos_token": "<s>"}
USER = {"role": "user", "content": "a"}
EACH = "{% for m in messages %}<{{ m.role }}>BODY{% endfor %}{% if add_generation_prompt %}<go>{% endif %}"
# By what they do with a text.
PROVEN = {
    "written": "{{ m.content }}",
    "written by key": "{{ m['content'] }}{{ m.get('content', '') }}",
    "joined": "{{ '[' ~ m['content'] ~ ']' }}{{ '(' + m.content + ')' }}",
    "trimmed": "{{ m.content | trim }}{{ m.content.strip() }}",
    "without thoughts": "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}",
    "asked for its start": "{% if m.content.startswith('<') %}tag{% else %}{{ m.content }}{% endif %}",
    "asked whether it is one": "{% if m.content is string and m.content is not none %}{{ m.content }}{% endif %}",
    "asked whether it is empty": "{% if m.content %}{{ m.content }}{% else %}none{% endif %}{{ m.content or 'none' }}",
    "compared": "{% if m.content == 'a' %}A{% elif m.content != none %}{{ m.content }}{% endif %}",
    "through a macro": "{% macro f(x) %}<b>{{ x }}</b>{% endmacro %}{{ f(m.content) }}",
    "through a block": "{% set x %}{{ m.content }}{% endset %}{{ x }}",
    "through a namespace": "{% set n = namespace(x='') %}{% set n.x = m.content %}{{ n.x }}",
    "through a list": "{{ [m.content, 'b'][0] }}{{ {'k': m.content}['k'] }}",
    "of the turns before": "{% if not loop.first %}{{ messages[loop.index0 - 1].content }}{% endif %}{{ m.content }}",
    "of the last": "{% if loop.last %}{{ messages[-1]['content'] }}{{ messages | length }}{% endif %}",
    "of a part of the turns": "{% for o in messages[1:] %}{{ o.content }}{% endfor %}",
}
UNPROVEN = {
    "length": "{{ m.content | length }}",
    "as JSON": "{{ m.content | tojson }}",
    "in capitals": "{{ m.content | upper }}",
    "one character": "{{ m.content[0] }}",
    "a part": "{{ m.content[:3] }}",
    "each character": "{% for c in m.content %}{{ c }} {% endfor %}",
    "the turn as it is": "{{ m }}",
    "the turn as JSON": "{{ m | tojson }}",
    "all keys": "{% for key, value in m.items() %}{{ key }}={{ value }}{% endfor %}",
    "a text around it": "{{ ('<' ~ m.content ~ '>').replace('<<', '<') }}",
    "a block around it": "{% set x %}{{ m.content }}{% endset %}{{ (x ~ ' ').strip() }}",
    "compared in order": "{% if m.content < 'b' %}a{% endif %}",
    "among others": "{% if m.content in ['a', 'b'] %}a{% endif %}",
    "in a text": "{% if m.content in 'abc' %}a{% endif %}",
    "as a key": "{{ {'a': 1}.get(m.content, 2) }}{{ {'a': 1}[m.content] }}",
    "made a key": "{{ {m.content: 1}['a'] }}",
    "formatted": "{{ '%s' % m.content }}",
    "repeated": "{{ m.content * 2 }}",
    "joined by a method": "{{ ', '.join([m.content]) }}",
    "sorted": "{% for o in messages | sort(attribute='content') %}{{ o.content }}{% endfor %}",
    "chosen": "{% for o in messages | selectattr('content', 'equalto', 'a') %}{{ o.role }}{% endfor %}",
    "a filtered block": "{% filter upper %}{{ m.content }}{% endfilter %}",
    "a filtered set": "{% set x | trim %}{{ m.content }}{% endset %}{{ x }}",
    "changed": "{{ loop.changed(m.content) }}{{ m.content }}",
    "the date": "{{ strftime_now('%Y') }}{{ m.content }}",
    "by chance": "{{ ['a', 'b'] | random }}{{ m.content }}",
    "more arguments": "{{ m.content.split(*['a']) }}",
}
TEXTS = st.text(st.sampled_from("ab <>/\n\t\u2028\U000f0000\U00100000{}'\""), max_size=6) | st.sampled_from(
    ["a", "</think>", "<think>\nx\n</think>\n\ny", "<tool_response>", " a ", "{{ 1 }}", ""]
)
TURNS = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXTS}), min_size=1)


def template_of(body: str) -> str:
    return EACH.replace("BODY", body)


def own(source: str) -> Any:
    template = _compile_jinja_template(source)

    def render(messages: Messages, tools: Tools, kwargs: Mapping[str, Any]) -> str:
        return str(template.render({**GIVEN, **kwargs, "messages": messages, "tools": tools}))

    return render


def shapes_of(source: str) -> Shapes:
    return Shapes(_compile_jinja_template(source), source, GIVEN, own(source))


def watch(source: str, roles: list[str]) -> Any:
    return WatchedTemplate(_compile_jinja_template(source), source).shape(roles, [False] * len(roles), GIVEN)


@pytest.mark.parametrize("body", PROVEN.values(), ids=PROVEN)
def test_what_is_the_same_for_all_is_seen(body: str) -> None:
    source = template_of(body)
    messages = [{"role": role, "content": f"{role}."} for role in ROLES]
    assert watch(source, ROLES).fill([f"{role}." for role in ROLES]) == own(source)(messages, None, {})


@pytest.mark.parametrize("body", UNPROVEN.values(), ids=UNPROVEN)
def test_what_may_differ_is_refused(body: str) -> None:
    with pytest.raises(Unproven):
        watch(template_of(body), ROLES)


@pytest.mark.parametrize("source", [EXAMPLE, *(path.read_text(encoding="utf-8") for path in REAL)])
def test_the_templates_that_are_used_are_seen_through(source: str) -> None:
    for roles in (["user"], ["system", "user"], ["system", "user", "assistant", "user"]):
        assert watch(source, roles).parts


@settings(deadline=None, max_examples=15)
@given(conversations=st.lists(TURNS, min_size=1, max_size=4))
@example(conversations=[[{"role": "user", "content": "a"}], [{"role": "user", "content": " a "}]])
@pytest.mark.parametrize("body", [*PROVEN.values(), *(UNPROVEN[n] for n in UNPROVEN if n != "by chance")])
def test_every_text_is_jinjas(body: str, conversations: list[list[dict[str, str]]]) -> None:
    source = template_of(body)
    shapes, render = shapes_of(source), own(source)
    for messages in conversations * 3:
        try:
            wanted: str | type[Exception] = render(messages, None, {})
        except Exception as error:  # noqa: BLE001 - compared
            wanted = type(error)
        try:
            made: str | type[Exception] = shapes.render(messages, None, {})
        except Exception as error:  # noqa: BLE001 - compared
            made = type(error)
        assert made == wanted


@settings(deadline=None, max_examples=40)
@given(conversations=st.lists(TURNS, min_size=1, max_size=4), thinking=st.sampled_from([None, False, True]))
@pytest.mark.parametrize("source", [EXAMPLE, *(path.read_text(encoding="utf-8") for path in REAL)])
def test_every_text_of_a_real_template_is_jinjas(
    source: str, conversations: list[list[dict[str, str]]], thinking: bool | None
) -> None:
    shapes, render = shapes_of(source), own(source)
    kwargs = {} if thinking is None else {"thinking": thinking}
    for messages in conversations * 3:
        assert shapes.render(messages, None, kwargs) == render(messages, None, kwargs)


def test_tools_and_arguments_are_of_the_shape() -> None:
    source = "{{ tools | tojson }}{{ a | default('-') }}{{ messages[0].content }}"
    shapes, render = shapes_of(source), own(source)
    values: list[Any] = [1, 1.0, True, "1", None, float("nan"), [1], {"1": 1}]
    for value in values * 3:
        for tools in ([{"name": "f", "default": value}], None):
            messages = [{"role": "user", "content": f"{value}"}]
            assert shapes.render(messages, tools, {"a": value}) == render(messages, tools, {"a": value})


def test_what_stands_for_texts_may_stand_in_tools_and_in_the_template() -> None:
    mark = "\U000f0000"
    messages = [{"role": "user", "content": "a"}]
    for source, tools in (("{{ tools[0].x }}{{ messages[0].content }}", [{"x": mark}]), (f"{mark}{EXAMPLE}", None)):
        shapes, render = shapes_of(source), own(source)
        for _ in range(4):
            assert shapes.render(messages, tools, {}) == render(messages, tools, {})


class Counted:
    """Jinja's own way, counted, and wrong from some call on."""

    def __init__(self, source: str, wrong_after: int = 10**9) -> None:
        self.calls = 0
        self._render, self._wrong_after = own(source), wrong_after

    def __call__(self, messages: Messages, tools: Tools, kwargs: Mapping[str, Any]) -> str:
        self.calls += 1
        return str(self._render(messages, tools, kwargs)) + ("!" if self.calls > self._wrong_after else "")


def test_a_shape_is_rendered_by_jinja_twice_and_then_at_every_thousandth_time() -> None:
    usual = Counted(EXAMPLE)
    shapes = Shapes(_compile_jinja_template(EXAMPLE), EXAMPLE, GIVEN, usual)
    for number in range(2500):
        assert f"\n{number}<" in shapes.render([{"role": "user", "content": f"{number}"}], None, {})
    assert usual.calls == 2 + 2


def test_a_difference_that_is_found_later_ends_the_job() -> None:
    shapes = Shapes(_compile_jinja_template(EXAMPLE), EXAMPLE, GIVEN, Counted(EXAMPLE, wrong_after=2))
    for _ in range(999):
        shapes.render([USER], None, {})
    with pytest.raises(TokenizerUnavailable, match="report this"):
        shapes.render([USER], None, {})


def test_a_difference_that_is_found_at_first_is_jinjas_to_say() -> None:
    usual = Counted(EXAMPLE, wrong_after=0)
    shapes = Shapes(_compile_jinja_template(EXAMPLE), EXAMPLE, GIVEN, usual)
    for _ in range(9):
        assert shapes.render([{"role": "user", "content": "a"}], None, {}).endswith("!")


def test_any_number_of_shapes_and_of_turns_is_rendered() -> None:
    shapes, render = shapes_of(EXAMPLE), own(EXAMPLE)
    for _ in range(3):
        for turns in (1, MOST_TURNS, MOST_TURNS + 1, 3 * MOST_TURNS):
            messages = [{"role": ("user", "assistant")[turn % 2], "content": f"{turn}"} for turn in range(turns)]
            assert shapes.render(messages, None, {}) == render(messages, None, {})
    for number in range(1200):
        tools = [{"name": f"f{number}"}]
        messages = [{"role": "user", "content": "a"}]
        assert shapes.render(messages, tools, {}) == render(messages, tools, {})
