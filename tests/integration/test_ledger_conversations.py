"""Conversations in the ledger: each turn is queued once, behind its predecessor's answer, or the rest is counted."""

import pytest

from common.ledger import Claimed, DatasetState, Ending, Ledger, NextTurn, Settled
from common.turns import Made, index_of
from tests.integration.ledger_steps import KEYS, admit, claim, every_key, feed, settings

FIRST, SECOND, THIRD = index_of(3, 0), index_of(3, 1), index_of(3, 2)
ANSWER = Made(0, [5, 6, 2]).pack()


def begin(ledger: Ledger, *indices: int) -> None:
    """Register b1, give it room, and queue these samples, each with a conversation; its source ends with them."""
    feed(ledger, 0)
    assert converse(ledger, *[NextTurn(index, b"prompt", b"talk %d" % index) for index in indices]) == len(indices)
    ledger.feed("b1", before="0", after="0", ended=True, rejected=[], samples=[])


def converse(ledger: Ledger, *turns: NextTurn | Ending) -> int | None:
    return ledger.converse("b1", turns, before="0")


def second() -> NextTurn:
    return NextTurn(SECOND, b"prompt 2", b"talk 2", follows=FIRST)


def settle(ledger: Ledger, sample: Claimed, left: int, answer: bytes = ANSWER) -> bool:
    flags = () if answer else ("truncated",)
    (counts,) = ledger.settle("b1", [Settled(sample.index, sample.attempt, 10, 5, 0, flags, left, answer)])
    return counts


def state(ledger: Ledger) -> DatasetState:
    return ledger.snapshot("b1")


def kept(ledger: Ledger) -> set[str]:
    """Which of the hashes of conversations hold anything."""
    return {"conversations", "answers", "resumed"} & {key.rpartition(":")[2] for key in every_key(ledger)}


def test_an_answer_waits_with_its_conversation_until_the_next_turn_follows_it_once(ledger: Ledger) -> None:
    begin(ledger, FIRST)
    (sample,) = claim(ledger, FIRST)
    assert settle(ledger, sample, 2)
    assert settle(ledger, sample, 2)  # asked again after a lost reply

    assert ledger.answered("b1", 10) == [(FIRST, ANSWER, b"talk %d" % FIRST)]
    assert (state(ledger).answers, state(ledger).queued) == (1, 0)

    assert converse(ledger, second()) == 1
    assert converse(ledger, second()) == 0  # the same again, or another feed of the same answer

    assert ledger.answered("b1", 10) == []
    assert (state(ledger).answers, state(ledger).queued, state(ledger).fed) == (0, 1, 2)
    (sample,) = claim(ledger, SECOND)
    assert sample.payload == b"prompt 2"
    assert converse(ledger, second()) == 0  # while it is in flight
    assert settle(ledger, sample, 0, b"")
    assert converse(ledger, second()) == 0  # and when it is done
    assert kept(ledger) == set()
    assert state(ledger).stopped == {}


def test_answers_are_taken_in_the_order_of_their_indices(ledger: Ledger) -> None:
    begin(ledger, *range(0, 640, 64))
    for sample in claim(ledger, *range(576, -1, -64)):
        settle(ledger, sample, 1)
    assert [index for index, _, _ in ledger.answered("b1", 4)] == [0, 64, 128, 192]


@pytest.mark.parametrize("when", ["queued", "in flight", "done"])
def test_the_first_turn_of_a_row_is_queued_once(ledger: Ledger, when: str) -> None:
    begin(ledger, FIRST)
    if when != "queued":
        (sample,) = claim(ledger, FIRST)
    if when == "done":
        settle(ledger, sample, 0, b"")
    assert converse(ledger, NextTurn(FIRST, b"other", b"other")) == 0
    assert (state(ledger).queued, state(ledger).fed) == (int(when == "queued"), 1)


def test_a_feed_whose_cursor_has_moved_changes_nothing(ledger: Ledger) -> None:
    begin(ledger, FIRST)
    before = every_key(ledger)
    assert ledger.converse("b1", [NextTurn(SECOND, b"p", b"c")], before="9") is None
    assert every_key(ledger) == before
    assert state(ledger).queued == 1


def test_a_truncated_answer_stops_its_conversation(ledger: Ledger) -> None:
    begin(ledger, FIRST)
    (sample,) = claim(ledger, FIRST)
    assert settle(ledger, sample, 4, b"")
    assert settle(ledger, sample, 4, b"")
    assert state(ledger).stopped == {"truncated": 4}
    assert kept(ledger) == set()


def test_a_truncated_last_turn_stops_nothing(ledger: Ledger) -> None:
    begin(ledger, FIRST)
    (sample,) = claim(ledger, FIRST)
    assert settle(ledger, sample, 0, b"")
    assert state(ledger).stopped == {}
    assert kept(ledger) == set()


