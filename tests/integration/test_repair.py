"""`verify --repair` beside a ledger: refused while anything runs, and afterwards files and ledger are one again."""

import fcntl
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from common.errors import RedisUnavailable, UsageError
from common.ledger import Ledger
from common.rejects import Reject, append_rejects
from common.settings import Settings, load_settings
from producer.cli import files
from producer.recover import recover
from producer.repair import repair
from producer.verify import verify
from tests.lines import record_line, write_config, write_segment


@pytest.fixture
def config(tmp_path: Path, valkey: str) -> Path:
    return write_config(tmp_path, valkey, datasets=("A", "B"))


@pytest.fixture
def settings(config: Path) -> Settings:
    return load_settings(config)


def break_line(path: Path, number: int) -> bytes:
    """Spoil the line of this number, as a disk does; answers what the file held."""
    before = path.read_bytes()
    lines = before.splitlines(keepends=True)
    lines[number - 1] = b"\0" * (len(lines[number - 1]) - 1) + b"\n"
    path.write_bytes(b"".join(lines))
    return before


def test_what_a_broken_line_had_counted_is_given_back(ledger: Ledger, settings: Settings) -> None:
    path = write_segment(settings.output, "w-0.jsonl", *(record_line(index) for index in range(4)))
    append_rejects(settings.output, "A", [Reject(7, "bad_row")])
    recover(settings, ledger)
    assert (ledger.snapshot("A").done, ledger.snapshot("A").rejected) == (4, 1)
    break_line(path, 2)
    break_line(settings.output / "A" / "rejects.jsonl", 1)

    (done,) = repair(settings, ledger, ["A", "B"])
    assert (done.name, done.recounted, len(done.files)) == ("A", True, 2)
    state = ledger.snapshot("A")
    assert (state.state, state.done, state.rejected, state.cursor) == ("open", 3, 0, "")
    assert ledger.done_among("A", range(8)) == {0, 2, 3}
    assert ledger.committed() == {"A/w-0.jsonl": path.stat().st_size}
    report = verify(settings.output, ["A", "B"], ledger)
    assert (report.faults, report.differences, report.notes, report.ledger_compared) == ([], [], [], True)


@pytest.mark.parametrize("process", ["generate@host", "keeper"])
def test_a_ledger_in_use_is_refused(ledger: Ledger, config: Path, settings: Settings, process: str) -> None:
    path = write_segment(settings.output, "w-0.jsonl", record_line(0), record_line(1)[:-1])
    before = path.read_bytes()
    ledger.heartbeat(process, {"kind": "worker"})
    result = CliRunner().invoke(files.verify, ["--repair", "-c", str(config)])
    assert isinstance(result.exception, UsageError)
    said = rf"in use by {process} \(seen \d+ s ago\); stop them first, or wait 60 s"
    assert re.search(said, str(result.exception))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_what_was_stopped_on_purpose_stays_stopped(ledger: Ledger, settings: Settings) -> None:
    write_segment(settings.output, "w-0.jsonl", record_line(0), b"?\n")
    recover(settings, ledger)
    ledger.transition("A", "paused", ["open"], "by hand")
    repair(settings, ledger, ["A"])
    assert (ledger.snapshot("A").state, ledger.snapshot("A").reason) == ("paused", "by hand")


def test_a_dataset_that_left_the_configuration_is_repaired_and_not_counted(ledger: Ledger, config: Path) -> None:
    output = load_settings(config).output
    write_segment(output, "w-0.jsonl", record_line(0, dataset="old"), b"?\n", dataset="old")
    result = CliRunner().invoke(files.verify, ["old", "--repair", "-c", str(config)])
    assert "not configured any more" in result.stderr
    assert ledger.datasets() == []
    assert (output / "old" / "w-0.jsonl").read_bytes() == record_line(0, dataset="old")


def test_without_redis_nothing_is_repaired(tmp_path: Path) -> None:
    config = write_config(tmp_path, f"unix://{tmp_path}/none.sock")
    path = write_segment(tmp_path / "out", "w-0.jsonl", record_line(0), b"?\n")
    result = CliRunner().invoke(files.verify, ["--repair", "-c", str(config)])
    assert isinstance(result.exception, RedisUnavailable)
    assert path.read_bytes() == record_line(0) + b"?\n"


def test_the_command_says_what_it_took_out_and_what_follows(ledger: Ledger, config: Path, settings: Settings) -> None:
    path = write_segment(settings.output, "w-0.jsonl", record_line(0), b"?\n", record_line(1), b'{"cut')
    result = CliRunner().invoke(files.verify, ["--repair", "-c", str(config)])
    assert result.exit_code == 0, result.output
    first, at = len(record_line(0)), len(record_line(0) + b"?\n" + record_line(1))
    assert result.stdout.splitlines()[:3] == [
        f"{path}: 2 lines (7 bytes) taken out; as it was: w-0.jsonl.before-repair-1",
        f"  line 2 (byte {first}): not a record: JSON is malformed: invalid character (byte 0)",
        f"  line 4 (byte {at}): torn last line of 5 bytes",
    ]
    assert "A: 2 samples, 10 tokens" in result.stdout
    assert "A: its ledger was counted anew from the files, as `tokenmill recover` does" in result.stderr
    assert f"`tokenmill run -c {config}` makes the samples of those lines again" in result.stderr

    again = CliRunner().invoke(files.verify, ["--repair", "--json", "-c", str(config)])
    assert again.exit_code == 0
    report = json.loads(again.stdout)
    assert (report["repairs"], report["faults"], report["differences"]) == ([], [], [])


def test_the_json_has_the_repairs(ledger: Ledger, config: Path, settings: Settings) -> None:
    path = write_segment(settings.output, "w-0.jsonl", b"?\n", record_line(0))
    result = CliRunner().invoke(files.verify, ["--repair", "--json", "-c", str(config)])
    assert json.loads(result.stdout)["repairs"] == [
        {
            "path": str(path),
            "kept": "w-0.jsonl.before-repair-1",
            "bytes": 2,
            "lines": [
                {
                    "path": str(path),
                    "line": 1,
                    "byte": 0,
                    "reason": "not a record: JSON is malformed: invalid character (byte 0)",
                }
            ],
        }
    ]


def test_the_embedded_redis_is_held_meanwhile(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    path = write_segment(tmp_path / "out", "w-0.jsonl", record_line(0), b"?\n")
    assert CliRunner().invoke(files.recover, ["-c", str(config)]).exit_code == 0
    with (tmp_path / "out" / ".redis" / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = CliRunner().invoke(files.verify, ["--repair", "-c", str(config)])
    assert isinstance(result.exception, UsageError)
    assert "another tokenmill runs" in str(result.exception)
    assert path.read_bytes() == record_line(0) + b"?\n"
    assert CliRunner().invoke(files.verify, ["--repair", "-c", str(config)]).exit_code == 0
    assert path.read_bytes() == record_line(0)
    assert CliRunner().invoke(files.verify, ["-c", str(config)]).exit_code == 0
