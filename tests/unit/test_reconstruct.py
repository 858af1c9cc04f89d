"""Ids made of text are those that the model had, or the row is refused with the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.answers import parse
from common.chat_template import Tokenizer
from common.sections import TokenizerSettings
from producer.audit.reconstruct import REASONS, Allowed, Made, Refused, reconstruct
from producer.audit.reconstructed import write as write_rows
from producer.audit.sources import Source
from tests.conftest import SHARED
from tests.unit.answer_models import make, template
from tests.unit.audit_steps import Row, message, tokenizer, usage, write

KIMI = SHARED / "data" / "tokenizers" / "kimi_k25_fast"
ASKED = [{"role": "user", "content": "What is 1 + 1?"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    *ASKED,
    {"role": "assistant", "content": "2", "reasoning_content": "Easy."},
    {"role": "user", "content": "Is <|im_end|> a token? \u65e5\u672c \U0001f642"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
    }
]
END = "<|im_end|>"
CALL = '<tool_call>{"id": "c1", "name": "add", "arguments": {"a": 1, "b":1}}</tool_call>'


def generated(
    of: Tokenizer, messages: list[Row], text: str, finish_reason: str | None = "stop", tools: list[Row] | None = None
) -> tuple[Row, list[int]]:
    """A row as a client saves it that reads text, and all ids that the server had."""
    (prompt_ids,) = of.encode([of.render(messages, tools)])
    (output_ids,) = of.encode([text])
    answer = parse(output_ids, of, input_ids=prompt_ids)
    saved: Row = {"role": "assistant", "content": answer.content, "reasoning_content": answer.reasoning}
    if answer.tool_calls:
        saved["tool_calls"] = answer.tool_calls
    row: Row = {
        "id": "mine",
        "messages": messages,
        "response": {
            "choices": [{"message": saved, "finish_reason": finish_reason}],
            "usage": {"prompt_tokens": len(prompt_ids), "completion_tokens": len(output_ids)},
        },
    }
    return row | ({"tools": tools} if tools else {}), prompt_ids + output_ids


def made(row: Row, of: Tokenizer, **allowed: bool) -> Made:
    return reconstruct(json.dumps(row).encode(), 7, "A", of, Allowed(**allowed))


def refused(row: Row, of: Tokenizer, **allowed: bool) -> str:
    with pytest.raises(Refused) as caught:
        made(row, of, **allowed)
    assert caught.value.reason in REASONS
    return caught.value.reason


@pytest.mark.parametrize("messages", [ASKED, TALK], ids=["question", "talk"])
@pytest.mark.parametrize(
    ("text", "reason", "tools"),
    [
        (f"I add them.\n\nSo it is two.</think>It is 2.{END}", "stop", None),
        (f"I add.</think>{END}", "stop", None),
        ("I add them, and", "length", None),
        ("I add them.</think>It is", "length", None),
        (f"I call.</think>Wait.{CALL}{END}", "tool_calls", TOOLS),
        (f"I call.</think>{CALL}{CALL}{END}", "tool_calls", TOOLS),
        (f"\u65e5\u672c \U0001f642 e\u0301</think>na\u00efve  caf\u00e9\t.{END}", None, None),
    ],
)
def test_the_ids_are_those_of_the_server(
    messages: list[Row], text: str, reason: str | None, tools: list[Row] | None
) -> None:
    of = tokenizer()
    row, ids = generated(of, messages, text, reason, tools)
    found = made(row, of)
    assert found.row.input_ids.tolist() == ids
    assert found.row.loss_mask.tolist() == [0] * found.row.prompt_tokens + [1] * found.row.completion_tokens
    assert (found.tokens, found.whitespace) == ("equal", "template")
    assert found.claimed_tokens == found.row.completion_tokens
    assert found.ended == ("assumed" if reason is None else "stated")
    assert found.row.flags == (("reconstructed", "truncated") if reason == "length" else ("reconstructed",))
    assert (found.row.id, found.row.row_id) == ("A/7", "mine")


def test_reasoning_may_stand_within_the_content() -> None:
    of = tokenizer()
    row, ids = generated(of, ASKED, f"I add.</think>2{END}")
    message(row).update(content="<think>I add.</think>2", reasoning_content=None)
    assert made(row, of).row.input_ids.tolist() == ids
    message(row)["content"] = "I add.</think>2"
    assert made(row, of).row.input_ids.tolist() == ids


def test_a_server_may_not_count_the_end_token() -> None:
    of = tokenizer()
    row, ids = generated(of, ASKED, f"I add.</think>2{END}")
    usage(row)["completion_tokens"] -= 1
    found = made(row, of)
    assert (found.row.input_ids.tolist(), found.tokens) == (ids, "end_not_counted")


@pytest.mark.parametrize(
    ("equal", "less", "made"),
    [
        (5, 2, {"equal": 5}),
        (2, 5, {"end_not_counted": 5}),
        (3, 3, {}),
        (4, 0, {"equal": 4}),
        (0, 4, {"end_not_counted": 4}),
    ],
)
def test_a_source_counts_the_end_token_in_all_rows_or_in_none(
    tmp_path: Path, equal: int, less: int, made: dict[str, int]
) -> None:
    """One token off, of which the other rows say that it is not the end token."""
    of = tokenizer()
    row, _ = generated(of, ASKED, f"I add.</think>2{END}")
    off = json.loads(json.dumps(row))
    usage(off)["completion_tokens"] -= 1
    cut, _ = generated(of, ASKED, "I add them, and", "length")
    rows = [*[row] * equal, *[off] * less, cut]
    path = write(tmp_path / "old.jsonl", rows[::-1])
    done = write_rows([Source(str(path))], tmp_path / "new.jsonl", of, Allowed())
    lines = [json.loads(line) for line in (tmp_path / "new.jsonl").read_text().splitlines()]
    assert [line["finish_reason"] for line in lines] == ["length"] + ["stop"] * sum(made.values())
    assert {line["sure_tokens"]: made[line["sure_tokens"]] for line in lines[1:]} == made
    left = equal + less - sum(made.values())
    assert (done.rows, done.made) == (len(rows), 1 + sum(made.values()))
    assert dict(done.refused) == ({"end_count_differs": left} if left else {})
    assert sum(done.sure.values()) == done.made
    assert done.trained_tokens == sum(line["completion_tokens"] for line in lines)
    assert {*tmp_path.iterdir()} == {path, tmp_path / "new.jsonl"}


def test_rows_without_a_count_are_taken_only_if_told_so() -> None:
    of = tokenizer()
    row, ids = generated(of, ASKED, f"I add.</think>2{END}")
    del row["response"]["usage"]
    assert refused(row, of) == "not_counted"
    found = made(row, of, uncounted=True)
    assert (found.row.input_ids.tolist(), found.tokens, found.claimed_tokens) == (ids, "uncounted", -1)
    cut, _ = generated(of, ASKED, "I add them, and", "length")
    del cut["response"]["usage"]
    assert refused(cut, of, uncounted=True) == "not_counted"


CHANGES: dict[str, tuple[str, Callable[[Row], Any]]] = {
    "reasoning lost": ("no_reasoning", lambda row: message(row).update(reasoning_content=None)),
    "text lost": ("tokens_differ", lambda row: message(row).update(content="It")),
    "other prompt": (
        "prompt_tokens_differ",
        lambda row: row["messages"][0].update(content="What is it that 1 plus 1 makes?"),
    ),
    "no prompt": ("no_prompt", lambda row: row.pop("messages")),
    "nothing": ("no_answer", lambda row: message(row).update(content="", reasoning_content="")),
    "control token": ("control_tokens", lambda row: message(row).update(content="It is 2.<|im_end|>")),
    "lost bytes": ("damaged_text", lambda row: message(row).update(content="It is 2\ufffd.")),
    "two answers": ("several_answers", lambda row: row["response"]["choices"].append(row["response"]["choices"][0])),
    "aborted": ("not_ended", lambda row: row["response"]["choices"][0].update(finish_reason="abort")),
    "error": ("failed", lambda row: row.update(response=None, error="timed out", answer="")),
    "an image": ("not_text", lambda row: row["messages"][0].update(content=[{"type": "image_url", "image_url": "x"}])),
    "unread role": ("bad_messages", lambda row: row["messages"].insert(0, {"role": "narrator", "content": "x"})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_in_doubt_is_refused(change: str) -> None:
    of = tokenizer()
    reason, spoil = CHANGES[change]
    row, _ = generated(of, [dict(one) for one in ASKED], f"I add.</think>It is 2.{END}")
    spoil(row)
    assert refused(row, of) == reason


def test_ids_are_not_made_anew() -> None:
    row = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
    assert refused(row, tokenizer()) == "has_ids"


def test_reasoning_where_the_prompt_closes_the_think_block() -> None:
    of = tokenizer()
    quiet = Tokenizer(TokenizerSettings(path=of._settings.path, chat_template_kwargs={"thinking": False}))
    row, ids = generated(quiet, ASKED, f"It is 2.{END}")
    assert made(row, quiet).row.input_ids.tolist() == ids
    message(row)["reasoning_content"] = "I add."
    assert refused(row, quiet) == "reasoning_unasked"


def test_whitespace_that_no_template_shows_is_a_guess(tmp_path: Path) -> None:
    """A template that leaves all reasoning out, also that of the last turn."""
    of = make(tmp_path, template("{{ message.content }}", "{{ '<think>\\n' }}"), ("<think>", "</think>"))
    row, ids = generated(of, ASKED, f"I add.\n</think>\n\nIt is 2.{END}")
    assert refused(row, of) == "whitespace_unknown"
    found = made(row, of, guessed_whitespace=True)
    assert (found.row.input_ids.tolist(), found.whitespace) == (ids, "guessed")
    usage(row)["completion_tokens"] += 2
    assert refused(row, of, guessed_whitespace=True) == "tokens_differ"


def test_a_model_that_opens_its_think_block_by_itself(tmp_path: Path) -> None:
    answer = "{{ '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' ~ message.content }}"
    of = make(tmp_path, template(answer), ("<think>", "</think>"))
    row, ids = generated(of, ASKED, f"<think>\nI add.\n</think>\n\nIt is 2.{END}")
    assert made(row, of).row.input_ids.tolist() == ids


@pytest.mark.skipif(not KIMI.is_dir(), reason="the tokenizer lies beside the project, and is not there")
def test_a_template_that_drops_reasoning_of_what_is_answered() -> None:
    of = Tokenizer(TokenizerSettings(path=KIMI))
    row, ids = generated(of, ASKED, "I add them.</think>It is 2.<|im_end|>")
    found = made(row, of)
    assert (found.row.input_ids.tolist(), found.whitespace) == (ids, "template")


def test_the_file_has_the_layout_of_an_export(tmp_path: Path) -> None:
    of = tokenizer()
    row, ids = generated(of, ASKED, f"I add.</think>It is 2.{END}")
    lost = json.loads(json.dumps(row))
    message(lost)["reasoning_content"] = None
    source = write(tmp_path / "old.jsonl", [row, lost, {"void": {"index": 0, "attempt": 1}}])
    done = write_rows([Source(str(source))], tmp_path / "new.jsonl", of, Allowed())
    assert (done.rows, done.made, dict(done.refused)) == (3, 1, {"no_reasoning": 1, "not_a_row": 1})
    assert done.trained_tokens == usage(row)["completion_tokens"]
    (line,) = (tmp_path / "new.jsonl").read_text().splitlines()
    prompt = usage(row)["prompt_tokens"]
    assert json.loads(line) == {
        "id": "old/0",
        "input_ids": ids,
        "loss_mask": [0] * prompt + [1] * (len(ids) - prompt),
        "dataset": "old",
        "index": 0,
        "row_id": "mine",
        "finish_reason": "stop",
        "flags": "reconstructed",
        "prompt_tokens": prompt,
        "completion_tokens": len(ids) - prompt,
        "part": 1,
        "parts": 1,
        "claimed_tokens": len(ids) - prompt,
        "sure_tokens": "equal",
        "sure_whitespace": "template",
        "sure_end": "stated",
    }
    from producer.audit.audit import audit

    assert not audit(tmp_path / "new.jsonl", of).wrong
