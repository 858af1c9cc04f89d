"""Rows by their number, in the order of a shuffle: of every container the values that reading it gives."""

import gzip
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.errors import DataError
from producer.datasets.containers import BadLine, Cursor, Row, read_rows
from producer.datasets.row_table import ShuffledReader, keep_table, make_table, read_table
from tests.containers import CONTAINERS, table

LIMIT = 10_000


def shuffled(source: Path | str, folder: Path, seed: int = 7, parts: list[int] | None = None) -> ShuffledReader:
    made = make_table(source, folder, LIMIT)
    keep_table(folder, made, "what it is of")
    kept = read_table(folder)
    assert kept is not None
    return ShuffledReader(source, folder, kept, seed, parts or [kept.rows])


def values(rows: list[Row]) -> dict[int, Any]:
    assert len({row.index for row in rows}) == len(rows)
    return {row.index: row.value for row in rows}


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_gives_each_row_as_reading_it_does(tmp_path: Path, container: str) -> None:
    source = CONTAINERS[container](tmp_path / "a", table(97))
    reader = shuffled(source, tmp_path / "out")
    rows = list(reader.rows(Cursor()))
    assert values(rows) == {row.index: row.value for row in read_rows(source, Cursor(), LIMIT)}
    assert [row.after for row in rows] == [Cursor(step + 1) for step in range(97)]
    assert [row.index for row in rows] != sorted(row.index for row in rows)
    for step in (1, 50, 96, 97):
        assert list(reader.rows(Cursor(step))) == rows[step:]


@pytest.mark.parametrize("container", ["jsonl", "csv", "gz", "parquet", "shards"])
def test_the_order_is_that_of_rows_and_seed_alone(tmp_path: Path, container: str) -> None:
    source = CONTAINERS[container](tmp_path / "a", table(40))
    order = [row.index for row in shuffled(source, tmp_path / "out").rows(Cursor())]
    assert order[:6] == [26, 13, 4, 24, 36, 30]
    assert order != [row.index for row in shuffled(source, tmp_path / "out", seed=8).rows(Cursor())]


def test_what_is_appended_comes_behind_what_was_there(tmp_path: Path) -> None:
    source = CONTAINERS["jsonl"](tmp_path / "a", table(20))
    before = [row.index for row in shuffled(source, tmp_path / "out").rows(Cursor())]
    CONTAINERS["jsonl"](tmp_path / "a", table(35))
    order = [row.index for row in shuffled(source, tmp_path / "out", parts=[20, 35]).rows(Cursor())]
    assert order[:20] == before
    assert sorted(order[20:]) == list(range(20, 35))
    assert order[20:] != list(range(20, 35))


def test_rows_that_cannot_be_read_are_told_in_any_order(tmp_path: Path) -> None:
    text = b'{"prompt": "a"}\n\n\n' + b"x" * (LIMIT + 1) + b'\n  {"prompt": "b"}  \nno JSON\n{"prompt": "c"}'
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + text)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + text))
    (tmp_path / "a.csv").write_text('prompt,id\na,1\n"never closed,2\nb,3\n')
    for name, expected in (("a.jsonl", 5), ("a.jsonl.gz", 5), ("a.csv", 3)):
        rows = list(shuffled(tmp_path / name, tmp_path / "out").rows(Cursor()))
        assert len(rows) == expected
        assert values(rows) == {row.index: row.value for row in read_rows(tmp_path / name, Cursor(), LIMIT)}
        assert sum(isinstance(row.value, BadLine) for row in rows) == 1


def test_a_copy_keeps_what_json_has_no_word_for(tmp_path: Path) -> None:
    rows = [{"input_ids": b"\x01\0\0\0", "at": datetime(2026, 1, 31, tzinfo=UTC), "x": 1.5, "ids": [1, 2], "n": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (row,) = shuffled(tmp_path / "a.parquet", tmp_path / "out").rows(Cursor())
    assert row.value == rows[0]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_source_without_rows_has_none(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
    assert list(shuffled(tmp_path / name, tmp_path / "out").rows(Cursor())) == []


def test_a_table_takes_eight_bytes_a_row_and_a_copy_the_rows_as_well(tmp_path: Path) -> None:
    plain = make_table(CONTAINERS["jsonl"](tmp_path / "a", table(1000)), tmp_path / "plain", LIMIT)
    assert (plain.copied, plain.bytes) == (False, 8000)
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == ["shuffle.offsets"]
    copied = make_table(CONTAINERS["zst"](tmp_path / "a", table(1000)), tmp_path / "copied", LIMIT)
    files = {path.name: path.stat().st_size for path in (tmp_path / "copied").iterdir()}
    assert files.keys() == {"shuffle.offsets", "shuffle.rows"}
    assert copied.copied
    assert copied.bytes == sum(files.values())


def test_a_table_that_was_not_finished_is_none(tmp_path: Path) -> None:
    source = CONTAINERS["gz"](tmp_path / "a", table(30))
    shuffled(source, tmp_path / "out")
    make_table(source, tmp_path / "out", LIMIT)  # killed before it was said of what it is
    assert read_table(tmp_path / "out") is None
    shuffled(source, tmp_path / "out")
    (tmp_path / "out" / "shuffle.offsets").write_bytes(b"")
    assert read_table(tmp_path / "out") is None


def test_a_damaged_source_has_no_table(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl.gz"
    source.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 5000)[:-20])
    with pytest.raises(DataError, match="is cut off"):
        make_table(source, tmp_path / "out", LIMIT)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_that_lost_its_rows_since_is_told(tmp_path: Path) -> None:
    source = CONTAINERS["jsonl"](tmp_path / "a", table(30))
    reader = shuffled(source, tmp_path / "out")
    source.write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.jsonl has no row at byte [\d,]+ any more"):
        next(reader.rows(Cursor()))
