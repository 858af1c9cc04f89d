"""What may lie between two runs on one output: damaged files, a source that was replaced, a source that has grown."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.segments import records
from tests.acceptance.commands import EXAMPLE_IDS, tokenmill
from tests.acceptance.conftest import Simulate
from tests.conftest import REPO

pytestmark = pytest.mark.timeout(900)
ROWS = 40


class Job:
    """A job of one dataset on an embedded Redis, with a source whose row i has the prompt [100 + i, 7]."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = folder / "a.jsonl"
        self.output = folder / "out"

    def configure(self, server: str) -> None:
        self.write(range(ROWS))
        (self.folder / "tokenmill.toml").write_text(
            f'output = "out"\nredis = "embedded"\n[server]\nurls = ["{server}"]\n'
            '[gates]\naction = "none"\n'
            f'[tokenizer]\npath = "{REPO}/examples/tokenizer"\n[sampling]\nmax_new_tokens = 64\n'
            "[worker]\nconcurrency = 8\n"
            '[[datasets]]\nname = "A"\npath = "a.jsonl"\n'
        )

    def write(self, rows: range) -> None:
        self.source.write_text("".join(json.dumps({"id": row, "input_ids": [100 + row, 7]}) + "\n" for row in rows))

    def command(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        """Run a command that must leave with `code`; answers what it said on both outputs."""
        done = tokenmill(*arguments, folder=self.folder)
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout, done.stderr

    def verify(self, *more: str, code: int = 0) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.command("verify", "--json", *more, code=code)[0])
        return report

    def prompts(self) -> dict[int, int]:
        """For each index the first id of its prompt, less 100: the row of the source that it came from."""
        kept = list(records(self.output, "A"))
        found = {record.index: record.input_ids[0] - 100 for record in kept}
        assert len(found) == len(kept)
        assert all(record.meta["id"] == found[record.index] for record in kept)
        return found

    def lose_redis(self) -> None:
        shutil.rmtree(self.output / ".redis")


@pytest.fixture(scope="module")
def finished(simulate: Simulate, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job whose first run has ended well."""
    job = Job(tmp_path_factory.mktemp("job"))
    job.configure(simulate("--speed", "0", *EXAMPLE_IDS))
    job.command("run")
    assert job.prompts() == {index: index for index in range(ROWS)}
    return job.folder


@pytest.fixture
def job(finished: Path, tmp_path: Path) -> Job:
    """A copy of that job."""
    return Job(shutil.copytree(finished, tmp_path / "job"))


def test_damaged_files_are_named_repaired_and_made_whole_again(job: Job) -> None:
    (path,) = (job.output / "A").glob("*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    starts = [len(b"".join(lines[:at])) for at in range(len(lines) + 1)]
    damaged = [
        *lines[:3],
        lines[3][:50] + b"\n",  # cut
        b"\0" * (len(lines[4]) - 1) + b"\n",  # lost in a power cut
        *lines[5:],
        lines[7],  # a second time
        lines[8].replace(b'"dataset":"A"', b'"dataset":"B"'),
        b"\xff\xfe\n",
        lines[9][:-20],  # torn
    ]
    lost = {json.loads(line)["index"] for line in lines[3:5]}
    path.write_bytes(b"".join(damaged))

    report = job.verify(code=3)
    named = [(fault["path"], fault["line"], fault["byte"]) for fault in report["faults"]]
    short = 51 - len(lines[3])
    end = starts[-1] + short
    assert named == [
        (str(path), 4, starts[3]),
        (str(path), 5, starts[3] + 51),
        (str(path), ROWS + 1, end),
        (str(path), ROWS + 2, end + len(lines[7])),
        (str(path), ROWS + 3, end + len(lines[7]) + len(lines[8])),
    ]
    assert path.read_bytes() == b"".join(damaged)  # nothing was changed

    said, follows = job.command("verify", "--repair")
    assert f"{path}: 6 lines" in said
    assert f"line 4 (byte {starts[3]}): not a record" in said
    assert "`tokenmill run` makes the samples of those lines again" in follows
    assert path.read_bytes() == b"".join(lines[:3] + lines[5:])
    assert path.with_name(f"{path.name}.before-repair-1").read_bytes() == b"".join(damaged)
    clean = job.verify()
    assert (clean["faults"], clean["differences"], clean["notes"], clean["ledger_compared"]) == ([], [], [], True)

    job.command("recover")
    assert job.prompts().keys() == set(range(ROWS)) - lost
    job.command("run")
    assert job.prompts() == {index: index for index in range(ROWS)}
    whole = job.verify()
    assert (whole["faults"], whole["differences"], whole["datasets"][0]["records"]) == ([], [], ROWS)


@pytest.mark.parametrize("redis", ["there", "lost"])
def test_a_replaced_source_is_refused_until_it_is_accepted(job: Job, redis: str) -> None:
    if redis == "lost":
        job.lose_redis()
    before = {path: path.read_bytes() for path in (job.output / "A").iterdir()}
    job.write(range(1, ROWS + 6))  # its first row taken out, five more behind it

    _, said = job.command("run", code=2)
    assert said.startswith("tokenmill: a source is not the one that was read before")
    assert f"{job.source} of dataset A: its first " in said
    assert "--accept-changes" in said
    assert {path: path.read_bytes() for path in (job.output / "A").iterdir()} == before
    assert (job.output / ".redis").exists() == (redis == "there")

    _, said = job.command("run", "--accept-changes")
    assert "A: its source was replaced (its first " in said
    # What was answered is kept under its index; the rows behind it are those of the new file.
    assert job.prompts() == {index: index for index in range(ROWS)} | {at: at + 1 for at in range(ROWS, ROWS + 5)}
    assert job.verify()["differences"] == []


def test_a_source_that_has_grown_is_read_on(job: Job) -> None:
    job.write(range(ROWS + 7))
    _, said = job.command("run")
    assert "A: its source has grown from " in said
    assert job.prompts() == {index: index for index in range(ROWS + 7)}
    (books,) = job.verify()["datasets"]
    assert (books["records"], books["samples"]) == (ROWS + 7, ROWS + 7)
