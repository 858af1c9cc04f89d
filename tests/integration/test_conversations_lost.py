"""Conversations whose worker was killed, or whose ledger was lost: every turn is made once, and none is missing."""

import asyncio
from pathlib import Path

import httpx
import pytest

from common.ledger import Ledger
from common.rejects import read_rejects
from common.segments import count
from common.turns import index_of
from producer.recover import recover_dataset
from tests.integration.conversation_steps import (
    Talks,
    assert_own_history,
    assistant,
    library,
    rendered,
    said,
    script,
    talk,
    user,
)
from tests.integration.feed_steps import MAX_NEW_TOKENS, Row
from tests.integration.ledger_steps import HOUR, lapse_all
from tests.integration.worker_steps import assert_books_agree, run
from tests.lines import record_line
from workers.adoption import adopt
from workers.segment_writer import SegmentWriter

# What is made of each row in the end, and how many turns it has.
MADE = {"one": (1, 1), "two": (2, 2), "five": (5, 5), "cut": (2, 5), "bad": (1, 4), "torn": (3, 6)}
STOPPED = {"truncated": 3, "rejected": 2, "damaged_answer": 3}


@pytest.fixture
def talks(tmp_path: Path, valkey: str, ledger: Ledger) -> Talks:
    talks = Talks(tmp_path, valkey, ledger)
    talks.write(*[talk(name, turns) for name, (_, turns) in MADE.items()])
    talks.register()
    return talks


def answer(text: str) -> list[int] | httpx.Response:
    if text == "cut 1":
        return [7] * MAX_NEW_TOKENS
    if text == "bad 1":
        return httpx.Response(400, json={"error": {"message": "no"}})
    if text == "torn 2":
        return [*said("x", "never</think>ended")[:-1], 4094, 4090]
    return said(f"I say {text}")


def lose(talks: Talks) -> None:
    """Redis is emptied, and the books are built anew from the files."""
    talks.ledger.redis.flushall()
    recover_dataset(talks.output, talks.settings.datasets[0], talks.ledger)
    talks.set_model()
    talks.admit()


def assert_all_made_once(talks: Talks, superseded: int = 0) -> None:
    found = talks.turns()
    assert {name: len(records) for name, records in found.items()} == {name: made for name, (made, _) in MADE.items()}
    for name, records in found.items():
        assert_own_history(name, records, MADE[name][1])
    state = talks.state()
    assert (state.state, state.answers, state.resumed, state.queued) == ("exhausted", 0, 0, 0)
    assert (state.done, state.rejected, dict(state.stopped)) == (14, 1, STOPPED)
    assert count(talks.output, "A").superseded == superseded
    assert_books_agree(talks.ledger, talks.output, "A")


def test_without_any_loss(talks: Talks) -> None:
    run(lambda: talks.answer(script(answer)))
    assert_all_made_once(talks)


@pytest.mark.parametrize("done", [1, 4, 7, 10, 13, 14])
def test_a_run_that_stopped_and_lost_redis_goes_on_where_it_was(talks: Talks, done: int) -> None:
    run(lambda: talks.answer(script(answer), stop=lambda: talks.state().done >= done))
    before = talks.state()
    lose(talks)
    assert (talks.state().done, talks.state().rejected) == (before.done, before.rejected)

    run(lambda: talks.answer(script(answer), owner="w2@host"))

    assert_all_made_once(talks)


def test_books_that_are_built_anew_when_all_is_done_count_what_was_stopped(talks: Talks) -> None:
    run(lambda: talks.answer(script(answer)))
    lose(talks)
    run(lambda: talks.answer(script(answer)))
    assert_all_made_once(talks)


class Loss:
    """Redis loses everything while one answer alone is in flight, which is held back; then that answer comes.

    It is settled before the row is read again, or its sample is queued a second time before.
    """

    def __init__(self, talks: Talks, held: str, *, before_reading: bool) -> None:
        self._talks = talks
        self._held = held
        self._before_reading = before_reading
        self._asked, self._go = asyncio.Event(), asyncio.Event()
        self._done = -1  # when it was lost
        self.calls = 0

    async def answer(self, text: str) -> list[int] | httpx.Response:
        if text == self._held:
            self.calls += 1
            if self.calls == 1:
                self._asked.set()
                await self._go.wait()
        return answer(text)

    def step(self) -> bool:
        """What happens between two feeds."""
        state = self._talks.state()
        if self._done < 0:
            if self._asked.is_set() and (state.in_flight, state.queued, state.answers) == (1, 0, 0):
                lose(self._talks)
                self._done = self._talks.state().done
                if self._before_reading:
                    self._talks.ledger.transition("A", "paused", ["open"])
                    self._go.set()
        elif self._before_reading:
            if state.done > self._done:
                self._talks.ledger.transition("A", "open", ["paused"])
        elif state.queued + state.in_flight > 0:
            self._go.set()
        return False


