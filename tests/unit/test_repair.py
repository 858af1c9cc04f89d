"""`verify --repair` takes out exactly the lines that verify names, and keeps every other byte, and the old file."""

import errno
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UsageError
from common.records import Head
from common.rejects import Reject, append_rejects, read_rejects
from common.segments import count, records, segment_paths
from producer.repair import repair_files
from producer.verify import Repair, verify
from tests.lines import record_line, void_line, write_segment
from tests.syscalls import Call, failing, under
from workers.segment_writer import SegmentWriter

FIRST, LAST = record_line(0), record_line(1)
CUT = record_line(5)[:60]
FAULTS = {
    "torn": (CUT, "torn last line of 60 bytes"),
    "a whole record without its newline": (record_line(5)[:-1], "torn last line of"),
    "a NUL tail": (b"\0" * 4096, "torn last line of 4096 bytes, which begins with 4,096 NUL bytes"),
    "a NUL line": (b"\0" * 10 + b"\n", "not a record: it begins with 10 NUL bytes, as a power cut leaves them"),
    "NUL before the end of a record": (b"\0" * 60 + CUT + b"}\n", "not a record: it begins with 60 NUL bytes"),
    "cut": (CUT + b"\n", "not a record: Input data was truncated"),
    "cut and run into the next": (CUT + record_line(6), "not a record: "),
    "two records on one line": (record_line(5)[:-1] + record_line(6), "not a record: "),
    "no JSON": (b"hello\n", "not a record: JSON is malformed"),
    "an empty line": (b"\n", "not a record: "),
    "no UTF-8": (b"\xff\xfe\n", "not a record: "),
    "no UTF-8 in a string": (record_line(5, server="@").replace(b"@", b"\xff"), "not a whole record: Invalid UTF-8"),
    "foreign": (b'{"id": 7, "messages": []}\n', "not a record: Object missing required field"),
    "of another dataset": (record_line(5, dataset="B"), "a record of dataset 'B'"),
    "a second time": (FIRST, "index 0, attempt 1 a second time"),
    "void without a record": (void_line(5, 2), "void without a record: index 5, attempt 2"),
    "a void that is none": (b'{"void":{"index":5}}\n', "not a record: Object missing required field `attempt`"),
    "too many output_ids": (record_line(5, completion_tokens=1), "2 output_ids, but completion_tokens is 1"),
    "too few input_ids": (record_line(5, prompt_tokens=9), "3 input_ids, but prompt_tokens is 9"),
    "a negative id": (record_line(5, answer=[1, -2]), "not a whole record: Expected `int` >= 0"),
    "an answer that is none": (record_line(5, finish_reason="abort"), "finish_reason 'abort' is neither"),
}
SPOILT = pytest.mark.parametrize(("line", "reason"), FAULTS.values(), ids=list(FAULTS))


def lay(output: Path, line: bytes) -> Path:
    """A segment with `line` at fault in its middle, or at its end if it has no newline; and a sound one beside it."""
    write_segment(output, "w-1.jsonl", record_line(2), record_line(2, 2), void_line(2), record_line(3))
    return write_segment(output, "w-0.jsonl", FIRST, LAST, line, *([record_line(4)] if line.endswith(b"\n") else []))


