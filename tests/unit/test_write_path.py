"""Every system call of the write path fails in every way: nothing of the lines is left, and no line is lost or doubled.

The calls fail in the kernel (tests/syscalls.py), in one thread; the next append runs in another one, on a disk that
has been mended.
"""

import errno
import functools
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from common.durable import make_folder, replace_file
from common.rejects import Reject, append_rejects, read_rejects
from common.segments import count
from producer.verify import verify
from tests.lines import record_line
from tests.syscalls import Call, Judge, Short, failing, under
from workers.segment_writer import SegmentWriter

LINES = [record_line(index) for index in range(6)]
BIG = 2**20
errors = pytest.mark.parametrize(
    "error", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS], ids=lambda e: errno.errorcode[e]
)
ROWS = [Reject(0, "bad_row"), Reject(1, "bad_row", "é" * 20)]


def files(output: Path) -> dict[str, bytes]:
    """Every file below `output` and what it holds."""
    return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file()}


def refused(judge: Judge, work: Callable[[], object]) -> int | None:
    """The errno that `work` ends with under `judge`."""
    with pytest.raises(OSError) as caught:
        under(judge, work)
    return caught.value.errno


def disk_calls(folder: Path, work: Callable[[], object]) -> list[tuple[str, str]]:
    """What `work` writes and syncs, in order: the call, and the file or folder below `folder`."""
    seen: list[tuple[str, str]] = []

    def see(call: Call) -> None:
        if call.name in {"write", "fdatasync", "fsync", "rename"}:
            seen.append((call.name, os.path.relpath(call.file, folder)))

    under(see, work)
    return seen


# Segments


@errors
@pytest.mark.parametrize("name", ["mkdir", "openat", "fsync", "write", "fdatasync"])
def test_a_first_append_that_fails_leaves_nothing_and_the_next_one_writes_all(
    tmp_path: Path, name: str, error: int
) -> None:
    writer = SegmentWriter(tmp_path / "out", "w", BIG)
    assert refused(failing(name, error), lambda: writer.append("A", LINES[:2])) == error
    assert files(tmp_path) == {}
    assert writer.append("A", LINES[:2]) == ("A/w-0.jsonl", len(b"".join(LINES[:2])))
    assert files(tmp_path) == {"out/A/w-0.jsonl": b"".join(LINES[:2])}


@errors
@pytest.mark.parametrize("name", ["write", "fdatasync"])
def test_a_later_append_that_fails_goes_to_a_new_file_and_the_old_one_is_not_synced_again(
    tmp_path: Path, name: str, error: int
) -> None:
    writer = SegmentWriter(tmp_path, "w", BIG)
    writer.append("A", LINES[:2])
    kept = files(tmp_path)
    assert refused(failing(name, error), lambda: writer.append("A", LINES[2:4])) == error
    assert files(tmp_path) == kept
    # A sync of the old file would succeed now, and prove nothing: the lines are written again.
    assert disk_calls(tmp_path, lambda: writer.append("A", LINES[2:4])) == [
        ("fsync", "A"),
        ("write", "A/w-1.jsonl"),
        ("fdatasync", "A/w-1.jsonl"),
    ]
    assert files(tmp_path) == kept | {"A/w-1.jsonl": b"".join(LINES[2:4])}


@errors
def test_a_write_that_is_cut_short_and_then_refused_leaves_no_part_of_a_line(tmp_path: Path, error: int) -> None:
    writer = SegmentWriter(tmp_path, "w", BIG)
    writer.append("A", LINES[:1])
    parts = iter([Short(len(LINES[1]) + 7), error])  # a whole line and a piece of the next reach the disk
    assert refused(lambda call: next(parts) if call.name == "write" else None, lambda: writer.append("A", LINES[1:4]))
    assert files(tmp_path) == {"A/w-0.jsonl": LINES[0]}
    writer.append("A", LINES[1:4])
    assert list(count(tmp_path, "A").entries) == [0, 1, 2, 3]


def test_short_writes_go_on_where_they_stopped(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "w", BIG)
    sizes = iter([Short(1), Short(len(LINES[0])), Short(17)])
    segment = under(
        lambda call: next(sizes, None) if call.name == "write" else None, lambda: writer.append("A", LINES[:3])
    )
    assert segment == ("A/w-0.jsonl", len(b"".join(LINES[:3])))
    assert files(tmp_path) == {"A/w-0.jsonl": b"".join(LINES[:3])}


@pytest.mark.parametrize("name", ["openat", "fsync", "write", "fdatasync"])
def test_a_call_that_a_signal_interrupts_is_made_again(tmp_path: Path, name: str) -> None:
    writer = SegmentWriter(tmp_path, "w", BIG)
    seen: list[Call] = []
    under(failing(name, errno.EINTR, only=0, seen=seen), lambda: writer.append("A", LINES[:2]))
    assert sum(call.name == name for call in seen) >= 2
    assert files(tmp_path) == {"A/w-0.jsonl": b"".join(LINES[:2])}


def test_a_file_that_cannot_even_be_cut_back_costs_nothing(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, "w", BIG)
    writer.append("A", LINES[:1])
    broken = {"fdatasync", "ftruncate", "unlink", "close"}
    assert refused(
        lambda call: errno.EIO if call.name in broken else None, lambda: writer.append("A", LINES[1:3])
    ) == errno.EIO  # fmt: skip
    assert writer.append("A", LINES[1:3])[0] == "A/w-1.jsonl"
    assert list(count(tmp_path, "A").entries) == [0, 1, 2]
    assert [(Path(fault.path).name, fault.line, fault.reason) for fault in verify(tmp_path, ["A"]).faults] == [
        ("w-1.jsonl", 1, "index 1, attempt 1 a second time"),
        ("w-1.jsonl", 2, "index 2, attempt 1 a second time"),
    ]


