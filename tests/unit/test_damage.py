"""Damaged, cut off and hostile files: rows before the damage come out, memory is bounded, the sentence says where."""

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard

from common.errors import DataError
from producer.datasets.containers import BadLine, Cursor, Row, read_rows
from tests.containers import CONTAINERS, decoded, lines, table

ROWS = table(400)


def read(source: Path, start: Cursor | None = None, **more: Any) -> list[Row]:
    return list(read_rows(source, start or Cursor(), **more))


def until_damage(source: Path) -> tuple[list[Row], str]:
    """The rows that come out, and what is said then."""
    rows: list[Row] = []
    with pytest.raises(DataError) as caught:
        rows.extend(read_rows(source, Cursor()))
    return rows, str(caught.value)


def values(path: Path, data: bytes, **more: Any) -> list[Any]:
    path.write_bytes(data)
    return [row.value for row in read(path, **more)]


# Cut off


@pytest.mark.parametrize(("name", "compress"), [("gz", gzip.compress), ("zst", zstandard.compress)])
@pytest.mark.parametrize("part", [0.3, 0.9, 0.999])
def test_all_rows_before_the_end_of_a_compressed_file_that_is_cut_off_are_read(
    tmp_path: Path, name: str, compress: Callable[[bytes], bytes], part: float
) -> None:
    whole = compress(lines(ROWS[:200])) + compress(lines(ROWS[200:]))
    source = tmp_path / f"rows.jsonl.{name}"
    source.write_bytes(whole[: int(len(whole) * part)])
    rows, said = until_damage(source)
    assert [decoded(row.value) for row in rows] == ROWS[: len(rows)]
    assert len(rows) > 400 * part * (0.8 if name == "gz" else 0.5) - 100
    size = source.stat().st_size
    assert said.startswith(f"{source} is cut off: it ends at byte {size:,} within a compressed stream; all rows before")
    assert until_damage(source) == (rows, said)


@pytest.mark.parametrize("name", ["gz", "zst"])
def test_a_compressed_file_that_is_damaged_inside_is_named_with_the_byte(tmp_path: Path, name: str) -> None:
    compress = gzip.compress if name == "gz" else zstandard.compress
    good = compress(lines(ROWS))
    source = tmp_path / f"rows.jsonl.{name}"
    source.write_bytes(good + (compress(lines(ROWS))[:40] if name == "gz" else b"") + b"\xff" * 200)
    rows, said = until_damage(source)
    assert [decoded(row.value) for row in rows][:400] == ROWS
    assert f"{source} is damaged near byte " in said


def test_a_wrong_checksum_is_damage(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(lines(ROWS)))
    data[-8] ^= 1
    source = tmp_path / "rows.jsonl.gz"
    source.write_bytes(data)
    rows, said = until_damage(source)
    assert "incorrect data check" in said
    assert [decoded(row.value) for row in rows] == ROWS[: len(rows)]