@SPOILT
def test_each_fault_is_named_by_file_line_and_byte_and_nothing_is_changed(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = lay(tmp_path, line)
    before = path.read_bytes()
    report = verify(tmp_path, ["A"])
    at = len(FIRST + LAST)
    if line.endswith(b"\n"):
        (fault,) = report.faults
        assert (fault.path, fault.line, fault.byte) == (str(path), 3, at)
        assert fault.reason.startswith(reason)
    else:
        assert report.faults == []
        (note,) = report.notes
        assert note.startswith(f"{path}:3 (byte {at}): {reason}")
    assert path.read_bytes() == before
    assert [each.name for each in sorted(path.parent.iterdir())] == ["w-0.jsonl", "w-1.jsonl"]


@SPOILT
def test_a_repair_takes_that_line_out_and_no_other_byte(tmp_path: Path, line: bytes, reason: str) -> None:
    path = lay(tmp_path, line)
    before, sound = path.read_bytes(), (tmp_path / "A" / "w-1.jsonl").read_bytes()
    (repair,) = repair_files(tmp_path, "A")

    assert (repair.path, repair.kept, repair.bytes) == (str(path), "w-0.jsonl.before-repair-1", len(line))
    assert [(one.line, one.byte) for one in repair.lines] == [(3, len(FIRST + LAST))]
    assert repair.lines[0].reason.startswith(reason)
    assert path.read_bytes() == FIRST + LAST + (record_line(4) if line.endswith(b"\n") else b"")
    assert (tmp_path / "A" / "w-1.jsonl").read_bytes() == sound
    assert path.with_name(repair.kept).read_bytes() == before

    report = verify(tmp_path, ["A"])
    assert (report.faults, report.notes) == ([], [])
    attempts = {index: entry.what.attempt for index, entry in count(tmp_path, "A").entries.items()}
    assert attempts == dict.fromkeys([0, 1, 3], 1) | {2: 2} | ({4: 1} if line.endswith(b"\n") else {})
    assert repair_files(tmp_path, "A") == []


def test_what_was_kept_is_no_segment_for_any_reader_or_writer(tmp_path: Path) -> None:
    lay(tmp_path, b"hello\n")
    repair_files(tmp_path, "A")
    assert [path.name for path in segment_paths(tmp_path, "A")] == ["w-0.jsonl", "w-1.jsonl"]
    assert sorted(record.index for record in records(tmp_path, "A")) == [0, 1, 2, 3, 4]
    assert SegmentWriter(tmp_path, "w", 1).append("A", [record_line(7)])[0] == "A/w-2.jsonl"


def test_a_second_repair_keeps_a_second_copy(tmp_path: Path) -> None:
    path = write_segment(tmp_path, "w-0.jsonl", FIRST, b"one\n")
    repair_files(tmp_path, "A")
    with path.open("ab") as file:
        file.write(b"two\n")
    (repair,) = repair_files(tmp_path, "A")
    assert repair.kept == "w-0.jsonl.before-repair-2"
    assert path.with_name("w-0.jsonl.before-repair-1").read_bytes() == FIRST + b"one\n"
    assert path.with_name(repair.kept).read_bytes() == FIRST + b"two\n"
    assert path.read_bytes() == FIRST


def test_of_two_equal_records_the_whole_one_stays(tmp_path: Path) -> None:
    wrong, right = record_line(0, completion_tokens=7), record_line(0)
    first = write_segment(tmp_path, "a-0.jsonl", wrong, LAST)
    second = write_segment(tmp_path, "b-0.jsonl", right, right)
    (one, two) = repair_files(tmp_path, "A")
    assert [line.line for line in one.lines] == [1]
    assert [line.line for line in two.lines] == [2]
    assert (first.read_bytes(), second.read_bytes()) == (LAST, right)


def test_a_void_goes_with_its_record_and_the_others_stay(tmp_path: Path) -> None:
    kept = [record_line(1, 1), record_line(1, 2), void_line(1, 1), void_line(1, 1)]
    write_segment(tmp_path, "a-0.jsonl", record_line(0, finish_reason="abort"), *kept[:2])
    path = write_segment(tmp_path, "b-0.jsonl", void_line(0), *kept[2:])
    (_, repair) = repair_files(tmp_path, "A")
    assert [line.reason for line in repair.lines] == ["void whose record is at fault: index 0, attempt 1"]
    assert path.read_bytes() == b"".join(kept[2:])
    assert {index: entry.what.attempt for index, entry in count(tmp_path, "A").entries.items()} == {1: 2}


def test_a_line_with_several_faults_is_one_line(tmp_path: Path) -> None:
    write_segment(tmp_path, "w-0.jsonl", record_line(0, prompt_tokens=9, completion_tokens=9), LAST)
    (repair,) = repair_files(tmp_path, "A")
    (line,) = repair.lines
    assert line.reason == "3 input_ids, but prompt_tokens is 9; 2 output_ids, but completion_tokens is 9"
    assert repair.bytes == len(record_line(0))


def test_rejects_are_repaired_too(tmp_path: Path) -> None:
    append_rejects(tmp_path, "A", [Reject(0, "bad_row"), Reject(1, "too_long")])
    path = tmp_path / "A" / "rejects.jsonl"
    sound = path.read_bytes()
    path.write_bytes(b"\0\0\n" + sound + b'{"index":-1,"reason":"x"}\n' + b'{"ind')
    (repair,) = repair_files(tmp_path, "A")
    assert [(line.line, line.byte) for line in repair.lines] == [(1, 0), (4, 3 + len(sound)), (5, 29 + len(sound))]
    assert path.read_bytes() == sound
    append_rejects(tmp_path, "A", [Reject(2, "bad_row")])
    assert list(read_rejects(tmp_path, "A").rows) == [0, 1, 2]


def test_a_file_of_faults_alone_becomes_empty(tmp_path: Path) -> None:
    path = write_segment(tmp_path, "w-0.jsonl", b"?\n", CUT)
    path.chmod(0o600)
    repair_files(tmp_path, "A")
    assert path.read_bytes() == b""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert repair_files(tmp_path, "A") == []


def test_nothing_at_fault_means_nothing_changed(tmp_path: Path) -> None:
    path = write_segment(tmp_path, "w-0.jsonl", FIRST, LAST)
    before = path.stat()
    assert repair_files(tmp_path, "A") == repair_files(tmp_path, "none") == []
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_grows_under_the_repair_is_left_alone(tmp_path: Path) -> None:
    path = write_segment(tmp_path, "w-0.jsonl", FIRST, CUT)

    def complete_the_line(call: Call) -> None:
        if call.name == "link":  # all was read, and nothing is written yet
            path.write_bytes(FIRST + record_line(5))

    with pytest.raises(UsageError, match=r"w-0\.jsonl was written to while it was read"):
        under(complete_the_line, lambda: repair_files(tmp_path, "A"))
    assert list(path.parent.iterdir()) == [path]
    assert path.read_bytes() == FIRST + record_line(5)


@pytest.mark.parametrize("name", ["link", "openat", "write", "fsync", "rename"])
def test_a_repair_that_fails_leaves_the_old_file_and_can_be_repeated(tmp_path: Path, name: str) -> None:
    path = write_segment(tmp_path, "w-0.jsonl", FIRST, b"?\n", LAST)
    before = path.read_bytes()
    with pytest.raises(OSError) as caught:
        under(
            lambda call: errno.ENOSPC if call.name == name and (name != "openat" or call.creates) else None,
            lambda: repair_files(tmp_path, "A"),
        )
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    (repair,) = repair_files(tmp_path, "A")
    assert path.read_bytes() == FIRST + LAST
    assert path.with_name(repair.kept).read_bytes() == before


def test_a_repair_whose_last_sync_fails_has_not_lost_the_old_file(tmp_path: Path) -> None:
    path = write_segment(tmp_path, "w-0.jsonl", FIRST, b"?\n", LAST)
    before = path.read_bytes()
    with pytest.raises(OSError):  # the folder for the link, the new file, the folder for its name
        under(failing("fsync", errno.EIO, only=2), lambda: repair_files(tmp_path, "A"))
    assert path.read_bytes() == FIRST + LAST
    assert path.with_name("w-0.jsonl.before-repair-1").read_bytes() == before


sound_lines = st.builds(record_line, st.integers(0, 5), st.integers(1, 3))
any_line = st.one_of(
    sound_lines,
    sound_lines,
    st.builds(void_line, st.integers(0, 5), st.integers(1, 3)),
    st.builds(lambda line, at: line[:at] + b"\n", sound_lines, st.integers(0, 150)),
    st.builds(lambda line, at: line[:at] + b"\0" + line[at:], sound_lines, st.integers(0, 150)),
    st.builds(lambda index, n: record_line(index, completion_tokens=n), st.integers(0, 5), st.integers(0, 3)),
    st.binary(max_size=6).map(lambda data: data.replace(b"\n", b"") + b"\n"),
)


@settings(max_examples=30)  # each repairs real files, with all their fsyncs
@given(files=st.lists(st.lists(any_line, max_size=8), min_size=1, max_size=3), cut=st.integers(0, 200))
def test_after_any_damage_a_repair_leaves_clean_files_and_every_whole_record(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[bytes]], cut: int
) -> None:
    output = tmp_path_factory.mktemp("damage")
    for number, lines in enumerate(files):
        data = b"".join(lines)
        write_segment(output, f"w-{number}.jsonl", data[: len(data) - cut] if number == 0 else data)
    before = [line for path in segment_paths(output, "A") for line in path.read_bytes().splitlines(keepends=True)]
    whole = {line for line in before if line in WHOLE}
    named = verify(output, ["A"])

    repairs: list[Repair] = repair_files(output, "A")
    after = [line for path in segment_paths(output, "A") for line in path.read_bytes().splitlines(keepends=True)]
    report = verify(output, ["A"])
    assert (report.faults, report.notes) == ([], [])
    assert sum(len(repair.lines) for repair in repairs) == len(named.notes) + len(
        {(fault.path, fault.byte) for fault in named.faults}
    )
    # Every whole record is there, once; and whatever is there was there before, in the same order.
    assert sorted(line for line in after if not line.startswith(b'{"void"')) == sorted(whole)
    rest = iter(before)
    assert all(line in rest for line in after)
    assert all(isinstance(entry.what, Head) for entry in count(output, "A").entries.values())


WHOLE = {record_line(index, attempt) for index in range(6) for attempt in range(4)} | {
    record_line(index, completion_tokens=2) for index in range(6)
}
