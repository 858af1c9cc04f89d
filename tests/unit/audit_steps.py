"""Rows of data made by anyone, clean or with one fault, for the tests of the audit."""

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from common.chat_template import Tokenizer
from common.sections import TokenizerSettings
from producer.audit.audit import Audited, audit
from tests.conftest import REPO

Row = dict[str, Any]
_WORDS = ["the", "number", "of", "steps", "is", "bounded", "so", "we", "add", "limits", "therefore", "wait", "again"]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count)).capitalize() + "."


def tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerSettings(path=REPO / "examples" / "tokenizer"))


def counted(of: Tokenizer, *texts: str) -> int:
    """What a server counts for an answer: its texts, the mark behind the reasoning, the end token."""
    return sum(map(len, of.encode([text for text in texts if text]))) + (len(texts) > 1) + 1


def clean(rows: int = 200, of: Tokenizer | None = None, seed: int = 0) -> list[Row]:
    """OpenAI's answer objects beside their messages, as a client saves them that does all of it right."""
    rng = random.Random(seed)
    made = []
    for index in range(rows):
        reasoning, content = words(rng, rng.randrange(60, 300)), words(rng, rng.randrange(20, 80))
        tokens = counted(of, reasoning, content) if of else (len(reasoning) + len(content)) // 4
        message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        made.append(
            {
                "id": f"row-{index}",
                "messages": [{"role": "user", "content": words(rng, 15)}],
                "response": {
                    "object": "chat.completion",
                    "choices": [choice],
                    "usage": {"prompt_tokens": 30, "completion_tokens": tokens},
                },
            }
        )
    return made


def message(row: Row) -> Row:
    found: Row = row["response"]["choices"][0]["message"]
    return found


def usage(row: Row) -> Row:
    found: Row = row["response"]["usage"]
    return found


def flat(rows: Iterable[Row]) -> list[Row]:
    """The same as flat records."""
    return [
        {
            "id": row["id"],
            "prompt": row["messages"][0]["content"],
            "reasoning": message(row)["reasoning_content"],
            "content": message(row)["content"],
            "finish_reason": row["response"]["choices"][0]["finish_reason"],
            "usage": usage(row),
        }
        for row in rows
    ]


def write(path: Path, rows: Iterable[Row | list[Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def looked(folder: Path, rows: Iterable[Row | list[Any]], of: Tokenizer | None = None) -> Audited:
    return audit(write(folder / "rows.jsonl", rows), of)


def alarms(found: Audited) -> dict[str, str]:
    """Each alarm by name, with its level."""
    return {one.name: one.level for one in found.findings if one.alarm}


def notes(found: Audited) -> set[str]:
    return {one.name for one in found.findings if not one.alarm}


def changed(rows: list[Row], share: float, change: Callable[[Row], object]) -> list[Row]:
    """The rows, of which so large a share is changed, evenly over them."""
    step = round(1 / share)
    for row in rows[::step]:
        change(row)
    return rows
