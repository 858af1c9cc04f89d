"""`show` on conversations that are made anew: why a turn has no record, and what it says of one that has."""

from pathlib import Path

import httpx
import pytest

from common.chat_template import Tokenizer
from common.ledger import Ledger, Settled
from common.segments import scan, segment_paths
from common.turns import Made, index_of
from producer.monitor.absent import why_absent
from producer.monitor.sample import read_sample, told
from tests.integration.conversation_steps import END, Talks, said, script, talk
from tests.integration.feed_steps import MAX_NEW_TOKENS
from tests.integration.worker_steps import run
from tests.lines import record_line, write_segment


@pytest.fixture
def talks(tmp_path: Path, valkey: str, ledger: Ledger) -> Talks:
    return Talks(tmp_path, valkey, ledger)


def answer(text: str) -> list[int] | httpx.Response:
    if text == "cut 1":
        return [7] * MAX_NEW_TOKENS
    if text == "bad 1":
        return httpx.Response(400, json={"error": {"message": "no"}})
    return [*said("x")[:-1], 4094, END] if text == "damaged 0" else said("x")  # a call that is never closed


def test_why_a_turn_was_not_made_is_what_became_of_those_before_it(talks: Talks) -> None:
    """It said of each of these that its conversation has no such turn."""
    talks.write(*(talk(name, 4) for name in ("whole", "cut", "bad", "damaged")))
    talks.register()
    run(lambda: talks.answer(script(answer)))

    def why(row: int, turn: int) -> str:
        return why_absent(talks.output, "A", index_of(row, turn), talks.ledger)

    assert why(0, 4) == "is not there: its conversation has 4 turns, counted from 0"
    cut = "is not made: the answer of turn 1 ended by length (truncated), and nothing can follow it"
    assert (why(1, 2), why(1, 3)) == (cut, cut)
    assert why(1, 4) == "is not there: its conversation has 4 turns, counted from 0"
    assert why(2, 3).startswith("is not made: turn 1 of its row was rejected: bad_request; ")
    assert why(3, 1) == (
        "is not made: its conversation was stopped behind turn 0 (damaged_answer: the answer cannot be read: a mark of "
        "its reasoning or tool calls is missing, and the like); `tokenmill show A 192` shows that answer"
    )
    assert why(4, 0) == "is not there: it is turn 0 of row 4, and its source has 4 rows, counted from 0"


def test_what_a_cap_has_left_is_said(talks: Talks) -> None:
    talks.write(talk("a", 3))
    talks.register()
    talks.feed()

    def why(index: int) -> str:
        return why_absent(talks.output, "A", index, talks.ledger)

    assert [why(0), why(1)] == ["has no answer yet: it is queued", "is not there yet: turn 0 of its row is queued"]
    talks.ledger.transition("A", "capped", ["open"])
    assert [why(0), why(1)] == [
        "was not started: A is capped, and it is still queued",
        "is not made: A was capped before turn 0 of its row was started",
    ]
    talks.ledger.transition("A", "open", ["capped"])
    (claimed,), _ = talks.ledger.claim("A", "w1@host", 60, [0])
    assert why(2) == "is not there yet: turn 0 of its row is in flight"
    write_segment(talks.output, "w1-0.jsonl", record_line(0, claimed.attempt, turn=0, turns=3))
    answered = Settled(0, claimed.attempt, 3, 2, 0, (), turns_left=2, answer=Made(0, [8, 9]).pack())
    assert talks.ledger.settle("A", [answered]) == [True]
    assert why(1) == "is not there yet: turn 0 of its row is answered, and waits to be followed"
    talks.ledger.transition("A", "capped", ["open"])
    assert [why(1), why(2)] == 2 * ["is not made: A was capped before turn 0 was followed"]


def test_a_turn_is_numbered_as_its_record_says_and_damages_are_no_flags(talks: Talks) -> None:
    talks.write(talk("a", 2), talk("damaged", 2))
    talks.register()
    run(lambda: talks.answer(script(answer)))
    tokenizer = Tokenizer(talks.settings.tokenizer)
    entries = {one.what.index: one for path in segment_paths(talks.output, "A") for one in scan(path, "A")}  # type: ignore[union-attr]
    heads = {}
    for index in (1, 64):
        sample = read_sample(entries[index], tokenizer)  # type: ignore[arg-type]
        heads[index] = ["".join(text for text, _ in line) for line in told(sample)]
        assert sample.record.flags == [] or index == 64
    assert heads[1][0].startswith("A/1, row 0, turn 1 (of 2): stop, attempt ")
    damaged = next(line for line in heads[64] if line.startswith("damage"))
    assert damaged == "damage, as it is read now: unbalanced_tool_calls"
