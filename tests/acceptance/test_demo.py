"""The demo as a newcomer runs it, and every command that its closing words name: all counts are one and the same."""

import json
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.segments import count, records
from tests.acceptance.commands import environment, tokenmill

DATASETS = ("chat", "code", "tools")
CAPS = {"chat": 40_000, "code": 25_000, "tools": 25_000}
# One demo serves all tests of this module; the first of them waits for it.
pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Demo:
    """A demo that has run, and what it said."""

    home: Path
    output: Path
    stdout: str
    stderr: str
    states: dict[str, dict[str, Any]]

    def run(self, *arguments: str) -> str:
        """Run a command that must succeed; answers its standard output."""
        done = tokenmill(*arguments, folder=self.home)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def config(self) -> str:
        return str(self.output / "tokenmill.toml")

    def status(self, *troubles: str) -> dict[str, dict[str, Any]]:
        """The datasets by name; `troubles` are how those that are told begin."""
        seen = json.loads(self.run("status", "-c", self.config, "--json"))
        assert [trouble.partition(":")[0] for trouble in seen["troubles"]] == [*troubles]
        return {dataset["name"]: dataset for dataset in seen["datasets"]}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    home = tmp_path_factory.mktemp("home")
    # The settings of a real job, which the demo must leave alone.
    real = {"TOKENMILL_OUTPUT": "a real job's", "TOKENMILL_SERVER__URLS": '["http://127.0.0.1:1"]'}
    done = tokenmill("demo", "-o", "the demo", folder=home, **real)
    assert done.returncode == 0, done.stderr
    demo = Demo(home, home / "the demo", done.stdout, done.stderr, {})
    demo.states.update(demo.status())
    return demo


def test_it_ends_well_and_shows_a_summary(demo: Demo) -> None:
    assert demo.stdout == ""
    assert "Traceback" not in demo.stderr
    lines = demo.stderr.splitlines()
    head, _ = [at for at, line in enumerate(lines) if line.startswith("dataset ")]
    summary = {line.split()[0]: line.split()[1] for line in lines[head + 1 : head + 5]}
    assert set(summary) == {*DATASETS, "all"}
    assert all(summary[name] in {"capped", "exhausted"} for name in DATASETS)
    assert "files: 'the demo'/<dataset>/*.jsonl, 'the demo'/run.json" in demo.stderr
    # Nothing else is left in the home of who ran it, which was the current folder as well.
    assert [path.name for path in demo.home.iterdir() if not path.name.startswith(".")] == ["the demo"]


def test_files_ledger_and_export_have_the_same_counts(demo: Demo, tmp_path: Path) -> None:
    demo.run("export", "-c", demo.config, "--format", "ids", "-o", str(tmp_path / "files"))
    written = [json.loads(line) for line in (tmp_path / "files/ids/train.jsonl").read_bytes().splitlines()]
    report = json.loads(demo.run("verify", "-c", demo.config, "--json"))
    assert report["ledger_compared"]
    assert (report["faults"], report["differences"]) == ([], [])
    books = {one["name"]: one for one in report["datasets"]}
    for name in DATASETS:
        kept = list(records(demo.output, name))
        state = demo.states[name]
        assert len(kept) == len({record.index for record in kept}) == state["done"] == books[name]["samples"] > 10
        answered = sum(len(record.output_ids) for record in kept)
        asked = sum(len(record.input_ids) for record in kept)
        assert answered == state["spent_tokens"] == books[name]["completion_tokens"]
        assert asked == state["prompt_tokens"] == books[name]["prompt_tokens"]
        assert state["state"] in {"capped", "exhausted"}
        # A capped dataset is at its cap, give or take the answers in flight; one that is exhausted has not reached it.
        share = answered / CAPS[name]
        assert 0.7 < share < 1.4 if state["state"] == "capped" else share < 1.4
        rows = [row for row in written if row["dataset"] == name]
        assert {row["index"] for row in rows} == {record.index for record in kept}
        assert sum(sum(row["loss_mask"]) for row in rows) == answered
        assert sum(len(row["input_ids"]) for row in rows) == asked + answered
        assert (state["rejected"], state["in_flight"]) == (0, 0)


def test_the_commands_it_names_work_as_they_stand(demo: Demo, tmp_path: Path) -> None:
    """`tokenmill` need not be on the PATH: then its path stands there."""
    named = [line.partition("   ")[0] for line in demo.stderr.partition("\nnext:\n")[2].splitlines()]
    commands = [words for words in map(shlex.split, named) if Path(words[0]).name == "tokenmill"]
    assert [command[1] for command in commands] == ["verify", "status", "show", "export"]
    for words in commands:
        typed = [str(tmp_path / "files") if word == "DIR" else word for word in words]
        done = subprocess.run(
            typed, cwd=demo.home, env=environment(demo.home), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "files").iterdir()} == {"ids", "manifest.json", "token_counts.json"}


def test_recover_builds_the_same_ledger_from_the_files(demo: Demo) -> None:
    demo.run("recover", "-c", demo.config)
    # What is recovered is open until a keeper has looked at it.
    before, after = demo.states, demo.status("neither control nor a worker is heard of")
    same = ("done", "spent_tokens", "prompt_tokens", "rejected", "truncated", "flags", "max_tokens", "p50_tokens")
    for name in DATASETS:
        assert {key: after[name][key] for key in same} == {key: before[name][key] for key in same}
        assert after[name]["done"] == len(count(demo.output, name).entries)
    report = json.loads(demo.run("verify", "-c", demo.config, "--json"))
    assert (report["ledger_compared"], report["faults"], report["differences"]) == (True, [], [])


def test_a_demo_replaces_an_earlier_demo_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "tokenmill.toml").write_text("# mine\n")
    done = tokenmill("demo", "-o", "mine", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not an earlier demo's; name another folder with -o" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["tokenmill.toml"]
