"""Each fault that data can have: the audit names it, with its cause, and nothing else; clean data raises no alarm."""

import random
from pathlib import Path

import pytest

from tests.unit.audit_steps import (
    Row,
    alarms,
    changed,
    clean,
    counted,
    flat,
    looked,
    message,
    notes,
    tokenizer,
    usage,
    words,
)


def test_clean_answers_give_no_alarm(tmp_path: Path) -> None:
    of = tokenizer()
    found = looked(tmp_path, clean(of=of), of)
    assert found.findings == []
    assert found.verdict == "Nothing looks wrong."
    assert found.facts["answers"] == found.facts["tokens_in_text"]["rows_compared"] == 200
    measured = found.facts["tokens_in_text"]
    assert measured["claimed_mean"] == measured["text_mean"]


def test_clean_flat_records_give_no_alarm(tmp_path: Path) -> None:
    found = looked(tmp_path, flat(clean()))
    assert found.findings == []
    assert found.facts["layouts"] == {"prompt": 200}


def test_reasoning_that_nobody_saved(tmp_path: Path) -> None:
    """1,402 tokens claimed and 298 saved: the reasoning was read from a field that stayed empty."""
    of = tokenizer()

    def lose(row: Row) -> None:
        message(row)["reasoning_content"] = None

    rows = clean(of=of)
    kept = rows[7]
    for row in rows:
        if row is not kept:
            lose(row)
    found = looked(tmp_path, rows, of)
    assert alarms(found) == {"reasoning_lost": "wrong"}
    claimed, text = (found.facts["tokens_in_text"][name] for name in ("claimed_mean", "text_mean"))
    assert found.verdict.startswith(
        f"99.5 % of the answers have no reasoning while usage claims {claimed:,.0f} tokens a row "
        f"and the text has {text:,.0f}."
    )
    assert "reasoning parser" in found.verdict
    assert "/generate" in found.verdict
    assert found.findings[0].examples == ("row 0", "row 1", "row 2")


def test_the_same_without_a_tokenizer_where_bytes_prove_it(tmp_path: Path) -> None:
    rows = clean()
    for row in rows:
        message(row)["reasoning_content"] = ""
    for index, row in enumerate(rows):
        usage(row)["completion_tokens"] = 1402 + index
    found = looked(tmp_path, rows)
    assert alarms(found) == {"reasoning_lost": "wrong"}
    assert found.facts["tokens_in_text"] is None


def test_reasoning_tokens_that_usage_counts_prove_it_too(tmp_path: Path) -> None:
    rows = clean()
    for row in rows:
        del message(row)["reasoning_content"]
        usage(row)["completion_tokens_details"] = {"reasoning_tokens": 200}
    assert alarms(looked(tmp_path, rows)) == {"reasoning_lost": "wrong"}


def test_a_model_that_did_not_think(tmp_path: Path) -> None:
    """The template was not told to: the field is empty, and the tokens claimed are those of the text."""
    of = tokenizer()
    rows = clean(of=of)
    for row in rows:
        message(row)["reasoning_content"] = ""
        usage(row)["completion_tokens"] = counted(of, message(row)["content"])
    found = looked(tmp_path, rows, of)
    assert alarms(found) == {"no_reasoning": "wrong"}
    assert "chat template was not told to" in found.verdict


def test_plain_answers_are_no_alarm(tmp_path: Path) -> None:
    rows = [
        {"messages": [*row["messages"], {"role": "assistant", "content": message(row)["content"]}]} for row in clean()
    ]
    found = looked(tmp_path, rows)
    assert (alarms(found), notes(found)) == ({}, {"plain_answers"})


def test_reasoning_within_the_content_is_found(tmp_path: Path) -> None:
    """No reasoning parser, and a client that kept all of it: nothing is lost."""
    rows = clean()
    for row in rows:
        one = message(row)
        one["content"] = f"{one['reasoning_content']}\n</think>\n\n{one['content']}"
        one["reasoning_content"] = None
    found = looked(tmp_path, rows)
    assert (alarms(found), notes(found)) == ({}, {"think_end_alone"})
    assert found.facts["answers_without_reasoning"] == 0
    assert found.facts["reasoning_in_content"] == 200


@pytest.mark.parametrize("reason", ["length", "stop", None])
def test_answers_cut_at_128_tokens(tmp_path: Path, reason: str | None) -> None:
    rows = clean()
    for row in rows[::2]:
        usage(row)["completion_tokens"] = 128
        row["response"]["choices"][0]["finish_reason"] = reason
    found = looked(tmp_path, rows)
    assert alarms(found) == {"one_length": "wrong"} | ({"truncated": "wrong"} if reason == "length" else {})
    assert "exactly 128 tokens long" in found.findings[0].says
    assert "default of SGLang" in found.findings[0].cause


def test_texts_cut_at_one_length_are_seen_without_usage(tmp_path: Path) -> None:
    rng = random.Random(2)
    rows = [{"prompt": words(rng, 9), "response": words(rng, rng.randrange(30, 400))[:900]} for _ in range(300)]
    found = looked(tmp_path, rows)
    assert alarms(found) == {"one_length": "wrong"}
    assert "exactly 900 characters" in found.verdict


def test_one_answer_many_times_was_not_cut(tmp_path: Path) -> None:
    rows = clean()
    for row in rows[::4]:
        message(row).update(
            content="I cannot help with that, since it is not something that I know of.", reasoning_content="No."
        )
        usage(row)["completion_tokens"] = 64
    assert alarms(looked(tmp_path, rows)) == {"same_answers": "warning"}


