"""The gates as a pure function of a dataset's last answers; their rates of alarm are in tests/benchmarks/gates.py."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.flags import FLAGS, bits_of
from common.gate_settings import SHARES, GatesSettings, gate_in
from common.sections import DatasetSettings
from common.settings import Settings
from tests.benchmarks.gates import FAULTS, MODELS, first
from workers.budget import IN_FLIGHT
from workers.gatekeeping import sentence
from workers.gates import RECENT, Closed, judge


def closed(
    answers: Sequence[tuple[int, Sequence[str]]],
    *,
    flying: Sequence[tuple[int, float]] = (),
    since: int = 0,
    **gates: Any,
) -> Closed | None:
    """What the gates say of (tokens, flags) in the order of their starts, and of (start, clock) in flight."""
    rows = [(0, index, 10 * index, tokens, tokens, bits_of(flags)) for index, (tokens, flags) in enumerate(answers)]
    return judge(np.array(rows, RECENT), np.array([*flying], IN_FLIGHT), GatesSettings(**gates), since_ms=since)


GOOD: tuple[int, tuple[str, ...]] = (500, ())


def test_a_gate_closes_when_more_is_flagged_than_chance_would_have_it() -> None:
    assert closed([(500, ["repetition"])] * 19) is None  # at_least
    found = closed([(500, ["repetition"])] * 20)
    assert found is not None
    assert (found.gate, found.action, found.samples) == ("repetition", "halt", (17, 18, 19))
    assert found.why == "20 of the last 20 answers are flagged repetition, and 10% may be; look at samples 17, 18, 19"
    assert closed([GOOD] * 17 + [(500, ["repetition"])] * 3) is None  # 15 of 100, or chance
    assert closed([GOOD] * 85 + [(500, ["repetition"])] * 15) is None
    assert closed([GOOD] * 70 + [(500, ["repetition"])] * 30) is not None


def test_the_window_forgets_what_is_older() -> None:
    flagged, later = [(500, ["repetition"])] * 60, [GOOD] * 100
    assert closed([*later, *flagged]) is not None
    assert closed([*flagged, *later]) is None
    assert closed([*flagged, *later], window=200) is not None


def test_only_what_was_claimed_since_somebody_looked_counts() -> None:
    answers = [(500, ["repetition"])] * 60
    assert closed(answers, since=10 * 39) is not None
    assert closed(answers, since=10 * 41) is None  # 19 are left


def test_what_a_cut_off_answer_lacks_is_not_counted_twice() -> None:
    cut = [(500, ["truncated", "no_think_end"])] * 30 + [GOOD] * 70
    assert closed(cut) is None
    stopped = [(500, ["no_think_end"])] * 30 + [GOOD] * 70
    assert closed(stopped) is not None


def test_the_long_ones_that_come_last_are_not_taken_for_more() -> None:
    """A job at its end: of 200 starts the short 160 ended first, and of the long 40 those that are cut come last."""
    answers = [(500, ()), (600, ()), (700, ()), (800, ()), (10_000, ("truncated",))] * 40
    rows = [(0, n, 10 * n, tokens, tokens, bits_of(flags)) for n, (tokens, flags) in enumerate(answers)]
    by_end = sorted(rows, key=lambda row: row[3])
    assert judge(np.array(by_end[-50:], RECENT), np.zeros(0, IN_FLIGHT), GatesSettings()) is not None
    assert judge(np.array(by_end, RECENT), np.zeros(0, IN_FLIGHT), GatesSettings()) is None


def test_each_gate_can_be_set() -> None:
    answers = [(500, ["repetition"])] * 40
    assert closed(answers, action="none") is None
    assert closed(answers, repetition={"action": "none"}) is None
    assert closed(answers, repetition={"share": 1.0}) is None
    found = closed(answers, action="none", repetition={"action": "pause"})
    assert found is not None
    assert found.action == "pause"


def test_the_worst_of_several_is_told() -> None:
    found = closed([(500, ["repetition", "control_tokens"])] * 30 + [(500, ["control_tokens"])] * 30)
    assert found is not None
    assert found.gate == "control_tokens"


def test_answers_of_another_length_are_a_change() -> None:
    old = [(300 + n % 400, ()) for n in range(200)]
    new = [(900 + 3 * (n % 400), ()) for n in range(40)]
    found = closed([*old, *new])
    assert found is not None
    assert found.gate == "change"
    assert found.why.startswith("the last 30 answers have a mean of ")
    assert closed([*old, *new], change={"factor": 20}) is None
    assert closed([*old, *new], change={"action": "none"}) is None
    assert closed([*old, *((tokens // 3, ()) for tokens, _ in old[:40])]) is not None


def test_answers_in_flight_that_have_outlived_all_others_are_a_change() -> None:
    old = [(300 + 7 * n % 400, ()) for n in range(230)]
    assert closed(old, flying=[(2300 + n, 100.0) for n in range(30)]) is None
    assert closed(old, flying=[(2000 + n, 5000.0) for n in range(60)]) is not None


def test_answers_of_one_length_are_no_change() -> None:
    assert closed([GOOD] * 400) is None
    assert closed([GOOD] * 400, flying=[(4000 + n, 250.0) for n in range(60)]) is None


def test_a_change_of_how_they_end() -> None:
    old = [(400 + n % 100, ()) for n in range(200)]
    found = closed([*old, *((400, ("truncated",)) for _ in range(70))], truncated={"action": "none"})
    assert found is not None
    assert found.gate == "change"


@pytest.mark.parametrize("model", MODELS)
def test_a_clean_run_closes_no_gate(model: str) -> None:
    assert first(3, MODELS[model], MODELS[model], 0, 700) is None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_mid_run_closes_a_gate_within_a_hundred_answers(fault: str) -> None:
    found = first(4, MODELS["middle"], FAULTS[fault](MODELS["middle"]), 400, 900)
    assert found is not None
    assert found[0] <= 100


def test_the_sentence_says_what_to_do() -> None:
    why = sentence(
        "A", Closed("repetition", "halt", "60 of the last 100 answers ...; look at samples 4, 5, 9", (4, 5, 9))
    )
    assert why == (
        "gate repetition: 60 of the last 100 answers ...; look at samples 4, 5, 9 (`tokenmill show A 9`), then "
        "`tokenmill resume A`"
    )
    assert gate_in(why) == "repetition"
    assert gate_in("paused by ann@host") is None


def test_a_dataset_has_gates_over_those_of_all(tmp_path: Path) -> None:
    general = GatesSettings.model_validate({"window": 50, "truncated": {"share": 0.9, "drop_from_export": True}})
    settings = Settings(tokenizer={"path": tmp_path}, gates=general)  # type: ignore[arg-type]  # as a file gives it
    own = DatasetSettings(name="A", path="a", gates=GatesSettings.model_validate({"truncated": {"counts": False}}))
    gates = settings.gates_of(own)
    assert (gates.window, gates.share("truncated"), gates.share("clipped")) == (50, 0.9, SHARES["clipped"])
    assert [*gates.uncounted, *gates.dropped] == ["truncated", "truncated"]
    assert own.model_dump(mode="json")["gates"] == {"truncated": {"counts": False}}
    assert DatasetSettings(**own.model_dump(mode="json")) == own


def test_every_flag_has_a_gate() -> None:
    assert set(SHARES) == set(FLAGS) == set(GatesSettings.model_fields) - {"action", "window", "at_least", "change"}
