"""The layouts that rows come in, and which one a row has.

A row is read by its own shape alone, with the order of LAYOUTS for rows that fit several: the same row is the same
prompt wherever a run resumes, and in a mixed file every row is read as what it is. What `detect` finds in the first
rows is for people to read; it decides nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import msgspec

from producer.datasets.layouts.glaive import glaive_system, glaive_turns
from producer.datasets.layouts.turns import Turn, open_turns
from producer.datasets.reasons import NOT_JSON, BadRow

DETECTED_ROWS = 300


class Asked(msgspec.Struct, frozen=True):
    """What a row asks: its turns, tools as they stand in it, and its system prompt where that is no turn.

    `unanswered`: the turns are questions, with a blank answer between two of them, which nobody gave.
    """

    turns: list[Turn]
    tools: Any = None
    system: str = ""
    unanswered: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to write a row down: how it is recognized, and read. `read` raises BadRow.

    A row that fits no layout, and has this `column`, is read by it for a reject that says what is wrong there.
    """

    name: str
    fits: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any]], Asked]
    column: str = ""


@dataclass(frozen=True, slots=True)
class Detected:
    """The layouts among the first rows: `name` is the most frequent, "none" if no row has one; rows by layout."""

    name: str
    rows: dict[str, int]

    @classmethod
    def of(cls, names: Iterable[str]) -> Self:
        """From the layout of each row, or "none"."""
        counted = Counter(names)
        known = {name: count for name, count in counted.most_common() if name != "none"}
        if counted["none"]:
            known["none"] = counted["none"]
        return cls(next(iter(known), "none"), known)

    def __str__(self) -> str:
        """`layout messages`, or `layouts messages (290), none (10)`."""
        if len(self.rows) < 2:
            return f"layout {self.name}"
        return "layouts " + ", ".join(f"{name} ({rows:,})" for name, rows in self.rows.items())


def detect(rows: Iterable[Any]) -> Detected:
    """The layouts of the first 300 of `rows`, each as a container gives it: a line, an object, a list, or BadLine."""
    return Detected.of(layout_name(row) for row in islice(rows, DETECTED_ROWS))


def layout_name(row: Any) -> str:
    """The layout of a row, or "none"."""
    if isinstance(row, bytes):
        try:
            row = msgspec.json.decode(row)
        except NOT_JSON:
            return "none"
    if isinstance(row, list):
        return MESSAGE_LIST if row and all(isinstance(turn, dict) for turn in row) else "none"
    layout = _fitting(row) if isinstance(row, dict) else None
    return layout.name if layout else "none"


def find(row: Mapping[str, Any], name: str = "auto") -> Layout:
    """The layout of a row, or the one with this name if the row has it. Raises BadRow.

    A column that is null or empty is not there: Parquet, CSV and mixed files have it for rows of another kind.
    """
    layout = _fitting(row, name)
    if layout is not None:
        return layout
    if name != "auto":
        raise BadRow("no_prompt", f"the row has not the layout {name!r}, which the configuration gives as its format")
    if ("role" in row and "content" in row) or ("from" in row and "value" in row):
        raise BadRow("no_prompt", "the row is one turn of a conversation; a row must be a whole one")
    raise BadRow("no_prompt", f"the columns {', '.join(map(repr, list(row)[:12]))} are no layout that is known")


def _fitting(row: Mapping[str, Any], name: str = "auto") -> Layout | None:
    able = LAYOUTS if name == "auto" else [layout for layout in LAYOUTS if layout.name == name]
    fitting = next((layout for layout in able if layout.fits(row)), None)
    return fitting or next((layout for layout in able if layout.column in row), None)


def read_list(row: list[Any]) -> Asked:
    """A row that is a bare list of messages."""
    return Asked(open_turns(row))


def read_text(row: Mapping[str, Any], column: str, before: Sequence[tuple[Any, Any]] = ()) -> Asked:
    """One text column, which is the user's turn, after earlier questions and answers."""
    text = row.get(column)
    if not _filled(text):
        raise BadRow("no_prompt", f"the column {column!r} holds no text")
    if before:
        return _asked(row, _talk([*(one for pair in before for one in pair), text]))
    return _beside(row, [Turn("user", {"role": "user", "content": text}, 0)])


def _asked(row: Mapping[str, Any], turns: Any, *, unanswered: bool = False) -> Asked:
    return _beside(row, open_turns(turns), unanswered=unanswered)


def _beside(row: Mapping[str, Any], turns: list[Turn], *, unanswered: bool = False) -> Asked:
    """The turns with what stands beside them in the row."""
    system = ""
    if "system" in row or "system_prompt" in row:
        system = next((row[name] for name in ("system", "system_prompt") if _filled(row.get(name))), "")
    return Asked(turns, row.get("tools") or row.get("functions"), system, unanswered)


def _filled(value: Any) -> bool:
    return isinstance(value, str) and value != "" and not value.isspace()


def _talk(texts: list[Any]) -> list[dict[str, Any]]:
    """Texts that user and assistant say by turns."""
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def _questions(turns: list[Any]) -> list[Any]:
    """Turns that nobody has answered yet, with a blank answer between two."""
    return [one for turn in turns for one in (turn, {"role": "assistant", "content": ""})][:-1]