def test_a_timeout_that_dropped_the_long_ones(tmp_path: Path) -> None:
    rows = clean(1_000)
    kept = [row | {"latency": 5 + index * 0.0547} for index, row in enumerate(rows) if index % 12]
    found = looked(tmp_path, kept)
    assert alarms(found) == {"rows_missing": "wrong"}
    assert found.findings[0].says == (
        "83 of 999 numbers (8.3 %) between the lowest and the highest are not there. "
        "The slowest answer took 59.6 s, just under 60 s."
    )


def test_timeouts_saved_in_the_place_of_answers(tmp_path: Path) -> None:
    rows = clean()
    for row in rows[::12]:
        row["response"] = None
        row["error"] = "Request timed out after 60 s"
    assert alarms(looked(tmp_path, rows)) == {"timed_out": "wrong"}


def test_failed_requests_of_a_batch(tmp_path: Path) -> None:
    rows = [
        {"custom_id": f"request-{index}", "response": {"status_code": 200, "body": row["response"]}, "error": None}
        for index, row in enumerate(clean())
    ]
    assert looked(tmp_path, rows).findings == []
    rows[3]["response"] = {"status_code": 500, "body": {"error": {"message": "out of memory"}}}
    found = looked(tmp_path, rows)
    assert alarms(found) == {"failed": "warning"}
    assert found.findings[0].examples == ("row 3: status 500: out of memory",)


# Content and reasoning as they become, of what they were.
DAMAGES = {
    "end token": ("control_tokens", "{c}<|im_end|>", "{r}"),
    "full-width bars": ("control_tokens", "{c}<\uff5cend\u2581of\u2581sentence\uff5c>", "{r}"),
    "beside and within": ("think_doubled", "<think>{r}</think>{c}", "{r}"),
    "mark in its field": ("think_doubled", "{c}", "<think>\n{r}"),
    "two openings": ("think_doubled", "<think><think>{r}</think>{c}", ""),
    "never closed": ("think_unclosed", "<think>{c}", ""),
    "replacement": ("replacement", "{c} \ufffd\ufffd", "{r}"),
    "mojibake": ("mojibake", "{c} caf\u00c3\u00a9 \u00e2\u20ac\u2122", "{r}"),
    "nul": ("nul", "{c}\0", "{r}"),
    "nothing": ("empty", "", ""),
    "no answer": ("think_only", "", "{r}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_answers(tmp_path: Path, damage: str) -> None:
    name, content, reasoning = DAMAGES[damage]

    def change(row: Row) -> None:
        texts = {"c": message(row)["content"], "r": message(row)["reasoning_content"]}
        message(row).update(content=content.format(**texts), reasoning_content=reasoning.format(**texts))

    rows = changed(clean(), 0.05, change)
    found = looked(tmp_path, rows)
    assert name in alarms(found)
    assert set(alarms(found)) <= {name, "same_answers", "think_only", "more_tokens_than_bytes"}
    (one,) = (one for one in found.findings if one.name == name)
    assert one.examples == ("row 0", "row 20", "row 40")
    assert one.fix


def test_text_of_many_languages_is_not_damaged(tmp_path: Path) -> None:
    texts = [
        "\u00c9tait-ce \u00e0 N\u00eemes ? \u00c2ge et \u00c3o, S\u00c3O PAULO, 25 \u00b0C",
        "\u00ab \u00c2 \u00bb, \u00e2\u20ac est une somme",
        "\u65e5\u672c\u8a9e \U0001f642 \u0939\u093f\u0928\u094d\u0926\u0940",
        "std::vector<int> x; a<b && b>c; <s>struck</s> <|begin_of_thought|>",
        "In HTML write <think> as text? Then </think> closes it.",
    ]
    rows = clean(50)
    for index, row in enumerate(rows):
        message(row)["content"] += texts[index % len(texts)]
    assert alarms(looked(tmp_path, rows)) == {}


def test_duplicates(tmp_path: Path) -> None:
    rows = clean()
    found = looked(tmp_path, [*rows, *rows[:20]])
    assert alarms(found) == {"duplicates": "warning"}
    assert found.findings[0].says.startswith("20 rows (9.1 %)")
    assert found.findings[0].examples[0] == "rows 0 and 200, 2 times in all"


def test_several_answers_to_a_prompt_are_no_alarm(tmp_path: Path) -> None:
    rows = clean()
    for row in rows[100:]:
        row["messages"] = rows[3]["messages"]
    found = looked(tmp_path, rows)
    assert (alarms(found), notes(found)) == ({}, {"same_prompts"})


def test_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    looked(tmp_path, clean(99))
    path.write_bytes(path.read_bytes() + b'{"id": "row-99", "messages": [{"role"')
    from producer.audit.audit import audit

    found = audit(path)
    assert alarms(found) == {"not_json": "wrong"}
    assert found.findings[0].says.startswith("1 of 100 rows (1.0 %) cannot be read")
    assert found.findings[0].examples[0].startswith("row 99: the line is not JSON")


@pytest.mark.parametrize(
    ("roles", "name"),
    [
        (["assistant", "user", "assistant"], "starts_with_assistant"),
        (["user", "user", "assistant"], "user_twice"),
        (["user", "assistant", "assistant"], "assistant_twice"),
        (["user", "system", "assistant"], "late_system"),
        (["user", "assistant", "user"], "no_answer"),
        (["user", "tool", "assistant"], "tool_without_call"),
        (["system", "assistant"], "no_user"),
    ],
)
def test_turns_out_of_order(tmp_path: Path, roles: list[str], name: str) -> None:
    rng = random.Random(4)
    rows = [
        {"conversations": [{"from": role, "value": words(rng, 20)} for role in ("human", "gpt")]} for _ in range(40)
    ]
    rows[7] = {"conversations": [{"from": role, "value": words(rng, 20)} for role in roles]}
    assert name in alarms(looked(tmp_path, rows))
    del rows[7]
    assert alarms(looked(tmp_path, rows)) == {}
