"""Damage in texts: control tokens, think marks in the wrong place, characters that are not what was written."""

import re

from producer.audit.rows import Said

# Each with what it means; an alarm's sentence and cure stand in findings.py.
DAMAGES = {
    "control_tokens": "control tokens such as <|im_end|> as text",
    "think_doubled": "a think block within a think block, or a second one",
    "think_unclosed": "<think> that is never closed",
    "think_end_alone": "</think> without <think>",
    "tool_calls_as_text": "tool calls as text in the content",
    "replacement": "U+FFFD, which stands for bytes that were not UTF-8",
    "mojibake": "UTF-8 that was read as another encoding, such as Ã© for é",
    "nul": "NUL characters",
}
# <|begin_of_thought|> and its like are how OpenThoughts writes reasoning down, not a token of any model.
_CONTROL = re.compile(
    r"<\|(?!(?:begin|end)_of_(?:thought|solution)\|>)[A-Za-z][A-Za-z0-9_ -]{0,40}\|>"
    r"|<\uff5c[^<>\n]{1,40}\uff5c>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>"
)
# What is left of two bytes of UTF-8 in latin-1 or cp1252: no language has these pairs.
_MOJIBAKE = re.compile(
    "\u00c3[\u0080-\u00bf]|\u00c2[\u0080-\u00a9\u00ab-\u00bf]|\u00e2\u20ac[\u0080-\u00bf\u0153\u2122\u02dc\u201c-\u203a]"
    "|\u00f0\u0178[\u0080-\u00ff\u0152-\u2122]"
)
_CALLS = ("<tool_call>", "<function=", "<functioncall>", "<|tool_call", "[TOOL_CALLS]", "<|python_tag|>")
_THINK, _THINK_END = "<think>", "</think>"


def may_be_damaged(text: str) -> bool:
    """Whether damages_of or damages_of_answer may find something: every pattern of theirs has one of these.

    A text is searched ten times as fast for one character as for two.
    """
    if "<" in text or "]" in text or "\0" in text:
        return True
    return not text.isascii() and (
        "\u00c3" in text or "\u00c2" in text or "\u00f0" in text or "\u20ac" in text or "\ufffd" in text
    )


def damages_of(text: str) -> list[str]:
    """What is wrong with any text."""
    found = []
    marked = ("<" in text and ("<|" in text or "_of_turn>" in text or "SYS>>" in text)) or (
        "]" in text and "INST]" in text
    )
    if marked and _CONTROL.search(text):
        found.append("control_tokens")
    if not text.isascii():
        if "\uff5c" in text and "control_tokens" not in found and _CONTROL.search(text):
            found.append("control_tokens")
        if "\ufffd" in text:
            found.append("replacement")
        if ("\u00c3" in text or "\u00c2" in text or "\u20ac" in text or "\u00f0" in text) and _MOJIBAKE.search(text):
            found.append("mojibake")
    if "\0" in text:
        found.append("nul")
    return found


def damages_of_answer(said: Said) -> list[str]:
    """What is wrong with the marks in an answer."""
    content, reasoning = said.content, said.reasoning
    tagged = "<" in content
    found = _of_marks(content, reasoning) if tagged and (_THINK in content or _THINK_END in content) else []
    if reasoning and "<" in reasoning and (_THINK in reasoning or _THINK_END in reasoning):
        # A model may speak of the marks; at the ends they are what a client has put there.
        text = reasoning.strip()
        if text.startswith(_THINK) or text.endswith(_THINK_END):
            found.append("think_doubled")
    if not said.calls and (tagged or "]" in content) and any(one in content for one in _CALLS):
        found.append("tool_calls_as_text")
    return found


def _of_marks(content: str, reasoning: str) -> list[str]:
    text = content.lstrip()
    first_end = text.find(_THINK_END)
    if text.startswith(_THINK):
        if reasoning.strip() and text[len(_THINK) : first_end].strip():
            return ["think_doubled"]
        if first_end < 0:
            return ["think_unclosed"]
        behind = text[first_end + len(_THINK_END) :].lstrip()
        again = text[len(_THINK) :].lstrip().startswith(_THINK) or behind.startswith((_THINK, _THINK_END))
        return ["think_doubled"] if again else []
    if first_end >= 0 and text.find(_THINK, 0, first_end) < 0:
        return ["think_end_alone"]
    return []


def thoughts_in(said: Said) -> tuple[str, str]:
    """Reasoning and answer as told apart: by the field, or by think marks at the head of the content."""
    content = said.content
    if (
        "<" not in content
        or said.reasoning.strip()
        or (_THINK not in content and _THINK_END not in content and "_of_thought|>" not in content)
    ):
        return said.reasoning, content
    text = content.lstrip()
    for opening, closing in ((_THINK, _THINK_END), ("<|begin_of_thought|>", "<|end_of_thought|>")):
        end = text.find(closing)
        if text.startswith(opening):
            return (text[len(opening) :], "") if end < 0 else (text[len(opening) : end], text[end + len(closing) :])
        if end >= 0 and text.find(opening, 0, end) < 0:
            return text[:end], text[end + len(closing) :]
    return "", content
