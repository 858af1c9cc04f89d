#!/usr/bin/env python3
"""Trains examples/tokenizer on the example prompts, and encodes 20 of them into prompts/token_ids.jsonl.

    python examples/make_tokenizer.py [FOLDER]

Writes tokenizer.json and token_ids.jsonl below FOLDER (default: this file's own folder), from the three prompt files
and the template that stand beside this script. Two runs write the same bytes. Takes about two seconds.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
VOCAB_SIZE = 4096
# Hidden by skip_special_tokens; the think and tool marks are not, as in the large reasoning models.
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# Words with one leading space or sign, digits by themselves, runs of signs, line ends, other spaces.
# Combining marks belong to the word, or Devanagari falls apart at every vowel sign.
WORDS = r"[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TOKEN_ID_ROWS = {"chat": 8, "code": 6, "tools": 6}


def read_rows(name: str) -> list[dict[str, Any]]:
    with (HERE / "prompts" / f"{name}.jsonl").open(encoding="utf-8", newline="\n") as lines:
        return [json.loads(line) for line in lines]


def texts(rows: list[dict[str, Any]]) -> Iterator[str]:
    """All text of the rows; a function schema that several rows share counts once."""
    seen = set()
    for row in rows:
        for message in row["messages"]:
            yield message["content"] or ""
            yield message.get("reasoning_content", "")
            yield from (json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls", ()))
        for tool in row.get("tools", ()):
            schema = json.dumps(tool["function"], ensure_ascii=False)
            if schema not in seen:
                seen.add(schema)
                yield schema


def train(rows: list[dict[str, Any]]) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL) - len(MARKS),
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(rows), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    return tokenizer


def encode_some(tokenizer: Tokenizer, rows: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Evenly spaced rows of every file as ids of their rendered prompt, each under the id of its source row."""
    template = (HERE / "tokenizer" / "chat_template.jinja").read_text(encoding="utf-8")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)  # type: ignore[no-untyped-call]
    for name, count in TOKEN_ID_ROWS.items():
        step = len(rows[name]) // count
        for row in rows[name][: count * step : step]:
            input_ids = fast.apply_chat_template(
                row["messages"], tools=row.get("tools"), add_generation_prompt=True, return_dict=False
            )
            yield {"id": row["id"], "input_ids": input_ids}


def write(folder: Path) -> None:
    rows = {name: read_rows(name) for name in TOKEN_ID_ROWS}
    tokenizer = train([row for name in TOKEN_ID_ROWS for row in rows[name]])
    for part in ("tokenizer", "prompts"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"), pretty=False)
    with (folder / "prompts" / "token_ids.jsonl").open("w", encoding="utf-8", newline="\n") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in encode_some(tokenizer, rows))


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
