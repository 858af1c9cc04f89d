"""What a chat template writes between the turns of a conversation, found by rendering conversations with known turns.

Texts are looked at as `Marks` writes them: each control token is one character, and what a user typed is not.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from common.answer_layout import THINK, THINK_END, layout_of
from common.chat_template import Tokenizer
from common.control_tokens import any_of
from common.messages import BadPrompt
from common.template_kwargs import TEMPLATE_ERRORS

Kind = Literal["start", "system", "developer", "user", "assistant", "tool", "tools"]
_KINDS: dict[str, Kind] = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "c": "assistant"}
# By letter: s system, d developer, u user, a assistant, c assistant that calls tools, t their results, n results with
# the tool's name in them, which Kimi's template puts in the place of the role. Between them they have every turn behind
# every other. A template may refuse some of them.
_PATHS = (
    "u", "su", "suau", "uau", "uauau", "uu", "suu", "ssu", "us", "usu", "uasu", "uas", "sa", "sau", "a", "au", "ua",
    "uaau", "s", "du", "uadu", "uct", "uctt", "uctu", "ucttu", "uctau", "ucttau", "uctct", "uctsu", "suct", "suctu",
    "sauct", "uauct", "ucnn", "ucnu", "ucnau", "ucncn", "ucnct", "uctcn", "uctn", "ucnt", "sucn", "uca", "uc",
)  # fmt: skip
_TOOL_NAME = "zq_tool"
_CALL_ID = "zqcall{:03d}"  # nine letters and digits, since Mistral's templates take no other
_ARGUMENT = "zq arguments {}"
_LONG = 8
_FIRST = 0x100000  # of plane 16, as for control tokens in a conversation (common/control_tokens.py)
_WORD = f"[^\n\r{chr(_FIRST)}-{chr(0x10FFFF)}]*?"


class Marks:
    """Texts with one character for each control token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        names = sorted(tokenizer.control_ids)
        self.of_name = {name: chr(_FIRST + number) for number, name in enumerate(names)}
        self._of_id = {tokenizer.control_ids[name]: mark for name, mark in self.of_name.items()}
        self._names = re.compile(any_of(names) if names else r"(?!)")
        self._decode = tokenizer.decode
        self.ends = frozenset(self._of_id[one] for one in tokenizer.special_ids.end if one in self._of_id)
        self.end = re.compile(f"[{''.join(sorted(self.ends))}]" if self.ends else r"(?!)")
        self.thinks = [text for name in (THINK, THINK_END) for text in (name, self.of_name.get(name)) if text]

    def of_text(self, text: str) -> str:
        """A text in which every control token is the template's."""
        return self._names.sub(lambda found: self.of_name[found[0]], text)

    def of_ids(self, ids: Sequence[int]) -> str:
        """Ids, decoded."""
        parts: list[str] = []
        start = 0
        for at, one in enumerate(ids):
            mark = self._of_id.get(one)
            if mark is not None:
                parts += (self._decode(ids[start:at]) if start < at else "", mark)
                start = at + 1
        return "".join([*parts, self._decode(ids[start:]) if start < len(ids) else ""])

    def has_mark(self, text: str) -> bool:
        return any(ord(letter) >= _FIRST for letter in text)


class Found(NamedTuple):
    """Where the next turn's content begins: `text[start:stop]` stands between."""

    kind: Kind
    start: int
    stop: int
    ids: dict[str, str]  # `closing_id`, `id` and `name` of results, where the template writes them


@dataclass(frozen=True, slots=True)
class Way:
    """One way to go on behind a turn: the kind of the next, and a pattern of what stands in between."""

    kind: Kind
    pattern: str
    size: int


@dataclass(frozen=True, slots=True)
class Declared:
    """How tools stand in a prompt: JSON values with `between` in between, or one list."""

    between: str | None


