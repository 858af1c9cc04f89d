"""glaive-function-calling: a conversation in one text, with the tools in the text of the system prompt."""

import re
from collections.abc import Mapping
from typing import Any

from producer.datasets.layouts.tools import Tool, objects_within
from producer.datasets.reasons import BadRow

_END = "<|endoftext|>"
_CALL = "<functioncall>"
_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool", "SYSTEM": "system"}
_NAMES = "(USER|ASSISTANT|FUNCTION RESPONSE|SYSTEM):"
# A speaker begins a line, or follows the end of what was said.
_SPEAKER = re.compile(rf"(?:^|(?<=<\|endoftext\|>))[ \t]*{_NAMES}", re.MULTILINE)
# Where the line breaks were lost.
_SPEAKER_ANYWHERE = re.compile(rf"(?:^|(?<=\s)){_NAMES}")
# Possessive: a text of a million blanks must not be tried in every way to part them.
_OFFERS_TOOLS = re.compile(
    r"with access to the following functions?(?:\s*+[.:-]?\s*+Use them if required)?\s*+[.:-]?", re.IGNORECASE
)


def glaive_turns(chat: str) -> list[dict[str, Any]]:
    """The turns of `USER: … ASSISTANT: … <|endoftext|> FUNCTION RESPONSE: …`. Raises BadRow."""
    speakers = list(_SPEAKER.finditer(chat))
    if "ASSISTANT:" in chat and not any(one[1] == "ASSISTANT" for one in speakers):
        speakers = list(_SPEAKER_ANYWHERE.finditer(chat))
    if not speakers or chat[: speakers[0].start()].strip():
        raise BadRow("bad_messages", "the chat does not begin with USER:, ASSISTANT:, FUNCTION RESPONSE: or SYSTEM:")
    ends = [*(one.start() for one in speakers[1:]), len(chat)]
    return [_turn(_ROLES[one[1]], chat[one.end() : end]) for one, end in zip(speakers, ends, strict=True)]


def _turn(role: str, text: str) -> dict[str, Any]:
    text = text.strip()
    if role != "assistant":
        return {"role": role, "content": text}
    text = text.removesuffix(_END).rstrip()
    said, calls, body = text.partition(_CALL)
    turn: dict[str, Any] = {"role": role, "content": said.rstrip() if calls else text}
    if calls:
        turn["tool_calls"] = [one.removesuffix(_END).strip() for one in body.split(_CALL)]
    return turn


def glaive_system(row: Mapping[str, Any]) -> tuple[str, list[Tool]]:
    """The system prompt without what offers the tools, and the tools. Raises BadRow."""
    text = row.get("system")
    if not isinstance(text, str):
        return "", []
    text = text.strip().removeprefix("SYSTEM:").strip()
    offer = _OFFERS_TOOLS.search(text)
    if offer is None:
        return text, []
    rest, tools = objects_within(text[offer.end() :])
    said = text[: offer.start()].rstrip().removesuffix(",")
    return " ".join(part for part in (f"{said}." if said else "", rest.strip()) if part), tools
