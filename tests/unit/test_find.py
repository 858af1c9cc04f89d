"""A record is found in the segments without a ledger: then the files say which of an index counts."""

import os
from pathlib import Path

import pytest

from common.records import Head
from common.segments import Entry
from producer.monitor.find import Finder, lines_back
from tests.lines import record_line, void_line, write_segment


def attempt_of(entry: Entry | None) -> tuple[int, int] | None:
    return None if entry is None else (entry.what.index, entry.what.attempt)


def test_the_highest_attempt_that_is_not_taken_back_counts(tmp_path: Path) -> None:
    write_segment(tmp_path, "w1-0.jsonl", record_line(1, 5), record_line(2, 5), record_line(1, 7), record_line(12, 1))
    write_segment(tmp_path, "w2-0.jsonl", record_line(1, 9), void_line(1, 9), record_line(3, 4), void_line(3, 4))
    finder = Finder(tmp_path, "A", None)
    found = finder.by_index(1)
    assert (attempt_of(found.entry), found.superseded) == ((1, 7), (5, 9))
    assert (attempt_of(finder.by_index(2).entry), finder.by_index(2).superseded) == ((2, 5), ())
    taken_back = finder.by_index(3)
    assert (taken_back.entry, taken_back.superseded) == (None, (4,))
    absent = finder.by_index(4)
    assert (absent.entry, absent.superseded) == (None, ())


def test_the_newest_is_the_last_that_counts_of_the_last_file(tmp_path: Path) -> None:
    older = write_segment(tmp_path, "w1-0.jsonl", record_line(1), record_line(2, flags=["truncated"]))
    newer = write_segment(tmp_path, "w0-0.jsonl", record_line(3), record_line(4, 6), void_line(4, 6), b'{"torn')
    os.utime(older, (1000, 1000))
    os.utime(newer, (2000, 2000))
    finder = Finder(tmp_path, "A", None)
    assert attempt_of(finder.newest()) == (3, 1)
    assert attempt_of(finder.newest("truncated")) == (2, 1)
    assert finder.newest("nothing of the kind") is None


def test_any_record_may_be_drawn(tmp_path: Path) -> None:
    write_segment(tmp_path, "w1-0.jsonl", *(record_line(index) for index in range(6)))
    write_segment(tmp_path, "w2-0.jsonl", *(record_line(index, flags=["truncated"]) for index in range(6, 9)))
    finder = Finder(tmp_path, "A", None)
    drawn = set()
    for _ in range(300):
        drawn.add(attempt_of(finder.drawn()))
    assert drawn == {(index, 1) for index in range(9)}
    flagged = {attempt_of(finder.drawn("truncated")) for _ in range(60)}
    assert flagged == {(6, 1), (7, 1), (8, 1)}


def test_a_folder_without_segments_has_no_record(tmp_path: Path) -> None:
    finder = Finder(tmp_path, "A", None)
    assert (finder.newest(), finder.drawn(), finder.by_index(0).entry) == (None, None, None)


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
def test_lines_are_read_from_the_last_to_the_first(tmp_path: Path, size: int) -> None:
    texts = [b"a\n", b"\n", b"some longer line\n", b"x" * 100 + b"\n", b"torn"]
    path = tmp_path / "lines"
    path.write_bytes(b"".join(texts))
    lines = list(lines_back(path, size))
    assert [line.text for line in lines] == texts[::-1]
    whole = path.read_bytes()
    assert all(whole[line.offset : line.end] == line.text for line in lines)
    path.write_bytes(b"")
    assert list(lines_back(path, size)) == []


def test_what_is_read_back_is_the_record(tmp_path: Path) -> None:
    write_segment(tmp_path, "w1-0.jsonl", record_line(7, 3), record_line(8, 4))
    entry = Finder(tmp_path, "A", None).by_index(8).entry
    assert entry is not None
    assert isinstance(entry.what, Head)
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        assert file.read(entry.end - entry.offset) == record_line(8, 4)
