"""A JSONL source is read lazily, line by line at newlines alone, and from any cursor on as if never left."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producer.datasets.containers import Cursor, Row, read_rows
from tests.conftest import SHARED

BOM = b"\xef\xbb\xbf"


def write(folder: Path, data: bytes) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(data)
    return path


def read(path: Path, start: Cursor | None = None) -> list[Row]:
    return list(read_rows(path, start or Cursor()))


def lines(rows: Sequence[Row]) -> list[bytes]:
    return [value for row in rows if isinstance(value := row.value, bytes)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"\n", []),
        (b"\n \r\n\t\n", []),
        (b'{"a":1}\n{"a":2}\n', [b'{"a":1}', b'{"a":2}']),
        (b'{"a":1}\n{"a":2}', [b'{"a":1}', b'{"a":2}']),
        (b'{"a":1}\r\n{"a":2}\r\n', [b'{"a":1}', b'{"a":2}']),
        (b'\n{"a":1}\n\n   \n{"a":2}\n\n', [b'{"a":1}', b'{"a":2}']),
        (b'  {"a":1}\t\n', [b'{"a":1}']),
        (BOM + b'{"a":1}\n{"a":2}\n', [b'{"a":1}', b'{"a":2}']),
        (BOM + b'\r\n{"a":1}\n', [b'{"a":1}']),
        (BOM + b"  \n", []),
        (BOM, []),
        (b'{"a":1}\n' + BOM + b'{"a":2}\n', [b'{"a":1}', BOM + b'{"a":2}']),
        (b"\n" + BOM + b'{"a":1}\n', [BOM + b'{"a":1}']),
        (b"bad\n{}\n", [b"bad", b"{}"]),
        (b'{"a":1}\r{"a":2}\n', [b'{"a":1}\r{"a":2}']),
    ],
    ids=[
        "nothing",
        "one blank line",
        "blank lines",
        "plain",
        "no last newline",
        "CRLF",
        "blank lines between",
        "spaces around",
        "BOM",
        "BOM and CRLF alone",
        "BOM and spaces",
        "BOM alone",
        "BOM in the middle",
        "BOM in the second line",
        "a line that is no JSON",
        "CR alone",
    ],
)
def test_a_row_is_a_line_that_is_not_blank(tmp_path: Path, data: bytes, expected: list[bytes]) -> None:
    rows = read(write(tmp_path, data))
    assert lines(rows) == expected
    assert [row.index for row in rows] == list(range(len(expected)))


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\u000b", "\u000c", "\u001c", "\u001e"])
def test_only_a_newline_ends_a_line(tmp_path: Path, mark: str) -> None:
    line = f'{{"text": "a{mark}b"}}'.encode()
    assert lines(read(write(tmp_path, b"\n".join([line] * 3)))) == [line] * 3


def test_a_line_of_a_megabyte_and_a_half_is_a_row(tmp_path: Path) -> None:
    long = json.dumps({"text": "lorem " * 250_000}).encode()
    assert len(long) > 1_500_000
    rows = read(write(tmp_path, b'{"a":1}\n' + long + b"\n" + long))
    assert lines(rows) == [b'{"a":1}', long, long]
    assert lines(read(tmp_path / "rows.jsonl", rows[0].after)) == [long, long]


def test_rows_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, b"".join(b'{"a":%d}\n' % n for n in range(100_000)))
    rows = read_rows(path, Cursor())
    first = [next(rows) for _ in range(10)]
    # What the reader holds beyond these is a buffer: from there on the file can be anything, and is never looked at.
    with path.open("r+b") as file:
        file.truncate(first[-1].after.offset + 65536)
    assert lines(first) == [b'{"a":%d}' % n for n in range(10)]
    assert len(list(rows)) < 10_000


def test_a_cursor_is_text_in_the_ledger_and_empty_at_the_start() -> None:
    assert Cursor.parse("") == Cursor()
    assert Cursor.parse(Cursor(9_000_000, offset=2**40).text()) == Cursor(9_000_000, offset=2**40)


def test_a_cursor_behind_the_last_row_finds_none_and_later_rows_when_they_come(tmp_path: Path) -> None:
    path = write(tmp_path, b"{}\n{}\n")
    after = read(path)[-1].after
    assert read(path, after) == []
    with path.open("ab") as file:
        file.write(b'\n{"a":1}\n')
    assert [(row.index, row.value) for row in read(path, after)] == [(2, b'{"a":1}')]


def test_a_cursor_beyond_the_file_finds_nothing(tmp_path: Path) -> None:
    assert read(write(tmp_path, b"{}\n"), Cursor(7, offset=1000)) == []


def test_a_source_that_is_not_there_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        read(tmp_path / "none.jsonl")


pieces = st.lists(
    st.sampled_from(
        [b"{}", b'{"a":1}', "\u2028".encode(), BOM, b"x", b" ", b"\n", b"\n", b"\r\n", b"\r", b"\n\n", b"\xff", b"\x00"]
    ),
    max_size=30,
)


@settings(max_examples=100)
@given(pieces.map(b"".join))
def test_reading_on_from_any_row_gives_the_rest_of_the_rows(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(data)
    rows = read(path)
    assert [row.index for row in rows] == list(range(len(rows)))
    assert lines(rows) == [line for part in data.removeprefix(BOM).split(b"\n") if (line := part.strip())]
    for at, row in enumerate(rows):
        assert read(path, row.after) == rows[at + 1 :]
        assert read(path, Cursor.parse(row.after.text())) == rows[at + 1 :]


def test_the_malformed_file_has_a_row_for_every_line_that_is_not_blank() -> None:
    path = SHARED / "data" / "prompts" / "broken" / "made_malformed.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} lies beside the project, and is not there")
    written = path.read_bytes().split(b"\n")
    rows = read(path)
    assert len(rows) == sum(bool(line.strip()) for line in written) == 25
    assert max(map(len, lines(rows))) > 1_400_000
    for at, row in enumerate(rows):
        assert read(path, row.after) == rows[at + 1 :]