@pytest.mark.parametrize("before_reading", [True, False])
@pytest.mark.parametrize("held", ["five 0", "five 2", "cut 1", "two 1"])
def test_an_answer_that_comes_while_the_books_are_built_anew(talks: Talks, held: str, before_reading: bool) -> None:
    """The worker lives, and knows nothing of it."""
    loss = Loss(talks, held, before_reading=before_reading)

    run(lambda: talks.answer(script(loss.answer), stop=loss.step))

    assert loss.calls == 1 if before_reading else loss.calls in {1, 2}
    assert_all_made_once(talks, superseded=loss.calls - 1)


def test_a_worker_that_was_killed_with_a_turn_loses_it_to_another(talks: Talks) -> None:
    run(lambda: talks.answer(script(answer), stop=lambda: talks.state().done >= 6))
    talks.feed()
    indices = talks.ledger.unsent("A", 100)
    claimed, _ = talks.ledger.claim("A", "dead@host", HOUR, indices)
    assert claimed
    lapse_all(talks.ledger, "A")
    back, ended = talks.ledger.expire("A", max_tries=3)
    assert (len(back), ended) == (len(claimed), [])

    run(lambda: talks.answer(script(answer), owner="w2@host"))

    assert_all_made_once(talks)


def test_what_a_killed_worker_had_written_is_followed_by_the_next_turn(talks: Talks) -> None:
    """It died between its fsync and its settle call; the keeper counts the record, and hands its answer on."""
    talks.write(talk("five", 5))
    assert talks.feed() == 1
    index, ids = next(iter(talks.prompts().items()))
    (claimed,), _ = talks.ledger.claim("A", "dead@host", HOUR, [index])
    line = record_line(index, claimed.attempt, prompt=ids, answer=said("written"), meta={"id": "five"}, turn=0, turns=5)
    SegmentWriter(talks.output, "dead-host", 2**20).append("A", [line])
    keeper = SegmentWriter(talks.output, "keeper", 2**20)

    assert adopt(talks.ledger, keeper, talks.output, "A") == 1
    assert adopt(talks.ledger, keeper, talks.output, "A") == 0
    assert talks.state().answers == 1

    run(lambda: talks.answer(script(answer)))

    records = talks.turns()["five"]
    assert len(records) == 5
    assert_own_history("five", records, 5)
    assert_books_agree(talks.ledger, talks.output, "A")


def test_an_answer_that_cannot_be_read_back_is_counted_and_not_followed(talks: Talks) -> None:
    assert talks.feed() == len(MADE)
    (claimed,), _ = talks.ledger.claim("A", "dead@host", HOUR, [index_of(2, 0)])
    line = record_line(claimed.index, claimed.attempt, output_ids="damaged", turn=0, turns=5)
    SegmentWriter(talks.output, "dead-host", 2**20).append("A", [line])
    assert adopt(talks.ledger, SegmentWriter(talks.output, "keeper", 2**20), talks.output, "A") == 1
    assert (talks.state().answers, talks.state().stopped) == (0, {"truncated": 4})


def test_where_answers_begin_is_known_again_where_a_dataset_has_template_arguments_of_its_own(talks: Talks) -> None:
    """With thinking = false the prompt closes the think block: what comes is content from its first id on."""
    talks.configure(more='turns = "all"\nchat_template_kwargs = { thinking = false }')
    talks.write(talk("five", 5))
    talks.register()
    server = script(lambda text: library().encode(f"I say {text}<|im_end|>", add_special_tokens=False))
    run(lambda: talks.answer(server, stop=lambda: talks.state().done >= 3))
    lose(talks)
    run(lambda: talks.answer(server))

    records = talks.turns()["five"]
    history = [one for turn in range(4) for one in (user(f"five {turn}"), assistant(f"I say five {turn}"))]
    assert [record.turn for record in records] == [0, 1, 2, 3, 4]
    assert records[4].input_ids == rendered(*history, user("five 4"), thinking=False)
    assert talks.state().stopped == {}


@pytest.mark.parametrize(
    ("row", "reason", "turns"),
    [
        pytest.param(talk("another", 5), "other_prompt", 2, id="another row"),
        pytest.param("no JSON", "not_json", 1, id="no row"),
    ],
)
def test_a_conversation_is_not_continued_with_a_row_that_is_another_by_now(
    talks: Talks, row: Row, reason: str, turns: int
) -> None:
    """The source was replaced after the books were lost: as `--accept-changes` lets it be."""
    talks.write(talk("five", 5), talk("two", 2))
    run(lambda: talks.answer(script(answer), stop=lambda: 0 in talks.records() and 2 in talks.records()))
    made = sum(len(records) for records in talks.turns().values())
    lose(talks)
    (talks.output / "A" / "source.log").unlink()
    talks.write(row, talk("two", 2))

    run(lambda: talks.answer(script(answer)))

    five = [record for record in talks.records().values() if record.index < 64]
    assert dict(talks.state().stopped) == {reason: turns if reason == "not_json" else 5 - len(five)}
    assert sum(len(records) for records in talks.turns().values()) == len(five) + 2 >= made
    assert read_rejects(talks.output, "A").rows == {}