@pytest.mark.parametrize("container", ["array", "indented array", "documents"])
def test_a_json_file_that_is_cut_off_gives_the_rows_before(tmp_path: Path, container: str) -> None:
    source = CONTAINERS[container](tmp_path / "rows", ROWS)
    data = source.read_bytes()
    source.write_bytes(data[: len(data) // 2])
    rows, said = until_damage(source)
    assert [decoded(row.value) for row in rows] == ROWS[: len(rows)]
    assert 100 < len(rows) < 300
    assert f"it ends at byte {len(data) // 2:,} within row {len(rows)}" in said


def test_a_parquet_file_that_is_cut_off_has_no_row(tmp_path: Path) -> None:
    source = CONTAINERS["parquet"](tmp_path / "rows", ROWS)
    source.write_bytes(source.read_bytes()[:-100])
    rows, said = until_damage(source)
    assert rows == []
    size = source.stat().st_size
    assert said.startswith(f"{source} is no whole Parquet file: no footer ends at its last byte, {size:,} (")


def test_a_parquet_file_whose_footer_is_damaged_has_no_row(tmp_path: Path) -> None:
    source = CONTAINERS["parquet"](tmp_path / "rows", ROWS)
    data = bytearray(source.read_bytes())
    data[-2000:-8] = b"\xff" * 1992
    source.write_bytes(data)
    rows, said = until_damage(source)
    assert rows == []
    assert said.startswith(f"{source} is no whole Parquet file: ")


def test_a_parquet_file_that_is_damaged_inside_gives_the_row_groups_before(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    source = CONTAINERS["parquet"](tmp_path / "rows", ROWS)
    at = pq.ParquetFile(source).metadata.row_group(20).column(0).dictionary_page_offset
    data = bytearray(source.read_bytes())
    data[at : at + 40] = b"\xff" * 40
    source.write_bytes(data)
    rows, said = until_damage(source)
    assert [row.value for row in rows] == ROWS[:140]
    assert f"damaged in row group 20, which begins at byte {at:,} (" in said


def test_an_arrow_stream_that_is_cut_off_gives_the_batches_before(tmp_path: Path) -> None:
    source = CONTAINERS["saved dataset"](tmp_path / "rows", ROWS) / "data-00000-of-00002.arrow"
    source.write_bytes(source.read_bytes()[:-1500])
    rows, said = until_damage(source)
    assert [row.value for row in rows] == ROWS[: len(rows)]
    assert 150 < len(rows) < 200
    assert f"{source} is cut off or damaged near byte " in said


def test_what_follows_an_array_is_named(tmp_path: Path) -> None:
    source = CONTAINERS["indented array"](tmp_path / "rows", ROWS)
    with source.open("ab") as file:
        file.write(b"\n\n[1]")
    rows, said = until_damage(source)
    assert len(rows) == 400
    assert "goes on behind the array that ends near byte" in said


# Rows without end


def test_a_line_of_more_than_the_limit_is_a_row_that_is_bad(tmp_path: Path) -> None:
    bad = BadLine("line_too_long", "the row has more than 1,000 bytes, which max_row_bytes allows")
    long = b'{"a":"' + b"x" * 200_000 + b'"}'
    data = b'{"a":1}\n' + long + b'\n{"a":2}\n' + long
    assert values(tmp_path / "a.jsonl", data, max_row_bytes=1000) == [b'{"a":1}', bad, b'{"a":2}', bad]
    data = b'[{"a":1},' + long + b',\n{"a":2},' + long + b"]"
    assert values(tmp_path / "a.json", data, max_row_bytes=1000) == [b'{"a":1}', bad, b'{"a":2}', bad]
    data = b'a,b\r\n1,2\r\n3,"' + b"x\r\n" * 5000 + b'"\r\n5,6\r\n'
    path = tmp_path / "a.csv"
    path.write_bytes(data)
    rows = read(path, max_row_bytes=1000)
    assert [row.value for row in rows[:2]] == [{"a": "1", "b": "2"}, bad]
    assert {row.value.reason for row in rows[1:-1] if isinstance(row.value, BadLine)} == {"line_too_long", "not_csv"}
    for row in rows[:3]:
        assert read(path, row.after, max_row_bytes=1000) == rows[row.index + 1 :]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_file_whose_one_row_has_no_end_is_read_in_bounded_memory(tmp_path: Path, name: str) -> None:
    size = 50_000_000
    source = tmp_path / name
    begin = {"a.json": b'[{"a": "', "a.csv": b'a\n"'}.get(name, b'{"a": "')
    data = begin + b"x" * size
    source.write_bytes(
        gzip.compress(data, 1) if name.endswith("gz") else zstandard.compress(data) if name.endswith("zst") else data
    )
    del data
    rows: list[Row] = []
    tracemalloc.start()
    try:
        # Of these an array alone has to end.
        with pytest.raises(DataError, match="is cut off") if name == "a.json" else nullcontext():
            rows.extend(read_rows(source, Cursor(), 1_000_000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    reasons = [row.value.reason for row in rows if isinstance(row.value, BadLine)]
    assert reasons == ([] if name == "a.json" else ["line_too_long"])
    assert peak < 12_000_000


# Rows that are no rows


def test_a_bad_element_of_an_array_costs_no_other(tmp_path: Path) -> None:
    data = b'[{"a":1}, {bad}, {"b": NaN}, "text", 7, null, [1, [2]], {"c": "]}"} , ]\r\n'
    assert values(tmp_path / "a.json", data) == [
        b'{"a":1}', b"{bad}", b'{"b": NaN}', b'"text"', b"7", b"null", b"[1, [2]]", b'{"c": "]}"}',
    ]  # fmt: skip


def test_a_bad_record_of_a_csv_costs_no_other(tmp_path: Path) -> None:
    data = b'a,b\n1,2\n3\n4,5,6\n\n"x"y,7\n\xff,8\n"9\n""",10\n11,"open\n12,13\n'
    rows = values(tmp_path / "a.csv", data)
    assert [row if isinstance(row, dict) else row.reason for row in rows] == [
        {"a": "1", "b": "2"}, "not_csv", "not_csv", "not_csv", "not_csv", {"a": '9\n"', "b": "10"}, "not_csv",
        {"a": "12", "b": "13"},
    ]  # fmt: skip
    details = [row.detail for row in rows if isinstance(row, BadLine)]
    assert details[0] == "the record has 1 fields, and the header 2"
    assert details[3:] == ["the record is not UTF-8", "a quote of this line is not closed"]
    every = read(tmp_path / "a.csv")
    for row in every:
        assert read(tmp_path / "a.csv", row.after) == every[row.index + 1 :]


@pytest.mark.parametrize(
    ("head", "delimiter"), [("a,b", ","), ("a;b", ";"), ("a\tb", "\t"), ('"a","b"', ","), ("\ufeffa,b", ",")]
)
def test_the_delimiter_of_a_csv_is_told_from_its_header(tmp_path: Path, head: str, delimiter: str) -> None:
    data = f"{head}\r\n1{delimiter}2\r\n".encode()
    assert values(tmp_path / "a.csv", data) == [{"a": "1", "b": "2"}]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.csv", b"a,a\n1,2\n", "the header of {} names a column twice"),
        ("a.csv", b"\n1,2\n", "{} has no header"),
        ("a.csv", b"a,\xff\n1,2\n", "{} is not UTF-8"),
        ("a.jsonl", '{"a":1}\n'.encode("utf-16"), "{} is UTF-16; convert it to UTF-8"),
        ("a.jsonl", b"PK\x03\x04....", "{} is a zip archive; unpack it"),
        ("a.jsonl.bz2", b"BZh91AY", "{} is compressed by bzip2"),
        ("a.jsonl.gz", gzip.compress(b"PAR1....", mtime=0), "{} is compressed, and no text is within; unpack it"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid x\n", "{} is a pointer of Git LFS"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(says.format(path))


# What JSON begins with


TURNS = [{"role": "user", "content": "x" * 300_000}, {"role": "assistant", "content": "]}"}]
OTHERS = [{"messages": [{"role": "user", "content": "x"}]}, {"role": "user", "messages": [1]}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(json.dumps(TURNS), 1, id="a conversation"),
        pytest.param(json.dumps(TURNS, indent=2), 1, id="a conversation, indented"),
        pytest.param(f"{json.dumps(TURNS)}\n" * 3, 3, id="conversations on lines"),
        pytest.param('[{"content": "{\\"}", "role": "user"}]', 1, id="a conversation that begins with a text"),
        pytest.param(
            '[{"role": "writer", "question": "x"}, {"role": "poet"}]', 2, id="an array with a column of roles"
        ),
        pytest.param(json.dumps([TURNS] * 4), 4, id="an array of conversations"),
        pytest.param(json.dumps(OTHERS), 2, id="an array"),
        pytest.param(json.dumps(OTHERS) + "\n\n", 2, id="an array and blank lines"),
        pytest.param("[1, 2, 3]", 1, id="ids"),
        pytest.param("[1, 2, 3]\n[4]\n", 2, id="ids on lines"),
        pytest.param('["a", "b", "c"]', 3, id="an array of texts"),
        pytest.param("[]", 0, id="an empty array"),
        pytest.param("[\n]", 0, id="an empty array on two lines"),
        pytest.param('[\n{"a":1}\n,{"a":2}\n]\n', 2, id="an array, a row on each line"),
        pytest.param('[{"a":1},\n{"a":2}]\n', 2, id="an array that begins with its first row"),
        pytest.param("[[1],\n[2]]\n", 2, id="an array of lists that begins with its first row"),
        pytest.param('[{"a":1}\n[{"a":2}]\n[]\n', 3, id="lists on lines, the first one damaged"),
        pytest.param('{"a":1\n{"a":2}\n', 2, id="lines, the first one damaged"),
        pytest.param('{"a":1}', 1, id="a line"),
        pytest.param('{"a":', 1, id="a line that is damaged"),
        pytest.param("{\n}\n", 1, id="an empty document"),
        pytest.param('{"a": {\n "b": 1}}\n{"c":\n 2}', 2, id="documents that begin on their first line"),
        pytest.param('"text"\n7\n', 2, id="lines of scalars"),
        pytest.param("plain text\nof two lines", 2, id="no JSON"),
    ],
)
def test_what_json_is_told_by_how_it_begins(tmp_path: Path, text: str, expected: int) -> None:
    for name in ("a.json", "a.jsonl", "a"):
        path = tmp_path / name
        path.write_text(text)
        rows = read(path)
        assert len(rows) == expected, name
        for row in rows:
            assert read(path, row.after) == rows[row.index + 1 :]


def test_a_string_may_end_anywhere_in_a_piece(tmp_path: Path) -> None:
    piece = 65536
    for shift in range(-4, 5):
        rows = [{"a": "x" * (piece - 20 + shift) + '\\"\\\\'}, {"b": "\\" * 9}, {"c": '"'}]
        path = tmp_path / "a.json"
        path.write_text(json.dumps(rows))
        assert [decoded(row.value) for row in read(path)] == rows


def test_a_gzip_that_expands_to_very_much_is_read_in_pieces(tmp_path: Path) -> None:
    packer = zlib.compressobj(9, wbits=31)
    path = tmp_path / "a.jsonl.gz"
    blanks = b" " * 1_000_000 + b"\n"
    path.write_bytes(b"".join(packer.compress(blanks) for _ in range(40)) + packer.compress(b"{}\n") + packer.flush())
    tracemalloc.start()
    try:
        assert [row.value for row in read(path)] == [b"{}"]
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_columns_of_every_type_come_out_as_python_has_them(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    row = {"input_ids": [1, 2, 3], "messages": [{"role": "user", "content": "x"}], "n": None, "f": 0.5, "b": b"\0"}
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    assert [one.value for one in read(path)] == [row]
