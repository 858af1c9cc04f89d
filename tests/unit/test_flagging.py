"""The flags of an answer, each by an answer that has it and one that nearly has it."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.answers import parse
from common.chat_template import Tokenizer
from common.flagging import flags_of, prompt_end
from common.flags import BITS, FLAGS, bits_of
from common.loops import Loop, copied_share, find_loop
from common.reading import READING, Reading, find_reading, keep_reading, pack, packed_for
from common.reading import _parts as by_text
from common.sections import TokenizerSettings
from tests.unit.answer_models import END, make, template

EXAMPLE = Path(__file__).parents[2] / "examples" / "tokenizer"
CALL = '<tool_call>{"name": "look", "arguments": {"at": "Oslo"}}</tool_call>'


@pytest.fixture(scope="module")
def example() -> Tokenizer:
    return Tokenizer(TokenizerSettings(path=EXAMPLE))


@pytest.fixture(scope="module")
def reading(example: Tokenizer) -> Reading:
    return Reading(pack(example))


def prompt_of(tokenizer: Tokenizer, **kwargs: Any) -> bytes:
    """Ends within a think block, unless told otherwise."""
    return msgspec.json.encode(
        tokenizer.encode([tokenizer.render([{"role": "user", "content": "Hm?"}], None, kwargs)])[0]
    )


def flags(tokenizer: Tokenizer, reading: Reading, text: str, prompt: bytes = b"", **more: Any) -> set[str]:
    output_ids = tokenizer.encode([text])[0]
    asked: dict[str, Any] = {"truncated": False, "asked_to_think": True, **more}
    return set(flags_of(output_ids, prompt or prompt_of(tokenizer), reading, **asked))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("I see.</think>Yes.", set()),
        (f"I see.</think>Yes.{CALL}", set()),
        (f"I see.</think>{CALL}", set()),
        ("I see, and I see.", {"no_think_end"}),
        ("</think>Yes.", {"empty_think"}),
        ("\n\n</think>Yes.", {"empty_think"}),
        ("I see.</think>", {"think_only"}),
        ("I see.</think>\n\n", {"think_only"}),
        ("</think>", {"empty_think", "empty_answer"}),
        ("", {"no_think_end", "empty_answer"}),
        ("\n", {"no_think_end", "empty_answer"}),
        ("I see.</think>Yes.<tool_call>", {"unbalanced_tool_calls"}),
        ("I see.</think>Yes.</tool_call>", {"unbalanced_tool_calls"}),
        ('I see.</think><tool_call>{"name": "look", "arguments": {"at": Oslo}}</tool_call>', {"tool_call_not_json"}),
        ("I see.</think>Yes.<tool_call>look at Oslo</tool_call>", {"tool_call_not_json"}),
        ("I see.</think>Yes.<|im_start|>user", {"control_tokens"}),
        ("I see.</think>Yes.</think>No.", {"control_tokens"}),
        ("I <think>see.</think>Yes.", {"control_tokens"}),
        ("I see.</think>" + "\ufffd" * 3 + "Yes, it is so.", {"bad_text"}),
        ("I see.</think>" + "\ufffd" * 3 + "Yes, it is so." * 10, set()),  # it speaks of that character
        ("I see.</think>\ufffdA.", set()),
    ],
)
def test_what_an_answer_says(example: Tokenizer, reading: Reading, text: str, found: set[str]) -> None:
    assert flags(example, reading, text + END) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("I see, and then", {"no_think_end"}),  # a gate leaves it out where it is truncated
        ("I see.</think>Yes.<tool_call>{", set()),
        ('I see.</think><tool_call>{"name": "look", "arg', set()),
        ("I see.</think>", {"think_only"}),
    ],
)
def test_what_was_cut_off_is_not_broken(example: Tokenizer, reading: Reading, text: str, found: set[str]) -> None:
    assert flags(example, reading, text, truncated=True) == found


def test_a_model_that_was_told_not_to_think_has_not_forgotten_to(example: Tokenizer, reading: Reading) -> None:
    closed = prompt_of(example, thinking=False)
    assert flags(example, reading, "Yes." + END, closed) == {"no_think"}
    assert flags(example, reading, "Yes." + END, closed, asked_to_think=False) == set()
    # It thinks though its prompt has closed the think block.
    assert flags(example, reading, "I see.</think>Yes." + END, closed) == {"control_tokens"}


def test_a_model_without_thinking_has_none_of_its_flags(tmp_path: Path) -> None:
    plain = make(tmp_path, template("{{ message.content }}"), [])
    assert flags(plain, Reading(pack(plain)), "Yes." + END) == set()
    assert flags(plain, Reading(pack(plain)), END) == {"empty_answer"}


def test_a_model_that_opens_its_thinking_itself(tmp_path: Path) -> None:
    thinking = "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    own = make(tmp_path, template(thinking + "{{ message.content }}"), ["<think>", "</think>"])
    reading = Reading(pack(own))
    assert flags(own, reading, "<think>I see.</think>Yes." + END) == set()
    assert flags(own, reading, "<think></think>Yes." + END) == {"empty_think"}
    assert flags(own, reading, "<think>I see." + END) == {"no_think_end"}
    assert flags(own, reading, "Yes." + END) == {"no_think"}


def test_without_a_reading_the_ids_still_tell(example: Tokenizer) -> None:
    ids = example.encode(["I see. " + "Well, " * 200])[0]
    assert set(flags_of(ids, prompt_of(example), None, truncated=True, asked_to_think=True)) == {"repetition"}


def test_a_reading_reads_as_the_tokenizer_does(example: Tokenizer, reading: Reading) -> None:
    draw = random.Random(5)
    prompt = msgspec.json.decode(prompt_of(example))
    for _ in range(200):
        ids = [draw.choice([draw.randrange(4096), draw.randrange(4088, 4096)]) for _ in range(40)]
        assert reading.read(ids, prompt[-20:]) == parse(ids, example, input_ids=prompt)


@pytest.mark.parametrize("thinking", [True, False])
def test_ids_alone_tell_the_same_as_the_text(example: Tokenizer, reading: Reading, thinking: bool) -> None:
    draw = random.Random(7)
    prompt = prompt_end(prompt_of(example, thinking=thinking))
    blank, end = example.encode(["\n\n"])[0], example.encode(["</think>"])[0]
    texts = [one for one in range(4088) if one not in reading._broken]
    plain = 0
    for _ in range(400):
        some = [draw.choices(texts, k=30), [*draw.choices(texts, k=99), draw.randrange(4088)]]
        parts = [draw.choice([[], blank, *some]) for _ in range(3)]
        ids = [*parts[0], *draw.choice([[], end, end, [draw.randrange(4088, 4096)]]), *parts[1], *parts[2]]
        ids += draw.choice([[], [4090]])
        quick = reading._plain_parts(ids, opened=thinking)
        whole = by_text(reading.read(ids, prompt), truncated=False)
        plain += quick is not None
        assert quick is None or quick == whole
        assert reading.parts(ids, prompt, truncated=False) == whole
    assert plain > 100


def test_a_reading_is_kept_once_for_each_tokenizer_and_template(example: Tokenizer, tmp_path: Path) -> None:
    facts = {"vocab_size": 5000, **example.fingerprint()}
    assert find_reading(tmp_path, facts) is None
    kept = keep_reading(tmp_path, {**facts, READING: packed_for(tmp_path, facts, example)})
    assert kept == facts
    assert packed_for(tmp_path, facts, example) == b""
    found = find_reading(tmp_path, facts)
    assert found is not None
    assert found.decode(example.encode(["Größe 🙂"])[0]) == "Größe 🙂"
    assert found.decode([4999]) == "\ufffd"  # the model has the id, and the tokenizer no token
    assert find_reading(tmp_path, {**facts, "template_sha256": "another"}) is None


# Loops and copies


@pytest.mark.parametrize("period", [1, 3, 20, 300])
@pytest.mark.parametrize("behind", [0, 500])
def test_a_loop_is_found_with_its_place(period: int, behind: int) -> None:
    draw = random.Random(period)
    ids = [draw.randrange(100_000) for _ in range(700 + behind)]
    stretch = ids[:period]
    length = max(260, 5 * period)
    looped = ids[:700] + (stretch * length)[:length] + ids[700:]
    found = find_loop(looped)
    assert found is not None
    assert (found.period, abs(found.start - 700) <= 1, abs(found.length - length) <= 2) == (period, True, True)
    assert find_loop(ids) is None


@pytest.mark.parametrize("lead", [0, 13, 50])
@pytest.mark.parametrize(("row", "rows", "rest"), [(19, 3, 7), (24, 4, 5), (2, 20, 9), (40, 2, 14)])
def test_a_loop_that_has_loops_within_is_found(lead: int, row: int, rows: int, rest: int) -> None:
    """As a table of equal rows, again and again: 16 ids of a row come again in the next row, not in the next table."""
    draw = random.Random(row)
    ids = [draw.randrange(100_000) for _ in range(lead)]
    table = [draw.randrange(100_000) for _ in range(row)] * rows + [draw.randrange(100_000) for _ in range(rest)]
    found = find_loop(ids + table * 12)
    assert found is not None
    assert (found.period, abs(found.start - lead) <= 1, found.length) == (len(table), True, 12 * len(table))


def test_what_comes_again_now_and_then_is_no_loop() -> None:
    draw = random.Random(1)
    line = [draw.randrange(1000) for _ in range(40)]
    table = [one for row in range(60) for one in (*line, row, row + 7, row * row)]
    assert find_loop(table) is None
    assert find_loop([7] * 150 + line) is None
    assert find_loop([7] * 250 + line) == Loop(0, 250, 1)


def test_a_copy_of_the_prompt_is_told_from_one_that_quotes_it() -> None:
    draw = random.Random(2)
    prompt = [draw.randrange(100_000) for _ in range(400)]
    other = [draw.randrange(100_000) for _ in range(400)]
    text = msgspec.json.encode(prompt)
    assert copied_share(prompt, text) == 1.0
    assert copied_share(other, text) == 0.0
    assert copied_share([*other[:200], *prompt[:200]], text) == 0.5
    assert copied_share(prompt[:60], text) == 0.0
    # Numbers that begin or end with others are none of them.
    assert copied_share([1] * 64, msgspec.json.encode([11] * 400)) == 0.0


def test_the_last_ids_of_a_long_prompt_are_read_alone() -> None:
    ids = list(range(163_000, 163_500))
    assert prompt_end(msgspec.json.encode(ids)) == ids[-12:]
    assert prompt_end(msgspec.json.encode([1, 2])) == [1, 2]


def test_every_flag_has_a_bit() -> None:
    assert bits_of(FLAGS) == 2 ** len(FLAGS) - 1 < 2**32
    assert bits_of(["truncated", "uncounted", "max_new_tokens_cut"]) == BITS["truncated"]
