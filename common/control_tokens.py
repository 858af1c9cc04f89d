"""Control tokens in the texts of a conversation: what a user typed is text, and neither ends nor opens a turn.

Such a string is hidden from the chat template behind a stand-in, and put back where the template wrote the stand-in.
The rendered prompt then knows which of its control tokens were typed. Around these it is cut at the template's own
control tokens, as every tokenizer cuts there anyway, and a stretch with a typed one is encoded whole by the same model
without control tokens: the ids are those that the tokenizer gives where that token is none.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import msgspec

# <|im_end|> and its like, also with the full-width bars of DeepSeek.
_SHAPE = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
# A stand-in is one character, so that no template can cut it in two: of plane 16, which is for private use and which
# nobody uses. In UTF-8 all of the plane begins with this byte, and nothing else does.
_FIRST_STAND_IN = 0x100000
_STAND_IN = re.compile(f"[{chr(_FIRST_STAND_IN)}-{chr(0x10FFFF)}]")
_STAND_IN_LEAD = b"\xf4"
_ESCAPED_STAND_IN = re.compile(r"\\udbc[0-9a-f]", re.IGNORECASE)


class Rendered(str):
    """A prompt as text; `typed` are the (start, end) of control tokens in it that were typed, and stay text."""

    __slots__ = ("typed",)
    typed: tuple[tuple[int, int], ...]

    def __new__(cls, text: str, typed: Iterable[tuple[int, int]] = ()) -> Self:
        made = super().__new__(cls, text)
        made.typed = tuple(typed)
        return made


class Piece(NamedTuple):
    """A stretch of a prompt; control tokens in a `plain` one are text."""

    text: str
    plain: bool


class ControlTokens:
    """The control tokens of one model: finds, hides and brings back those that were typed."""

    def __init__(self, added_tokens: Mapping[int, Any], template: str, *, every: bool = False) -> None:
        """`added_tokens` are the tokenizer's AddedTokens by id, `template` the text of its chat template.

        Not every added token is for control: Gemma adds HTML tags, GPT-NeoX runs of spaces. Those that are count as
        special, are written by the template, or look it. `every` takes all but white space for control: tokenizers of
        Python code can spare either every added token or none.
        """
        control = {
            one.content: (token_id, one) for token_id, one in added_tokens.items() if _is_control(one, template, every)
        }
        self.ids = {content: token_id for content, (token_id, _) in control.items()}
        self.others = [one for one in added_tokens.values() if one.content not in control]
        self._lstrip = {content for content, (_, one) in control.items() if one.lstrip}
        self._rstrip = {content for content, (_, one) in control.items() if one.rstrip}
        self._words = sorted(control)
        self._in_text = re.compile(any_of(self._words))
        # Within JSON, where a whole conversation is scanned in microseconds.
        self._in_json = re.compile(any_of(_as_json(word) for word in self._words).encode())
        self._stand_ins = {word: chr(_FIRST_STAND_IN + number) for number, word in enumerate(self._words)}

    def within(self, conversation: bytes) -> bool:
        """Whether a control token stands anywhere in a conversation, given as JSON."""
        return bool(self._words) and self._in_json.search(conversation) is not None

    @staticmethod
    def can_hide(conversation: bytes) -> bool:
        """Whether a conversation, given as JSON, has none of the characters that stand in for control tokens."""
        return _STAND_IN_LEAD not in conversation

    def found(self, text: str) -> list[str]:
        """The control tokens in a text, in their order."""
        return self._in_text.findall(text) if self._words else []

    def hide(self, value: Any) -> Any:
        """The same messages or tools with a stand-in for every control token; raises KeyError if a key holds one.

        A template may sort keys, and would sort stand-ins otherwise.
        """
        if isinstance(value, str):
            return self._in_text.sub(lambda found: self._stand_ins[found[0]], value)
        if isinstance(value, Mapping):
            if any(self._in_text.search(key) for key in value):
                raise KeyError("a key holds a control token")
            return {key: self.hide(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(one) for one in value]
        return value

    def restore(self, text: str) -> Rendered | None:
        """What the template made of hidden messages, with the typed tokens back; None if it wrote one otherwise."""
        parts: list[str] = []
        typed: list[tuple[int, int]] = []
        at = size = 0
        if _ESCAPED_STAND_IN.search(text):
            return None
        for stand_in in _STAND_IN.finditer(text):
            before, word = text[at : stand_in.start()], self._words[ord(stand_in[0]) - _FIRST_STAND_IN]
            parts += (before, word)
            typed.append((size + len(before), size + len(before) + len(word)))
            size, at = typed[-1][1], stand_in.end()
        parts.append(text[at:])
        return Rendered("".join(parts), typed)

    def pieces(self, text: Rendered) -> list[Piece]:
        """`text` in stretches: the plain ones lie between two control tokens of the template, and hold typed ones."""
        marks: list[tuple[int, int]] = []
        at = 0
        for start, end in (*text.typed, (len(text), len(text))):
            marks += (mark.span() for mark in self._in_text.finditer(text, at, start))
            at = end
        pieces: list[Piece] = []
        typed = iter(text.typed)
        next_typed = next(typed, None)
        run = left = 0  # where the present run of other stretches begins, and the present stretch
        for start, end in (*marks, (len(text), len(text))):
            holds_typed = False
            while next_typed is not None and next_typed[0] < start:
                holds_typed, next_typed = True, next(typed, None)
            if holds_typed:
                pieces += (Piece(text[run:left], plain=False), Piece(text[left:start], plain=True))
                run = start
            left = end
        pieces.append(Piece(text[run:], plain=False))
        return self._stripped([piece for piece in pieces if piece.text])

    def _stripped(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Some control tokens eat the white space beside them."""
        stripped: list[Piece] = []
        for number, piece in enumerate(pieces):
            text = piece.text
            if piece.plain:
                if number and any(pieces[number - 1].text.endswith(word) for word in self._rstrip):
                    text = text.lstrip()
                if number + 1 < len(pieces) and any(pieces[number + 1].text.startswith(word) for word in self._lstrip):
                    text = text.rstrip()
            stripped.append(Piece(text, piece.plain))
        return stripped


def _is_control(token: Any, template: str, every: bool) -> bool:
    content = token.content
    looks = every or token.special or content in template or _SHAPE.fullmatch(content) is not None
    return bool(content.strip()) and looks


def _as_json(text: str) -> str:
    return msgspec.json.encode(text)[1:-1].decode()


def any_of(words: Iterable[str]) -> str:
    """A pattern for any of `words`, the longest first.

    What begins alike stands together: of 256 alternatives side by side, as Kimi's, half are tried at every match.
    """
    distinct = sorted(set(words))
    if len(distinct) < 2:
        return "".join(map(re.escape, distinct))
    start = distinct[0]
    while not distinct[-1].startswith(start):  # what the first and the last have, those in between have, too
        start = start[:-1]
    by_next: dict[str, list[str]] = defaultdict(list)
    for word in distinct:
        if word != start:
            by_next[word[len(start)]].append(word[len(start) :])
    longer = "|".join(map(any_of, by_next.values()))
    return f"{re.escape(start)}(?:{longer}){'?' if distinct[0] == start else ''}"