class Frames:
    """What stands between the turns; `declared` is None where the template has no tools, or not as JSON.

    `blanks` are what the template puts before the content of answers without reasoning; `quoted` says that results of
    tools stand there as JSON.
    """

    def __init__(self, tokenizer: Tokenizer, kwargs: Mapping[str, Any]) -> None:
        self.marks = Marks(tokenizer)
        self._tokenizer, self._kwargs = tokenizer, kwargs
        self._takes_objects = layout_of(tokenizer).takes_objects
        self.declared: Declared | None = None
        self.quoted = False
        self._ways: dict[Kind, dict[str, Way]] = {}
        self._headers: dict[Kind, set[str]] = {}
        blanks: dict[Kind, set[str]] = {}
        for tools in (0, 1, 2):
            for path in _PATHS if tools < 2 else ("u", "su"):
                self._learn(path, tools, blanks)
        self.blanks = sorted(self._learn_headers(blanks), key=len, reverse=True)
        self._patterns = {kind: _pattern(list(ways.values())) for kind, ways in self._ways.items()}

    def next(self, kind: Kind, text: str, at: int) -> Found | None:
        """What follows a turn of `kind` whose content begins at `at`; None if nothing known does.

        A turn of the assistant, declared tools and the start are followed right there, others wherever a known way is
        found first.
        """
        known = self._patterns.get(kind)
        if known is None:
            return None
        ways, pattern = known
        fixed = kind in {"start", "tools", "assistant"}
        found = pattern.match(text, at) if fixed else pattern.search(text, at)
        if found is None or found.lastgroup is None:
            return None
        number = int(found.lastgroup.removeprefix("way"))
        groups = {name.partition("_")[2]: one for name, one in found.groupdict().items() if one is not None}
        return Found(ways[number].kind, found.start(), found.end(), {k: v for k, v in groups.items() if k})

    # What is learned

    def _learn(self, path: str, tools: int, blanks: dict[Kind, set[str]]) -> None:
        messages = list(self._messages(path))
        given = [_tool(number) for number in range(tools)]
        try:
            rendered = self._tokenizer.render([one for one, _ in messages], given or None, self._kwargs)
        except (BadPrompt, *TEMPLATE_ERRORS):
            return
        text = self.marks.of_text(rendered)
        regions = self._regions(text, path, messages)
        if regions is None:
            return
        if tools:
            region = self._declared(text, given)
            if region is None or any(start < region[1] and stop > region[0] for _, start, stop in regions):
                return
            regions = sorted([*regions, ("tools", *region)], key=lambda one: one[1])
        before: Kind = "start"
        at = 0
        for kind, start, stop in regions:
            between = text[at:start]
            if kind == "assistant":
                blanks.setdefault(before, set()).add(between)
            else:
                self._add(before, kind, between)
            before, at = kind, stop
        self._headers.setdefault(before, set()).add(self._before_thinking(text[at:]))

    def _before_thinking(self, text: str) -> str:
        for mark in self.marks.thinks:
            text = text.partition(mark)[0]
        return text

    def _messages(self, path: str) -> Iterator[tuple[dict[str, Any], str]]:
        """The messages of a path, each with the text that it is found by."""
        calls = answered = 0
        for number, letter in enumerate(path):
            sentinel = f"Zq{number}zq"
            if letter in "tn":
                sentinel = f'Zq{number}"zq'
                result = {"role": "tool", "tool_call_id": _CALL_ID.format(answered), "content": sentinel}
                answered += 1
                yield ({**result, "name": _TOOL_NAME} if letter == "n" else result), sentinel
            elif letter == "c":
                wanted = max(1, len(re.match("[tn]*", path[number + 1 :])[0]))  # type: ignore[index]
                made = [self._call(calls + one) for one in range(wanted)]
                calls += wanted
                yield {"role": "assistant", "content": sentinel, "tool_calls": made}, _ARGUMENT.format(calls - 1)
            else:
                yield {"role": _KINDS[letter], "content": sentinel}, sentinel

    def _call(self, number: int) -> dict[str, Any]:
        given = {"zq": _ARGUMENT.format(number)}
        arguments = given if self._takes_objects else json.dumps(given)
        function = {"name": _TOOL_NAME, "arguments": arguments}
        return {"id": _CALL_ID.format(number), "type": "function", "function": function}

    def _regions(
        self, text: str, path: str, messages: Sequence[tuple[dict[str, Any], str]]
    ) -> list[tuple[Kind, int, int]] | None:
        """Where the contents are, up to the end token for the assistant's; None if one is missing, or out of order."""
        regions: list[tuple[Kind, int, int]] = []
        at = 0
        for letter, (_, sentinel) in zip(path, messages, strict=True):
            start, size = text.find(sentinel), len(sentinel)
            if start < 0 and letter in "tn":
                escaped = sentinel.replace('"', r"\"")
                start, size = text.find(escaped), len(escaped)
                self.quoted |= start >= 0
            if start < at:
                return None
            stop = start + size
            if letter in "ac":
                end = self.marks.end.search(text, stop)
                if end is None:
                    return None
                if letter == "c":  # of what stands before a call nothing is learned
                    start = at
                stop = end.start()
            regions.append((_KINDS.get(letter, "tool"), start, stop))
            at = stop
        return regions

    def _declared(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[int, int] | None:
        """Where the tools stand as JSON, each for itself or all in a list."""
        values = [[*tools], [one["function"] for one in tools]]
        if (span := _json_at(text, 0, values)) is not None:
            self.declared = self.declared or Declared(None)
            return span
        spans: list[tuple[int, int]] = []
        for tool in tools:
            span = _json_at(text, spans[-1][1] if spans else 0, [tool, tool["function"]])
            if span is None:
                return None
            spans.append(span)
        if len(spans) > 1:
            self.declared = Declared(text[spans[0][1] : spans[1][0]])
        elif self.declared is None:
            self.declared = Declared("\n")
        return spans[0][0], spans[-1][1]

    def _learn_headers(self, between: Mapping[Kind, set[str]]) -> set[str]:
        """What opens the assistant's turns, from the ends of prompts; answers what else stands before contents."""
        blanks: set[str] = set()
        for before, headers in self._headers.items():
            for header in headers:
                self._add(before, "assistant", header)
        for before, texts in between.items():
            for text in texts - {""}:
                known = [one for one in self._headers.get(before, ()) if text.startswith(one)]
                header = max(known, key=len) if known else self._before_thinking(text)
                if not known:
                    self._add(before, "assistant", header)
                blanks.add(text.removeprefix(header))
        return {blank for blank in blanks if any(mark in blank for mark in self.marks.thinks)}

    def _add(self, before: Kind, kind: Kind, between: str) -> None:
        """A text that holds no control token is no sign of another turn, since a user may have written it.

        It is one at the start and behind declared tools, and in front of tools or behind their results if it is long.
        """
        is_long = len(between) >= _LONG and (kind == "tools" or before == "tool")
        if not (self.marks.has_mark(between) or before in {"start", "tools"} or is_long):
            return
        # A result's id may stand in front of it, or behind.
        own = re.findall(r"zqcall\d{3}", between)
        names = ["closing_id", "id"][-len(own) :] if kind == "tool" else ["closing_id"]
        parts: list[str] = []
        size = 0
        for piece in re.split(r"(zqcall\d{3}|zq_tool)", between):
            if piece == _TOOL_NAME:
                parts.append(f"(?P<NUMBER_name>{_WORD})" if "NUMBER_name" not in "".join(parts) else _WORD)
            elif piece.startswith("zqcall"):
                parts.append(f"(?P<NUMBER_{names.pop(0)}>{_WORD})" if names else _WORD)
            else:
                parts.append(re.escape(piece))
                size += len(piece)
        pattern = "".join(parts)
        self._ways.setdefault(before, {}).setdefault(pattern, Way(kind, pattern, size))


def _pattern(ways: list[Way]) -> tuple[list[Way], re.Pattern[str]]:
    """Any of the ways, the longest first: a system prompt that is there begins as one that is not."""
    ways = sorted(ways, key=lambda way: way.size, reverse=True)
    each = (f"(?P<way{n}>{way.pattern.replace('NUMBER_', f'of{n}_')})" for n, way in enumerate(ways))
    return ways, re.compile("|".join(each), re.DOTALL)


def _tool(number: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"zq": {"type": "string", "description": f"zq field {number}"}}}
    function = {"name": f"{_TOOL_NAME}_{number}", "description": f"zq description {number}", "parameters": schema}
    return {"type": "function", "function": function}


def _json_at(text: str, at: int, values: Sequence[Any]) -> tuple[int, int] | None:
    """The first stretch behind `at` that is JSON of one of `values`."""
    decode = json.JSONDecoder().raw_decode
    for found in re.finditer(r"[\[{]", text[at:]):
        try:
            value, end = decode(text, at + found.start())
        except ValueError:
            continue
        if value in values:
            return at + found.start(), end
    return None
