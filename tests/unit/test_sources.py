"""A source that was replaced is told from one that was touched, copied or appended to, by the bytes that were read."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError, UsageError
from common.sections import DatasetSettings
from producer.datasets.containers import Cursor, read_rows
from producer.sources import Source, keep_source, look, read_source, refuse_replaced
from tests.syscalls import Call, under

ROWS = [b'{"id": %d, "text": "%s"}\n' % (index, b"x" * (index % 97)) for index in range(5000)]  # some 370 KB
READ = 4000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(ROWS))
    return path


def read(path: Path, rows: int) -> Source:
    """What is known of a source whose first `rows` rows were read."""
    cursor = Cursor()
    for row in read_rows(path, cursor):
        if row.index == rows:
            break
        cursor = row.after
    assert cursor.index == rows
    return look(path, cursor)


def rewrite(path: Path, rows: list[bytes]) -> None:
    path.write_bytes(b"".join(rows))


def test_a_file_that_is_as_it_was_has_not_changed(source: Path) -> None:
    seen = read(source, READ)
    assert (seen.rows, seen.bytes, seen.size) == (READ, len(b"".join(ROWS[:READ])), len(b"".join(ROWS)))
    assert seen.change(source) is None
    os.utime(source, (1, 1))
    assert seen.change(source) is None
    copy = source.with_name("copy.jsonl")
    shutil.copyfile(source, copy)
    assert seen.change(copy) is None


def test_rows_that_were_not_read_may_be_appended_changed_and_taken_away(source: Path) -> None:
    seen = read(source, READ)
    for rows in ([*ROWS, b'{"id": 5000}\n'], [*ROWS[:READ], b"other\n"], ROWS[:READ]):
        rewrite(source, rows)
        assert seen.change(source) is None


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        pytest.param([b"new\n", *ROWS], "its first 65,536 bytes are others", id="a row before the first"),
        pytest.param(ROWS[1:], "its first 65,536 bytes are others", id="the first row gone"),
        pytest.param(ROWS[::-1], "its first 65,536 bytes are others", id="the other way round"),
        pytest.param(
            [*ROWS[:2000], b"new\n", *ROWS[2000:]],
            "the 65,536 bytes before its row 4,000",
            id="a row put into the middle",
        ),
        pytest.param(
            [*ROWS[:2000], *ROWS[2001:]], "the 65,536 bytes before its row 4,000", id="a row of the middle gone"
        ),
        pytest.param(
            [*ROWS[: READ - 1], b"new\n", *ROWS[READ:]], "the 65,536 bytes before its row 4,000", id="the last row read"
        ),
        pytest.param(ROWS[: READ - 1], " bytes, of which ", id="cut off"),
        pytest.param([], "it has 0 bytes, of which ", id="empty"),
    ],
)
def test_what_moves_a_row_that_was_read_is_a_change(source: Path, rows: list[bytes], says: str) -> None:
    seen = read(source, READ)
    rewrite(source, rows)
    change = seen.change(source)
    assert change is not None
    assert says in change


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_a_short_source_is_compared_whole(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "a.jsonl"
    rewrite(path, ROWS[:rows])
    seen = read(path, rows)
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + b"~" + data[at + 1 :])
        assert seen.change(path)
    path.write_bytes(data)
    assert seen.change(path) is None


@pytest.mark.parametrize(
    ("more", "changed"),
    [(b"", False), (b"\n", False), (b"\r\n", False), (b" \n", False), (b'\n{"a":2}\n', False), (b'{"a":2}\n', True)],
)
def test_a_last_row_without_a_newline_must_not_go_on(tmp_path: Path, more: bytes, changed: bool) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a":0}\n{"a":1}')
    seen = read(path, 2)
    path.write_bytes(path.read_bytes() + more)
    assert seen.change(path) == ("its row 1, which had no newline, goes on beyond byte 15" if changed else None)


def test_an_empty_source_protects_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"")
    seen = look(path, Cursor())
    path.write_bytes(b'{"a":1}\n')
    assert seen.change(path) is None


@given(data=st.data())
def test_a_row_that_was_read_keeps_its_index_or_the_change_is_seen(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    line = st.sampled_from([b"{}", b'{"a":1}', b"", b" ", b"x", b'{"a":22}'])
    before = data.draw(st.lists(line, min_size=1, max_size=12))
    after = data.draw(st.one_of(st.just(before), st.lists(line, max_size=12)))
    after = [*after, *data.draw(st.lists(line, max_size=3))]
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(b"\n".join(before) + data.draw(st.sampled_from([b"", b"\n"])))
    rows = list(read_rows(path, Cursor()))
    cursor = data.draw(st.sampled_from([Cursor(), *(row.after for row in rows)]))
    seen = look(path, cursor)

    path.write_bytes(b"\n".join(after))
    if seen.change(path) is None:
        now = [(row.index, row.value) for row in read_rows(path, Cursor())]
        assert now[: cursor.index] == [(row.index, row.value) for row in rows[: cursor.index]]
        assert [(row.index, row.value) for row in read_rows(path, cursor)] == now[cursor.index :]


# What is written down


def test_what_was_read_is_kept_and_never_less_than_before(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert read_source(output, "A") is None
    half, more = read(source, 2000), read(source, READ)
    keep_source(output, "A", half, None)
    assert read_source(output, "A") == half
    keep_source(output, "A", more, half)
    assert read_source(output, "A") == more
    keep_source(output, "A", half, more)  # a recovery reads the source from its start
    assert read_source(output, "A") == more
    assert [path.name for path in (output / "A").iterdir()] == ["source.log"]


def test_what_is_known_already_is_not_written_again(source: Path, tmp_path: Path) -> None:
    seen = read(source, 10)
    keep_source(tmp_path / "out", "A", seen, None)
    calls: list[Call] = []
    under(calls.append, lambda: keep_source(tmp_path / "out", "A", seen, seen))
    assert calls == []


@pytest.mark.parametrize("tail", [b"{", b'{"rows":7}\n', b"\0" * 300, b"\0" * 300 + b"\n", b"\xff\n"])
def test_the_last_whole_line_counts(source: Path, tmp_path: Path, tail: bytes) -> None:
    output = tmp_path / "out"
    seen, more = read(source, 10), read(source, 20)
    keep_source(output, "A", seen, None)
    log = output / "A" / "source.log"
    log.write_bytes(log.read_bytes() + tail)
    assert read_source(output, "A") == seen
    for _ in range(2):  # the first of them may be appended to a torn line
        keep_source(output, "A", more, seen)
    assert read_source(output, "A") == more


def test_the_log_stays_small(source: Path, tmp_path: Path) -> None:
    cursors = [row.after for row in read_rows(source, Cursor())][:1000]
    for cursor in cursors:
        keep_source(tmp_path, "A", look(source, cursor), read_source(tmp_path, "A"))
    assert (tmp_path / "A" / "source.log").stat().st_size < 70_000
    known = read_source(tmp_path, "A")
    assert known is not None
    assert known.rows == 1000


def test_only_the_first_line_waits_for_the_disk(source: Path, tmp_path: Path) -> None:
    def syncs(seen: Source, known: Source | None) -> int:
        calls: list[Call] = []
        under(calls.append, lambda: keep_source(tmp_path, "A", seen, known))
        return sum(call.name in {"fsync", "fdatasync"} for call in calls)

    assert syncs(read(source, 10), None) == 3  # the folder's entry, the file, the file's entry
    assert syncs(read(source, 20), read(source, 10)) == 0


def test_a_file_of_ours_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "A").mkdir()
    (tmp_path / "A" / "source.log").write_text("{")
    with pytest.raises(
        DataError, match=r"A/source\.log has no whole line; remove it if the source of A was not replaced"
    ):
        read_source(tmp_path, "A")


def test_the_refusal_names_each_source_and_what_changed(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    other = tmp_path / "b.jsonl"
    rewrite(other, ROWS)
    datasets = [DatasetSettings(name=name, path=path) for name, path in (("A", source), ("B", other), ("C", source))]
    for dataset in datasets[:2]:
        keep_source(output, dataset.name, read(Path(dataset.path), READ), None)
    refuse_replaced(output, datasets)
    rewrite(source, ROWS[:10])
    rewrite(other, ROWS[1:])
    with pytest.raises(UsageError) as caught:
        refuse_replaced(output, datasets)
    sentence = str(caught.value)
    assert f"{source} of dataset A: it has " in sentence
    assert f"{other} of dataset B: its first 65,536 bytes are others" in sentence
    assert "dataset C" not in sentence
    assert "--accept-changes" in sentence
