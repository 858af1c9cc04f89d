"""The same rows come out of every container, from any row on, and what is damaged in one costs no other."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import zstandard

from common.errors import DataError
from producer.datasets.containers import Cursor, Reader, Row, read_rows
from tests.containers import CONTAINERS, decoded, table

ROWS = table(50)
every_container = pytest.mark.parametrize("container", CONTAINERS)


def read(source: str | Path, start: Cursor | None = None, **more: Any) -> list[Row]:
    return list(read_rows(source, start or Cursor(), **more))


def make(folder: Path, container: str, rows: int = len(ROWS)) -> Path:
    return CONTAINERS[container](folder / "rows", ROWS[:rows])


@every_container
@pytest.mark.parametrize("count", [1, 2, 50])
def test_every_row_comes_out_as_it_went_in(tmp_path: Path, container: str, count: int) -> None:
    rows = read(make(tmp_path, container, count))
    assert [row.index for row in rows] == list(range(count))
    assert [decoded(row.value) for row in rows] == ROWS[:count]
    assert all(row.size > 0 for row in rows)


@every_container
def test_reading_on_from_any_row_gives_the_rest(tmp_path: Path, container: str) -> None:
    source = make(tmp_path, container)
    rows = read(source)
    for row in rows:
        assert read(source, Cursor.parse(row.after.text())) == rows[row.index + 1 :]


@every_container
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_reader_goes_on_where_it_was_left(tmp_path: Path, container: str, step: int) -> None:
    source = make(tmp_path, container)
    reader, at, taken = Reader(source), Cursor(), []
    while part := list(islice(reader.rows(at), step)):
        taken += part
        at = part[-1].after
    assert taken == read(source)


@pytest.mark.parametrize("container", ["gz", "zst"])
def test_what_a_compressed_file_costs_is_said_where_it_is_paid(
    tmp_path: Path, container: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    source = make(tmp_path, container)
    reader = Reader(source)
    first = list(islice(reader.rows(Cursor()), 20))
    again = list(islice(reader.rows(first[-1].after), 20))
    ahead = next(reader.rows(read(source)[44].after))  # another process has read on: so does this one, from where it is
    assert (again[0].index, ahead.index) == (20, 45)
    assert caplog.messages == []
    assert next(Reader(source).rows(first[-1].after)) == again[0]
    (message,) = caplog.messages
    assert message.startswith(
        f"{source} is read on from byte {first[-1].after.offset:,}: the file has no index, so all"
    )


@every_container
def test_a_reader_follows_a_cursor_that_another_moved(tmp_path: Path, container: str) -> None:
    source = make(tmp_path, container)
    rows = read(source)
    reader = Reader(source)
    for at in (3, 10, 11, 40, 5, 49, 0):
        assert next(reader.rows(rows[at - 1].after if at else Cursor())) == rows[at]


def test_a_reader_sees_what_was_written_since(tmp_path: Path) -> None:
    source = make(tmp_path, "jsonl")
    reader = Reader(source)
    first = next(reader.rows(Cursor()))
    source.write_bytes(source.read_bytes()[: first.after.offset] + b'{"new": 1}\n')
    assert [row.value for row in reader.rows(first.after)] == [b'{"new": 1}']
    with source.open("ab") as file:
        file.write(b"{}\n")
    assert [row.index for row in reader.rows(Cursor(2, offset=source.stat().st_size - 3))] == [2]


@pytest.mark.parametrize("container", ["jsonl", "csv", "array", "indented array", "documents", "shards"])
def test_rows_are_read_as_they_are_asked_for(tmp_path: Path, container: str) -> None:
    rows = read_rows(make(tmp_path, container), Cursor())
    assert next(rows).index == 0
    rows.close()  # type: ignore[attr-defined]


# Cursors


@pytest.mark.parametrize(
    ("text", "cursor"),
    [
        ("", Cursor()),
        ('{"index":7,"offset":100}', Cursor(7, 0, 100)),
        ('{"index":7,"file":2,"offset":100}', Cursor(7, 2, 100)),
    ],
)
def test_cursors_of_before_are_read(text: str, cursor: Cursor) -> None:
    assert Cursor.parse(text) == cursor == Cursor.parse(cursor.text())


@pytest.mark.parametrize("head", [b"", b"\xef", b"\xef\xbb\xbf", b" \n"])
def test_an_array_whose_first_frame_ends_before_it(tmp_path: Path, head: bytes) -> None:
    data = (b"\xef\xbb\xbf" if head[:1] == b"\xef" else b"\n") + b' [{"id": 1}, {"id": 2}]'
    frames = [zstandard.ZstdCompressor().compress(one) for one in (head, data.removeprefix(head))]
    (tmp_path / "a.json.zst").write_bytes(b"".join(frames))
    rows = list(read_rows(tmp_path / "a.json.zst", Cursor()))
    assert [row.value for row in rows] == [b'{"id": 1}', b'{"id": 2}']
    assert list(read_rows(tmp_path / "a.json.zst", rows[0].after)) == rows[1:]


def test_a_header_of_csv_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"prompt,id\ra,1\rb,2\r")
    with pytest.raises(DataError, match=r"the header of .* is not CSV .*; let its lines end with LF, not with CR"):
        list(read_rows(tmp_path / "a.csv", Cursor()))