def test_a_rejected_turn_stops_its_conversation(ledger: Ledger) -> None:
    begin(ledger, FIRST, index_of(4, 0))
    one, other = claim(ledger, FIRST, index_of(4, 0))
    for answers in ([True, True], [False, False]):
        ended = [(one.index, one.attempt, "nan"), (other.index, other.attempt, "nan")]
        assert ledger.reject("b1", ended, turns_left={FIRST: 3}) == answers
    assert (state(ledger).rejected, state(ledger).stopped) == (2, {"rejected": 3})
    assert kept(ledger) == set()


def test_a_conversation_that_cannot_go_on_is_counted_once(ledger: Ledger) -> None:
    begin(ledger, FIRST)
    settle(ledger, claim(ledger, FIRST)[0], 2)
    for _ in range(2):
        assert converse(ledger, Ending(FIRST, "other_tool_calls", 2)) == 0
    assert state(ledger).stopped == {"other_tool_calls": 2}
    assert kept(ledger) == set()


def test_a_superseded_answer_is_followed_by_nothing(ledger: Ledger) -> None:
    begin(ledger, FIRST)
    (old,) = claim(ledger, FIRST)
    ledger.release("b1", [(old.index, old.attempt)], failed=False)
    (new,) = claim(ledger, FIRST)
    assert not settle(ledger, old, 1, Made(0, [1]).pack())
    assert state(ledger).answers == 0
    assert settle(ledger, new, 1)
    assert [answer for _, answer, _ in ledger.answered("b1", 9)] == [ANSWER]


def test_a_dataset_is_exhausted_only_when_no_answer_waits(ledger: Ledger) -> None:
    begin(ledger, FIRST)
    settle(ledger, claim(ledger, FIRST)[0], 1)
    assert admit(ledger) == "open"
    converse(ledger, second())
    assert admit(ledger) == "open"
    settle(ledger, claim(ledger, SECOND)[0], 0, b"")
    assert admit(ledger) == "exhausted"


def test_a_cap_leaves_answers_waiting_and_a_raised_one_goes_on_with_them(ledger: Ledger) -> None:
    begin(ledger, FIRST)
    settle(ledger, claim(ledger, FIRST)[0], 1)
    assert admit(ledger, room=0) == "capped"
    assert state(ledger).answers == 1
    assert ledger.register(settings(cap_tokens=2000)) == "reopened"
    assert admit(ledger) == "open"
    assert converse(ledger, second()) == 1


def test_prompt_tokens_are_kept_where_the_budget_counts_them(ledger: Ledger) -> None:
    begin(ledger)
    converse(ledger, NextTurn(FIRST, b"p", b"c", prompt_tokens=7), NextTurn(index_of(4, 0), b"p", b"c"))
    assert ledger.progress("b1").prompts == {FIRST: 7}


# After the ledger was lost: answers are there, conversations are not.


def rebuild(ledger: Ledger, *turns: int) -> None:
    feed(ledger, 0)
    records = [Settled(index, 9, 10, 5, 0, (), 5 - turn, Made(turn, [turn]).pack()) for turn, index in enumerate(turns)]
    assert all(ledger.settle("b1", records, rebuild=True))


def test_recovered_answers_wait_for_their_row_to_be_read_again(ledger: Ledger) -> None:
    rebuild(ledger, FIRST, SECOND)
    now = state(ledger)
    assert (now.answers, now.resumed, ledger.answered("b1", 9)) == (0, 2, [])
    assert ledger.resumed("b1", [2, 3, 4]) == {3: [Made(0, [0]), Made(1, [1])]}
    assert ledger.resumed("b1", []) == {}

    third = NextTurn(THIRD, b"p", b"c", follows=SECOND, earlier=1)
    assert converse(ledger, third) == 1
    assert converse(ledger, third) == 0
    assert (state(ledger).queued, state(ledger).resumed) == (1, 0)
    assert kept(ledger) == {"conversations"}


def test_answers_of_the_row_before_are_left(ledger: Ledger) -> None:
    rebuild(ledger, index_of(2, 63), FIRST)
    assert converse(ledger, NextTurn(SECOND, b"p", b"c", follows=FIRST, earlier=0)) == 1
    assert ledger.redis.hkeys(KEYS.resumed) == [b"%d" % index_of(2, 63)]


@pytest.mark.parametrize("turn", [FIRST, SECOND])
def test_a_turn_that_was_answered_in_the_meantime_is_followed_then(ledger: Ledger, turn: int) -> None:
    """A worker went on while the books were built anew, and settled between the look at the row and this call."""
    rebuild(ledger, *([FIRST] if turn == SECOND else []))
    assert ledger.settle("b1", [Settled(turn, 9, 10, 5, 0, (), 1, ANSWER)]) == [True]
    follows = FIRST if turn == SECOND else None

    assert converse(ledger, NextTurn(turn, b"p", b"talk", follows=follows)) == 0

    assert ledger.answered("b1", 9) == [(turn, ANSWER, b"talk")]
    assert (state(ledger).queued, state(ledger).resumed) == (0, 0)


def test_payloads_of_samples_that_have_not_ended(ledger: Ledger) -> None:
    begin(ledger, FIRST)
    assert ledger.payloads("b1", [FIRST, 7]) == {FIRST: b"prompt"}
    assert ledger.payloads("b1", []) == {}
