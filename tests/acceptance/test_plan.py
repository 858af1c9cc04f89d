"""`plan` as a person runs it: without servers, with a pilot of real answers, and beside the records of a job."""

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.commands import EXAMPLE_IDS, tokenmill
from tests.acceptance.conftest import Simulate
from tests.conftest import REPO
from tests.integration.conversation_steps import talk
from tests.unit.test_report import write as write_records


def configure(folder: Path, url: str, rows: int = 88_088 // 4) -> None:
    """Four datasets of `rows` prompts each, and a fifth that is empty."""
    config = f'[server]\nurls = ["{url}"]\n[tokenizer]\npath = "{REPO}/examples/tokenizer"\n'
    config += "[sampling]\nmax_new_tokens = 2000\n"
    line = json.dumps({"input_ids": [7] * 50}) + "\n"
    for name, count in (*((name, rows) for name in "ABCD"), ("empty", 0)):
        (folder / f"{name}.jsonl").write_text(line * count)
        config += f'[[datasets]]\nname = "{name}"\npath = "{name}.jsonl"\n'
    (folder / "tokenmill.toml").write_text(config)


@pytest.fixture
def closed() -> str:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def planned(folder: Path, *arguments: str) -> dict[str, Any]:
    done = tokenmill("plan", "--json", *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert isinstance(told, dict)
    return told


def test_the_worked_example_without_a_server(tmp_path: Path, closed: str) -> None:
    configure(tmp_path, closed)
    before = sorted(tmp_path.iterdir())

    # 26 answers a minute, of 1,000 tokens as half of max_new_tokens.
    done = tokenmill("plan", "--tokens-per-second", "433.3", folder=tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    table, _, notes = done.stdout.partition("\n\n")
    head, *lines, whole = table.splitlines()
    assert head.split() == ["dataset", "rows", "prompt", "answer", "samples", "tokens", "alone", "done", "in", "disk"]
    assert [line.split()[0] for line in lines] == ["A", "B", "C", "D", "empty"]
    assert lines[0].split()[:8] == ["A", "22,022", "50", "1,000", "22,022", "22.0M", "14h07m", "56h28m"]
    assert whole.split()[:5] == ["all", "88,088", "88,088", "88.1M", "56h28m"]
    assert max(map(len, done.stdout.splitlines())) <= 80
    said = " ".join(notes.split())
    assert said.startswith(f"{closed} cannot be reached (Connection refused)")
    assert "planned without the servers" in said
    assert "half of max_new_tokens: --pilot 50 would tell" in said
    assert "empty: 0 rows, counted; the source is empty" in said
    assert sorted(tmp_path.iterdir()) == before

    capped = planned(tmp_path, "--tokens-per-second", "433.3", "--cap", "10M")
    assert [one["planned"]["samples"] for one in capped["datasets"]] == [10_000] * 4 + [0]
    assert round(capped["totals"]["hours"]) == 26
    assert round(capped["totals"]["hours"] + capped["totals"]["saved_hours"], 1) == 56.5


def test_a_pilot_asks_for_real_answers_and_keeps_none(tmp_path: Path, simulate: Simulate) -> None:
    url = simulate("--speed", "0", "--mean-tokens", "100", "--cv", "0", "--max-running-requests", "7", *EXAMPLE_IDS)
    configure(tmp_path, url, rows=40)
    before = sorted(tmp_path.iterdir())

    done = tokenmill("plan", "A", "B", "--pilot", "12", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "pilot: 24 of 24 answers, 0 in flight" in done.stderr
    _, a, b, _, *notes = done.stdout.splitlines()
    assert a.split()[:5] == ["A", "40", "50", "100", "40"]
    assert b.split()[:5] == ["B", "40", "50", "100", "40"]
    said = " ".join(" ".join(notes).split())
    assert "answers from a pilot of 12" in said
    assert "those of the pilot" in said
    assert "runs 7 requests at once at most; the running limit, which is compute, is what binds" in said
    assert sorted(tmp_path.iterdir()) == before


def test_records_tell_more_than_a_pilot_would(tmp_path: Path, simulate: Simulate) -> None:
    configure(tmp_path, simulate("--speed", "0", *EXAMPLE_IDS), rows=60)
    write_records(tmp_path / "out", "A", [30] * 40, cap_tokens=1500)

    told = planned(tmp_path, "A", "--pilot", "40", "--cap", "1500")

    [a] = told["datasets"]
    assert (a["answered"], a["answers"]["origin"], a["answers"]["mean_tokens"]) == (40, "records", 30)
    assert (a["planned"]["samples"], a["planned"]["ends"]) == (10, "cap")
    assert told["rate"]["origin"] == "records"
    assert told["limit"]["by"] != "unknown"


@pytest.mark.parametrize(
    "arguments", [("X",), ("--pilot", "0"), ("--tokens-per-second", "nan"), ("--cap", "0"), ("--cap", "10 k")]
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, closed: str, arguments: tuple[str, ...]) -> None:
    configure(tmp_path, closed, rows=1)
    done = tokenmill("plan", *arguments, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


def test_turns_of_conversations_that_have_stopped_are_not_planned(tmp_path: Path, simulate: Simulate) -> None:
    """Nine conversations of 24 turns, and answers of which about half are cut, so that nothing follows them."""
    letters = ("--first-id", "0", "--last-id", "90", "--mean-tokens", "20", "--cv", "0.3", "--speed", "0")
    talks = [talk(f"t{row}", (1, 2, 5)[row % 3]) for row in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks))
    (tmp_path / "tokenmill.toml").write_text(
        f'[server]\nurls = ["{simulate(*EXAMPLE_IDS, *letters)}"]\n[gates]\naction = "none"\n'
        f'[tokenizer]\npath = "{REPO}/examples/tokenizer"\n[sampling]\nmax_new_tokens = 20\n'
        '[[datasets]]\nname = "A"\npath = "a.jsonl"\nturns = "all"\n'
    )
    before = planned(tmp_path)["datasets"][0]
    assert (before["planned"]["samples"], before["stopped"]) == (24, 0)
    assert tokenmill("run", folder=tmp_path).returncode == 0

    after = planned(tmp_path)

    [dataset] = after["datasets"]
    assert dataset["stopped"] > 0
    assert dataset["answered"] + dataset["stopped"] == 24
    assert dataset["planned"]["samples"] == 0
    assert f"{dataset['stopped']} stopped" in " ".join(after["notes"])
    shutil.rmtree(tmp_path / "out" / ".redis")
    lost = planned(tmp_path)
    assert lost["datasets"][0]["planned"]["samples"] == dataset["stopped"]
    assert "the turns of conversations that have stopped are planned as if" in " ".join(lost["notes"])