def _is_turns(value: Any) -> bool:
    """A list of turns, or the text of one."""
    if isinstance(value, str):
        return value.lstrip()[:1] == "["
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and ("role" in first or "from" in first)


def _is_pairs(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, list) and len(one) == 2 for one in value)


def _column(*names: str) -> tuple[Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any]], Asked]]:
    """A conversation in the first of these columns that holds one."""

    def fits(row: Mapping[str, Any]) -> bool:
        return any(_is_turns(row.get(name)) for name in names)

    def read(row: Mapping[str, Any]) -> Asked:
        return _asked(row, next(row[name] for name in names if _is_turns(row.get(name))))

    return fits, read


def _named(name: str) -> Layout:
    """A conversation in the column of this name, whatever it holds."""
    return Layout(name, lambda row: _there(row, name), lambda row: _asked(row, row[name]), name)


def _one_text(name: str) -> Layout:
    """A text column of this name, and nothing else that counts."""
    return Layout(name, lambda row: _filled(row.get(name)), lambda row: read_text(row, name), name)


def _there(row: Mapping[str, Any], column: str) -> bool:
    return row.get(column) is not None and row[column] != ""


def _no_turns(row: Mapping[str, Any]) -> Asked:
    raise AssertionError(f"ready ids are no turns: {list(row)[:3]}")


def _glaive(row: Mapping[str, Any]) -> Asked:
    system, tools = glaive_system(row)
    return Asked(open_turns(glaive_turns(row["chat"])), row.get("tools") or tools, system)


def _ultrachat(row: Mapping[str, Any]) -> Asked:
    data = row["data"]
    return read_text(row, "data") if isinstance(data, str) else _asked(row, _talk(data))


def _bfcl(row: Mapping[str, Any]) -> Asked:
    steps = [step if isinstance(step, list) else [step] for step in row["question"]]
    turns = [turn for step in _questions(steps) for turn in (step if isinstance(step, list) else [step])]
    asked = _asked(row, turns, unanswered=len(steps) > 1)
    return Asked(asked.turns, row.get("function") or asked.tools, asked.system, asked.unanswered)


def _bench_turns(row: Mapping[str, Any]) -> Asked:
    turns = row["turns"]
    if all(isinstance(turn, str) for turn in turns):
        questions = _questions([{"role": "user", "content": turn} for turn in turns])
        return _asked(row, questions, unanswered=len(turns) > 1)
    return _asked(row, turns)


def _alpaca(row: Mapping[str, Any]) -> Asked:
    text = "\n\n".join(str(part) for part in (row["instruction"], row.get("input")) if _filled(part))
    history = row["history"] if _is_pairs(row.get("history")) else ()
    return read_text({**row, "instruction": text}, "instruction", history)


def _prompt(row: Mapping[str, Any]) -> Asked:
    return _asked(row, row["prompt"]) if isinstance(row["prompt"], list) else read_text(row, "prompt")


def _is_magicoder(row: Mapping[str, Any]) -> bool:
    evolved = _filled(row.get("instruction")) and "response" in row and "output" not in row
    return evolved or _filled(row.get("problem"))


def _magicoder(row: Mapping[str, Any]) -> Asked:
    return read_text(row, "problem" if _filled(row.get("problem")) else "instruction")


def _is_alpaca(row: Mapping[str, Any]) -> bool:
    return _filled(row.get("instruction"))


def _is_opencode(row: Mapping[str, Any]) -> bool:
    return _filled(row.get("input")) and "output" in row


def _is_openorca(row: Mapping[str, Any]) -> bool:
    return _filled(row.get("question")) and "system_prompt" in row


def _is_prompt(row: Mapping[str, Any]) -> bool:
    return _filled(row.get("prompt")) or (isinstance(row.get("prompt"), list) and bool(row["prompt"]))


MESSAGE_LIST = "message_list"
# In the order of preference: the names are what `format` in the configuration takes.
LAYOUTS = (
    Layout("input_ids", lambda row: _there(row, "input_ids"), _no_turns, "input_ids"),
    _named("messages"),
    _named("conversations"),
    _named("conversation"),
    Layout("glaive", lambda row: _filled(row.get("chat")), _glaive),
    Layout("swe_agent", *_column("history")),
    Layout("trajectory", *_column("trajectory", "traj")),
    Layout("ultrachat", lambda row: isinstance(row.get("data"), list) or _filled(row.get("data")), _ultrachat),
    Layout("bfcl", lambda row: isinstance(row.get("question"), list), _bfcl),
    Layout("turns", lambda row: isinstance(row.get("turns"), list), _bench_turns),
    Layout("magicoder", _is_magicoder, _magicoder),
    Layout("alpaca", _is_alpaca, _alpaca, "instruction"),
    Layout("opencode", _is_opencode, lambda row: read_text(row, "input")),
    Layout("openorca", _is_openorca, lambda row: read_text(row, "question")),
    _one_text("question"),
    _one_text("query"),
    Layout("prompt", _is_prompt, _prompt, "prompt"),
)
