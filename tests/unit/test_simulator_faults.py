"""Which request a fault strikes, how faults are written down, and what the command makes of presets."""

from typing import Any

import click
import msgspec
import pytest

from common.errors import UsageError
from workers.sglang.simulator import faulty, replies
from workers.sglang.simulator.answers import Answers
from workers.sglang.simulator.cli import simulate
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.faults import Fault, Faults, parse
from workers.sglang.simulator.presets import PRESETS
from workers.sglang.simulator.requests import GenerateRequest


def struck(faults: Faults, prompts: list[list[int]]) -> list[str | None]:
    found = [faults.strike(prompt) for prompt in prompts]
    return [None if one is None else one[0] for one in found]


def test_a_fault_strikes_the_next_so_many_after_so_many_others() -> None:
    faults = Faults(0)
    faults.set({"reset": Fault(next=2, after=3)})
    assert struck(faults, [[1]] * 8) == [None, None, None, "reset", "reset", None, None, None]
    assert faults.active["reset"].struck == 2


def test_one_fault_a_request_and_the_first_that_is_due() -> None:
    faults = Faults(0)
    faults.set({"reset": Fault(next=1), "nan": Fault()})
    assert struck(faults, [[1]] * 3) == ["reset", "nan", "nan"]
    faults.set({"nan": None})
    assert struck(faults, [[1]]) == [None]


def test_a_share_of_none_and_of_all() -> None:
    faults = Faults(0)
    faults.set({"reset": Fault(share=0.0), "nan": Fault(share=1.0)})
    assert struck(faults, [[1]] * 3) == ["nan"] * 3


def test_a_poison_strikes_where_its_ids_stand_one_after_the_other() -> None:
    faults = Faults(0)
    faults.set({"poison": Fault(ids=(5, 6))})
    prompts = [[5, 6], [1, 5, 6, 2], [5, 5, 6], [5, 1, 6], [6, 5], [5]]
    assert struck(faults, prompts) == ["poison"] * 3 + [None] * 3


def test_any_fault_of_requests_can_be_one_of_certain_prompts() -> None:
    faults = Faults(0)
    faults.set({"hang": Fault(ids=(5, 6), next=1)})
    assert struck(faults, [[6, 5], [1, 5, 6], [5, 6]]) == [None, "hang", None]


def test_a_fault_of_the_server_strikes_no_request() -> None:
    faults = Faults(0)
    faults.set({"false_health": Fault(), "frozen": Fault(), "stale_loads": Fault()})
    assert struck(faults, [[1]]) == [None]


def test_faults_are_written_as_options() -> None:
    assert parse("reset") == ("reset", Fault())
    assert parse("nan:share=0.25,after=50") == ("nan", Fault(share=0.25, after=50))
    assert parse("status:status=500,next=3") == ("status", Fault(status=500, next=3))
    assert parse("poison:ids=5+6+7") == ("poison", Fault(ids=(5, 6, 7)))


@pytest.mark.parametrize(
    "text", ["nonsense", "nan:foo=1", "nan:share=2", "nan:next=x", "poison", "status:status=200", ""]
)
def test_a_fault_that_there_is_not_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="--help"):
        SimulatorConfig(faults=(text,))


def test_a_profile_that_there_is_not_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"0\.5\.23"):
        SimulatorConfig(profile="0.5.1")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_server(name: str) -> None:
    config = SimulatorConfig(**PRESETS[name])
    assert all(getattr(config, setting) == value for setting, value in PRESETS[name].items())


def test_an_option_beside_a_preset_overrules_it() -> None:
    with simulate.make_context(
        "simulate", ["--preset", "kimi-k2.5-8x", "--speed", "100", "--vocab-size", "163900"]
    ) as context:
        given = context.params
    assert (given["max_total_tokens"], given["end_token_id"]) == (159_277, 163_586)
    assert (given["speed"], given["vocab_size"]) == (100.0, 163_900)
    assert isinstance(context, click.Context)


ANSWERS = Answers(SimulatorConfig(vocab_size=100, mean_tokens=1e6, cv=0.0))
LIES: dict[str, tuple[list[int | str], dict[str, Any] | None]] = {
    "nan": ([0, 1, 2, 3, 4, "end"], {"type": "stop", "matched": "NaN happened"}),
    "abort": ([0, 1, 2, 3, 4], replies.ABORTED),
    "prompt_leak": (["p3", "p4", "p5", "p6", "p7", 0, 1, 2, 3, 4, 5, 6, 7, 8, 9], None),
    "lost_id": ([0, 1, 2, 3, 4, 6, 7, 8, 9], None),
    "bad_output_id": (["bad", 1, 2, 3, 4, 5, 6, 7, 8, 9], None),
    "wrong_rid": ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], None),
}


@pytest.mark.parametrize("forced_id", [None, 9])
@pytest.mark.parametrize("name", list(LIES))
def test_what_a_fault_makes_of_an_answer(name: str, forced_id: int | None) -> None:
    """Places in the true answer by number; what is not one of its ids by name."""
    config = SimulatorConfig(vocab_size=100)
    asked = GenerateRequest("r", tuple(range(50, 58)), 10, ignore_eos=False, stop_token_ids=())
    true = ANSWERS.answer(asked.input_ids, 10, forced_id=forced_id)
    places, reason = LIES[name]
    named = {"end": 2, "bad": 100, **{f"p{place}": token for place, token in enumerate(asked.input_ids)}}
    expected = [named[place] if isinstance(place, str) else true.stream.ids(10)[place] for place in places]
    found = faulty.answered_instead(name, true, asked, config)
    assert found.stream.ids(found.completion_tokens) == expected
    assert msgspec.json.decode(found.stream.json(found.completion_tokens)) == expected
    assert found.finish_reason == (reason or true.finish_reason)
    # A shorter part of a stream begins as the longer ones do.
    for tokens in range(1, found.completion_tokens):
        part = found.stream.ids(tokens)
        assert part == expected[: len(part)]
