"""Every assistant turn made anew, by a real feed and a real worker: each once, behind this model's own answers."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from common.errors import UsageError
from common.ledger import Ledger, Settled
from common.rejects import read_rejects
from common.turns import Made, index_of
from producer import enqueue
from producer.status import snapshot
from producer.verify import verify
from tests.integration.conversation_steps import (
    END,
    THINK_END,
    Talks,
    assert_own_history,
    assistant,
    rendered,
    said,
    script,
    talk,
    user,
)
from tests.integration.feed_steps import MAX_NEW_TOKENS, VOCAB_SIZE, Row
from tests.integration.ledger_steps import HOUR
from tests.integration.worker_steps import assert_books_agree, run
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.server import Simulator

TURNS = {"one": 1, "two": 2, "five": 5}


@pytest.fixture
def talks(tmp_path: Path, valkey: str, ledger: Ledger) -> Talks:
    return Talks(tmp_path, valkey, ledger)


def echo(text: str) -> list[int]:
    return said(f"I say {text}")


def test_each_prompt_is_the_rendering_of_the_models_own_answers(talks: Talks) -> None:
    talks.write(*[talk(name, turns) for name, turns in TURNS.items()])
    talks.register()
    config = SimulatorConfig(
        vocab_size=VOCAB_SIZE,
        mean_tokens=20,
        cv=0.3,
        speed=0,
        end_token_id=END,
        think_end_token_id=THINK_END,
        first_id=0,
        last_id=90,  # those are single characters
    )

    async def test() -> None:
        async with Simulator(config) as server:
            await talks.answer(server)

    run(test)

    found = talks.turns()
    assert {name: len(records) for name, records in found.items()} == TURNS
    for name, records in found.items():
        assert_own_history(name, records, TURNS[name])
    assert set(talks.records()) == {index_of(row, turn) for row, turns in enumerate((1, 2, 5)) for turn in range(turns)}
    assert talks.state().stopped == {}
    assert (talks.state().state, talks.state().done, talks.state().queued) == ("exhausted", 8, 0)
    assert_books_agree(talks.ledger, talks.output, "A")
    report = verify(talks.output, ["A"], talks.ledger)
    assert (report.faults, report.differences, report.ledger_compared) == ([], [], True)


def test_a_truncated_turn_and_a_rejected_one_stop_their_conversations_and_are_counted(talks: Talks) -> None:
    talks.write(talk("cut", 5), talk("bad", 5), talk("whole", 3))
    talks.register()

    def answer(text: str) -> list[int] | httpx.Response:
        if text == "cut 2":
            return [7] * MAX_NEW_TOKENS
        if text == "bad 3":
            return httpx.Response(400, json={"error": {"message": "no"}})
        return echo(text)

    run(lambda: talks.answer(script(answer)))

    found = talks.turns()
    assert {name: len(records) for name, records in found.items()} == {"cut": 3, "bad": 3, "whole": 3}
    for name, records in found.items():
        assert_own_history(name, records, 3 if name == "whole" else 5)
    assert found["cut"][2].flags == ["truncated"]
    (reject,) = read_rejects(talks.output, "A").rows.values()
    assert (reject.index, reject.id, reject.turns) == (index_of(1, 3), "bad", 5)
    state = talks.state()
    assert (state.done, state.rejected, state.stopped) == (9, 1, {"truncated": 2, "rejected": 1})
    assert snapshot(talks.ledger)["datasets"][0]["stopped"] == {"truncated": 2, "rejected": 1}
    assert state.state == "exhausted"


def test_tool_results_follow_the_same_calls_and_no_others(talks: Talks) -> None:
    tools = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}]
    call = {"id": "theirs", "type": "function", "function": {"name": "sum", "arguments": {"a": 1, "b": 2}}}

    def row(name: str) -> dict[str, object]:
        result = {"role": "tool", "tool_call_id": "theirs", "content": f"{name}: 3"}
        turns = [user(name), assistant("", tool_calls=[call]), result, assistant("It is 3."), user(f"thanks, {name}")]
        return {"id": name, "messages": turns, "tools": tools}

    talks.write(*[row(name) for name in ("same", "other", "none", "late")])
    talks.register()

    def made(arguments: str) -> list[int]:
        return said(f'<tool_call>{{"id": "own", "name": "sum", "arguments": {arguments}}}</tool_call>')

    def answer(text: str) -> list[int]:
        asked = {"same": made('{"b": 2, "a": 1}'), "other": made('{"a": 1, "b": 3}'), "late": made('{"a": 1, "b": 2}')}
        if text == "late: 3":  # it calls once more, where the row goes on with a user turn
            return made("{}")
        return asked.get(text, said("three"))

    run(lambda: talks.answer(script(answer)))

    found = talks.turns()
    assert {name: len(records) for name, records in found.items()} == {"same": 3, "other": 1, "none": 1, "late": 2}
    own = {"id": "own", "type": "function", "function": {"name": "sum", "arguments": '{"b": 2, "a": 1}'}}
    history = [
        user("same"),
        assistant("", reasoning_content="well", tool_calls=[own]),
        {"role": "tool", "tool_call_id": "own", "content": "same: 3"},
    ]
    assert found["same"][1].input_ids == rendered(*history, tools=tools)
    later = [*history, assistant("three", reasoning_content="well"), user("thanks, same")]
    assert found["same"][2].input_ids == rendered(*later, tools=tools)
    assert talks.state().stopped == {"other_tool_calls": 4, "tool_calls_unanswered": 1}


@pytest.mark.parametrize(
    ("row", "answer", "reason"),
    [
        pytest.param(talk("a", 3), [*said("x")[:-1], 4094, END], "damaged_answer", id="a call that is never closed"),
        pytest.param(
            {"messages": [user("a"), assistant("b"), user(" "), assistant("c"), user("d")]},
            said("x"),
            "blank_turn",
            id="a user turn without text",
        ),
        pytest.param(
            {"messages": [user("a"), assistant("b"), user("long " * 200), assistant("c"), user("d")]},
            said("x"),
            "too_long",
            id="a prompt that does not fit",
        ),
    ],
)
def test_a_conversation_that_cannot_go_on_is_counted(talks: Talks, row: Row, answer: list[int], reason: str) -> None:
    talks.set_model(context_length=MAX_NEW_TOKENS + 100)
    talks.write(row)
    talks.register()
    run(lambda: talks.answer(script(lambda _: answer)))
    state = talks.state()
    assert (state.state, state.done, state.rejected, state.stopped) == ("exhausted", 1, 0, {reason: 2})


def test_more_turns_than_there_are_indices_are_counted(talks: Talks) -> None:
    talks.write(talk("a", 67))
    talks.register()
    run(lambda: talks.answer(script(echo)))
    assert sorted(talks.records()) == list(range(64))
    assert (talks.state().state, talks.state().stopped) == ("exhausted", {"too_many_turns": 3})


def test_rows_of_one_turn_and_of_ids_and_bad_ones(talks: Talks) -> None:
    talks.write(talk("a", 1), {"id": "ids", "input_ids": [5, 6, 7]}, "x", {"id": "q", "turns": ["q 0", "q 1"]})
    talks.register()
    run(lambda: talks.answer(script(echo)))
    found = talks.turns()
    assert {name: [(one.turn, one.turns, one.parent) for one in records] for name, records in found.items()} == {
        "a": [(0, 1, None)],
        "ids": [(0, 1, None)],
        "q": [(0, 2, None), (1, 2, index_of(3, 0))],
    }
    assert_own_history("q", found["q"], 2)
    assert found["ids"][0].input_ids == [5, 6, 7]
    (reject,) = read_rejects(talks.output, "A").rows.values()
    assert (reject.index, reject.reason) == (index_of(2, 0), "not_json")


def test_a_cap_leaves_conversations_waiting_and_a_raised_one_goes_on(talks: Talks) -> None:
    talks.write(*[talk(f"t{row}", 4) for row in range(5)])
    talks.register()
    server = script(echo)
    run(lambda: talks.answer(server, stop=lambda: talks.state().done >= 7))
    while talks.ledger.admit("A", room=0, window=0, tokens_per_second=0) != "capped":
        assert talks.state().in_flight > 0
    before = talks.state()
    assert before.answers + before.queued > 0
    talks.ledger.transition("A", "open", ["capped"])
    run(lambda: talks.answer(server))
    assert {name: len(records) for name, records in talks.turns().items()} == dict.fromkeys(
        (f"t{row}" for row in range(5)), 4
    )
    for name, records in talks.turns().items():
        assert_own_history(name, records, 4)


def test_answers_are_followed_before_other_rows_are_begun(talks: Talks) -> None:
    talks.write(*[talk(f"t{row}", 2) for row in range(6)])
    talks.register(window=2)
    assert talks.feed() == 2
    claimed, _ = talks.ledger.claim("A", "w1@host", HOUR, talks.queued())
    assert talks.feed() == 2
    assert talks.queued() == [index_of(2, 0), index_of(3, 0)]
    made = Made(0, said("yes")).pack()
    assert all(talks.ledger.settle("A", [Settled(one.index, one.attempt, 9, 9, 0, (), 1, made) for one in claimed]))
    talks.admit(window=3)

    assert talks.feed() == 1
    assert talks.queued() == [index_of(0, 1), index_of(2, 0), index_of(3, 0)]
    talks.admit(window=5)
    assert talks.feed() == 2
    assert talks.queued() == [index_of(0, 1), index_of(1, 1), index_of(2, 0), index_of(3, 0), index_of(4, 0)]


def test_turns_cannot_be_counted_in_another_way_once_rows_were_read(talks: Talks) -> None:
    talks.write(talk("a", 2))
    same = ("model_path", "weight_version", "tokenizer_sha256", "template_sha256")
    facts: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "context_length": None,
        **dict.fromkeys(same, "x"),
        "datasets": {},
    }
    facts |= {"chat_template_kwargs": {}, "sampling_params": {}}

    def register() -> None:
        enqueue.register(talks.settings, talks.ledger, talks.settings.datasets, facts)

    talks.configure()
    register()
    talks.configure(more='turns = "all"')
    register()  # nothing was read yet
    talks.admit()
    assert talks.feed() == 1
    register()
    talks.configure(more='turns = "first"')
    with pytest.raises(UsageError, match=r'was made with turns = "all", and with "first" its samples have other'):
        register()