@pytest.mark.parametrize("error", [errno.EIO, errno.EINTR])
def test_lines_that_are_durable_are_not_written_twice_because_their_file_does_not_close_well(
    tmp_path: Path, error: int
) -> None:
    writer = SegmentWriter(tmp_path, "w", segment_bytes=1)
    answer = under(
        lambda call: error if call.name == "close" and call.file.endswith(".jsonl") else None,
        lambda: [writer.append("A", [line])[0] for line in LINES[:3]],
    )
    assert answer == ["A/w-0.jsonl", "A/w-1.jsonl", "A/w-2.jsonl"]
    assert files(tmp_path) == {f"A/w-{n}.jsonl": LINES[n] for n in range(3)}


def insist(writer: SegmentWriter) -> None:
    """Five appends of a line, each repeated until it succeeds, as workers/commits.py does it."""
    for line in LINES[:5]:
        while True:
            try:
                writer.append("A", [line])
            except OSError:
                continue
            break


def test_whichever_call_fails_every_line_is_there_once(tmp_path: Path) -> None:
    made: list[Call] = []
    under(made.append, lambda: insist(SegmentWriter(tmp_path / "all", "w", 2 * len(LINES[0]))))
    assert len(made) > 20
    for at in range(len(made)):
        output = tmp_path / str(at)
        seen: list[Call] = []

        def judge(call: Call, seen: list[Call] = seen, at: int = at) -> int | None:
            seen.append(call)
            return errno.EIO if len(seen) == at + 1 else None

        writer = SegmentWriter(output, "w", 2 * len(LINES[0]))
        under(judge, functools.partial(insist, writer))
        report = verify(output, ["A"])
        assert (report.faults, report.notes, report.datasets[0].records) == ([], [], 5), made[at]
        assert b"".join(sorted(line for text in files(output).values() for line in text.splitlines(True))) == b"".join(
            sorted(LINES[:5])
        )


# Folders, rejects, files that are replaced


@errors
def test_a_folder_whose_entry_is_not_durable_is_not_left_for_the_next_call(tmp_path: Path, error: int) -> None:
    folder = tmp_path / "a" / "b"
    # The first sync is that of tmp_path, for "a".
    assert refused(failing("fsync", error, only=1), lambda: make_folder(folder)) == error
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]
    assert disk_calls(tmp_path, lambda: make_folder(folder)) == [("fsync", "a")]
    assert folder.is_dir()


@errors
@pytest.mark.parametrize("name", ["openat", "write", "fsync"])
def test_rejects_that_cannot_be_written_leave_nothing(tmp_path: Path, name: str, error: int) -> None:
    append_rejects(tmp_path, "A", ROWS[:1])
    kept = files(tmp_path)
    assert refused(failing(name, error), lambda: append_rejects(tmp_path, "A", ROWS[1:])) == error
    assert files(tmp_path) == kept
    # The same bytes are written again, which makes their pages dirty again: this sync means something.
    calls = disk_calls(tmp_path, lambda: append_rejects(tmp_path, "A", ROWS[1:]))
    assert calls == [("write", "A/rejects.jsonl"), ("fsync", "A/rejects.jsonl")]
    assert list(read_rejects(tmp_path, "A").rows) == [0, 1]


def test_rejects_are_written_whole_through_short_writes_and_signals(tmp_path: Path) -> None:
    verdicts = iter([errno.EINTR, Short(3), Short(1), errno.EINTR])
    under(
        lambda call: next(verdicts, None) if call.name == "write" else None,
        lambda: append_rejects(tmp_path, "A", ROWS),
    )
    read = read_rejects(tmp_path, "A")
    assert (list(read.rows), read.rows[1].detail, read.faults) == ([0, 1], "é" * 20, [])


@errors
@pytest.mark.parametrize("name", ["openat", "write", "fsync", "rename"])
def test_a_file_that_cannot_be_replaced_is_the_old_one(tmp_path: Path, name: str, error: int) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"old")
    judge = failing(name, error, only=0)
    assert refused(judge, lambda: replace_file(path, [b"new", b"er"])) == error
    assert files(tmp_path) == {"run.json": b"old"}
    replace_file(path, [b"new", b"er"])
    assert files(tmp_path) == {"run.json": b"newer"}


def test_a_replaced_file_is_durable_before_it_gets_its_name_and_its_name_after(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    calls = disk_calls(tmp_path, lambda: replace_file(path, [b"new"]))
    temporary = calls[0][1]
    assert temporary.startswith(f".run.json.{os.getpid()}-")
    assert calls == [("write", temporary), ("fsync", temporary), ("rename", temporary), ("fsync", ".")]


def test_the_sync_of_the_name_fails_and_the_new_file_is_there(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"old")
    assert refused(failing("fsync", errno.EIO, only=1), lambda: replace_file(path, [b"new"])) == errno.EIO
    assert files(tmp_path) == {"run.json": b"new"}


def test_a_replaced_file_keeps_its_mode_and_owner(tmp_path: Path) -> None:
    path = tmp_path / "rejects.jsonl"
    path.write_bytes(b"old")
    path.chmod(0o640)
    if os.getuid() == 0:
        os.chown(path, 12, 34)
    before = path.stat()
    replace_file(path, [b"new"])
    after = path.stat()
    assert stat.S_IMODE(after.st_mode) == 0o640
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)
    assert after.st_ino != before.st_ino
