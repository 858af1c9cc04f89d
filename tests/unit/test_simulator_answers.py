"""The simulated model's answers: a pure function of prompt and seed, cut where the sampling parameters say."""

import statistics
from typing import Any

import msgspec
import pytest

from common.errors import UsageError
from workers.sglang.simulator.answers import TABLE_IDS, Answer, Answers
from workers.sglang.simulator.config import SimulatorConfig

END = 2
THINK_END = 7


def answers(**settings: Any) -> Answers:
    return Answers(SimulatorConfig(**{"vocab_size": 1024, "mean_tokens": 100.0, **settings}))


def ids(answer: Answer) -> list[int]:
    return msgspec.json.decode(answer.stream.json(answer.completion_tokens), type=list[int])


def test_equal_prompts_get_equal_answers_from_separate_models() -> None:
    first, second = answers(), answers()
    for prompt in ([1], [1, 2, 3], list(range(1000))):
        assert ids(first.answer(prompt, 500)) == ids(second.answer(prompt, 500))


def test_another_prompt_or_seed_gives_another_answer() -> None:
    base = ids(answers(cv=0.0).answer([1, 2, 3], 500))
    assert ids(answers(cv=0.0).answer([1, 2, 4], 500)) != base
    assert ids(answers(cv=0.0, seed=1).answer([1, 2, 3], 500)) != base


def test_the_answer_is_pinned() -> None:
    """Data made with one version must be comparable with data made with the next."""
    assert ids(answers(cv=0.0, mean_tokens=6.0).answer([10, 20, 30], 500)) == [437, 617, 114, 868, 650, END]


def test_a_shorter_answer_is_a_prefix_of_the_longer() -> None:
    model = answers(think_end_token_id=THINK_END)
    whole = ids(model.answer([5, 6], 10_000))
    for tokens in range(len(whole)):
        answer = model.answer([5, 6], tokens)
        assert ids(answer) == whole[:tokens]
        assert answer.finish_reason == {"type": "length", "length": tokens}


def test_a_natural_end_is_the_end_token_and_counted() -> None:
    model = answers()
    for prompt in range(200):
        answer = model.answer([prompt], 100_000)
        assert answer.finish_reason == {"type": "stop", "matched": END}
        assert len(ids(answer)) == answer.completion_tokens
        assert ids(answer).index(END) == answer.completion_tokens - 1


def test_an_end_token_on_the_last_allowed_place_is_length() -> None:
    """The real server looks at the length before it looks at the token."""
    answer = answers(cv=0.0, mean_tokens=20.0).answer([1], 20)
    assert answer.finish_reason == {"type": "length", "length": 20}
    assert ids(answer)[-1] == END


def test_lengths_have_the_mean_and_spread_asked_for() -> None:
    model = answers(mean_tokens=300.0, cv=0.8)
    lengths = [model.answer([prompt, prompt + 1], 1_000_000).completion_tokens for prompt in range(20_000)]
    assert statistics.fmean(lengths) == pytest.approx(300, rel=0.03)
    assert statistics.stdev(lengths) / statistics.fmean(lengths) == pytest.approx(0.8, rel=0.05)


def test_without_spread_every_answer_has_the_mean_length() -> None:
    model = answers(mean_tokens=40.0, cv=0.0)
    assert {model.answer([prompt], 1000).completion_tokens for prompt in range(100)} == {40}


def test_ids_stay_in_the_range_and_are_not_special() -> None:
    model = answers(first_id=0, last_id=20, think_end_token_id=THINK_END, mean_tokens=2000.0, cv=0.0)
    found = ids(model.answer([1], 5000))
    assert set(found) == set(range(21))
    assert found.count(END) == 1
    assert found.count(THINK_END) == 1
    assert found.index(THINK_END) < found.index(END) == len(found) - 1


def test_a_model_that_thinks_ends_its_thinking_in_every_whole_answer() -> None:
    model = answers(think_end_token_id=THINK_END, mean_tokens=2.0)
    for prompt in range(300):
        assert ids(model.answer([prompt], 100_000)).count(THINK_END) == 1


def test_ignore_eos_generates_to_the_end_of_the_room_and_ignores_stop_tokens_too() -> None:
    model = answers(cv=0.0, mean_tokens=10.0)
    stopped = ids(model.answer([1], 50))
    answer = model.answer([1], 50, ignore_eos=True, stop_token_ids=[stopped[3]])
    assert answer.finish_reason == {"type": "length", "length": 50}
    assert ids(answer)[:10] == stopped
    assert len(ids(answer)) == 50


def test_a_stop_token_ends_the_answer_where_it_first_comes() -> None:
    model = answers(cv=0.0, mean_tokens=100.0)
    whole = ids(model.answer([1], 500))
    stop = whole[30]
    answer = model.answer([1], 500, stop_token_ids=[stop, END])
    assert answer.finish_reason == {"type": "stop", "matched": stop}
    assert ids(answer) == whole[: whole.index(stop) + 1]


def test_a_stop_token_that_never_comes_changes_nothing() -> None:
    model = answers()
    assert model.answer([1], 500, stop_token_ids=[999_999]) == model.answer([1], 500)


def test_no_tokens_asked_for_gives_none() -> None:
    answer = answers().answer([1], 0)
    assert (ids(answer), answer.finish_reason) == ([], {"type": "length", "length": 0})


def test_an_answer_longer_than_the_table_goes_round() -> None:
    answer = answers(vocab_size=32_000).answer([1], TABLE_IDS + 1000, ignore_eos=True)
    assert len(ids(answer)) == TABLE_IDS + 1000
    end = ids(answer).index(END)
    assert ids(answer)[:end] == ids(answer)[TABLE_IDS:][:end]


def test_latencies_have_the_mean_asked_for_and_belong_to_the_prompt() -> None:
    model = answers(latency_mean_seconds=1.0, latency_cv=0.5)
    latencies = [model.answer([prompt, 7], 100).latency_seconds for prompt in range(20_000)]
    assert statistics.fmean(latencies) == pytest.approx(1.0, rel=0.03)
    assert model.answer([5, 7], 3).latency_seconds == latencies[5]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"end_token_id": 1024, "vocab_size": 1024}, "end_token_id"),
        ({"last_id": 1024, "vocab_size": 1024}, "last_id"),
        ({"first_id": 2, "last_id": 2}, "ordinary"),
        ({"think_end_token_id": 2}, "think_end_token_id"),
        ({"speed": -1.0}, "speed"),
        ({"speed": float("nan")}, "speed"),
        ({"mean_tokens": 0.0}, "mean_tokens"),
        ({"max_queued_requests": -1}, "max_queued_requests"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"tokens_per_second": 5.0, "latency_mean_seconds": 1.0}, "one of them"),
        ({"speed": 0.0, "tokens_per_second": 5.0}, "infinite"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        SimulatorConfig(**settings)
