"""Datasets are chosen by the state that their files tell of: events.jsonl, and what was asked for in dataset.json."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from common.errors import UsageError
from common.events import append_event, make_event
from common.registered import Steering, keep_registered
from common.sections import DatasetSettings
from producer.cli.main import cli
from tests.lines import record_line, void_line, write_config, write_segment

NAMES = ("A", "B", "C", "D")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A is capped, B open, C paused by a person, D only configured."""
    output = tmp_path / "out"
    for name in "ABC":
        lines = [record_line(n, dataset=name, sample_id=f"{name}/{n}") for n in range(3)]
        write_segment(output, "a-0.jsonl", *lines, void_line(2), dataset=name)
        told(output, name, "registered")
        registered(output, name)
    told(output, "A", "capped")
    told(output, "C", "paused")
    registered(output, "C", "paused")
    write_config(tmp_path, datasets=NAMES)
    return output


def told(output: Path, name: str, *whats: str, who: str | None = None) -> None:
    for what in whats:
        append_event(output, make_event(what, "", name, who))


def registered(output: Path, name: str, state: str = "") -> None:
    keep_registered(output, DatasetSettings(name=name, path=f"{name}.jsonl"), Steering(state))  # type: ignore[arg-type]


def run(output: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["export", *arguments, "-c", str(output.parent / "tokenmill.toml")])


def exported(output: Path, *arguments: str) -> list[str]:
    """The datasets that an export has rows of, in order."""
    folder = output.parent / "train"
    done = run(output, *arguments, "-o", str(folder), "--overwrite")
    assert done.exit_code == 0, done.exception
    rows = [json.loads(line) for line in (folder / "ids/train.jsonl").read_bytes().splitlines()]
    assert {row["id"][2:] for row in rows} == {"0", "1"}  # a record that was taken back is in none
    return list(dict.fromkeys(row["dataset"] for row in rows))


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        (["--state", "capped"], ["A"]),
        (["--state", "capped", "--state", "open"], ["A", "B"]),
        (["--state", "paused"], ["C"]),
        (["A", "C", "--state", "open", "--state", "paused"], ["C"]),
        ([], ["A", "B", "C"]),
    ],
)
def test_only_datasets_in_these_states_are_taken(output: Path, options: list[str], taken: list[str]) -> None:
    assert exported(output, *options) == taken


def test_what_is_left_out_is_said_and_counted(output: Path) -> None:
    done = run(output, "--state", "capped", "--dry-run")
    assert done.exit_code == 0, done.exception
    assert "left out, 3 of 4 datasets: B (open), C (paused), D (not registered)\n" in done.stderr
    assert "A: 2 records; train_rows 2\nB: 2 records; state_open 2\nC: 2 records; state_paused 2\n" in done.stderr
    exported(output, "--state", "capped", "--cap", "A=100", "--mix", "A=1")
    manifest = json.loads((output.parent / "train/manifest.json").read_bytes())
    assert manifest["datasets"] == {
        "A": {"faults": 0, "records": 2, "train_rows": 2},
        "B": {"records": 2, "state_open": 2},
        "C": {"records": 2, "state_paused": 2},
        "D": {"records": 0, "state_not_registered": 0},
    }


@pytest.mark.parametrize(
    ("events", "asked", "state"),
    [
        (["capped", "reopened"], "", "open"),
        (["exhausted"], "", "exhausted"),
        (["halted"], "", "halted"),
        (["halted", "resumed"], "", "open"),
        (["failed", "restored", "failed"], "", "failed"),
        (["paused"], "", "paused"),  # by a gate, which dataset.json does not have
        (["paused", "restored"], "paused", "paused"),  # it holds though the books were built anew
        (["paused", "restored"], "cancelled", "cancelled"),
        (["cap", "weight"], "", "open"),
    ],
)
def test_the_last_that_was_told_or_asked_for_holds(output: Path, events: list[str], asked: str, state: str) -> None:
    told(output, "B", *events)
    registered(output, "B", asked)
    assert exported(output, "B", "--state", state) == ["B"]


def test_what_cannot_be_chosen_is_said_in_a_sentence(output: Path) -> None:
    done = run(output, "--state", "exhausted", "--dry-run")
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == (
        "no dataset is exhausted: A is capped, B is open, C is paused, D is not registered; choose other states"
    )
    done = run(output, "--state", "closed", "--dry-run")
    assert done.exit_code == 2
    assert "'closed' is not one of 'open', 'paused', 'capped'" in done.stderr
    done = run(output, "--state", "open", "--cap", "A=5", "--dry-run")
    assert "--cap names 'A', which is not exported" in str(done.exception)


def test_a_state_that_nobody_wrote_down_is_not_guessed(output: Path) -> None:
    (output / "events.jsonl").unlink()
    done = run(output, "--state", "open", "-o", str(output.parent / "train"))
    assert isinstance(done.exception, UsageError)
    assert "events.jsonl does not say in which state A, B are" in str(done.exception)
    assert exported(output, "C", "--state", "paused") == ["C"]  # dataset.json says so
    assert exported(output) == ["A", "B", "C"]
