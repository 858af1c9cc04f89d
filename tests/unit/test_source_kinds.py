"""What is a change, and what is growth, for each kind of source."""

import json
import shutil
from pathlib import Path

import pytest

from producer.datasets.containers import Cursor, read_rows
from producer.sources import Source, look
from tests.containers import CONTAINERS, decoded, lines, table

ROWS = table(60)
GROWING = ["jsonl", "jsonl named .json", "bare lists", "array", "indented array", "documents", "csv"]
WHOLE = ["gz", "zst", "csv.gz", "array.zst", "parquet", "feather"]


def make(folder: Path, container: str, rows: list[dict[str, str]]) -> Path:
    return CONTAINERS[container](folder / "rows", rows)


def after(path: Path, index: int) -> Cursor:
    """The cursor behind row `index`; the last one for -1."""
    return [row.after for row in read_rows(path, Cursor())][index]


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("read", [0, 30, 59])
def test_a_source_that_is_as_it_was_or_was_copied_has_not_changed(tmp_path: Path, container: str, read: int) -> None:
    path = make(tmp_path, container, ROWS)
    seen = look(path, after(path, read))
    assert (seen.rows, seen.change(path)) == (read + 1, None)
    copy = tmp_path / f"copy{path.suffix}"
    (shutil.copytree if path.is_dir() else shutil.copyfile)(path, copy)
    assert seen.change(copy) is None


@pytest.mark.parametrize("container", GROWING)
@pytest.mark.parametrize("read", [30, 59])
def test_rows_may_be_appended_to_text(tmp_path: Path, container: str, read: int) -> None:
    path = make(tmp_path, container, ROWS)
    cursor = after(path, read)
    seen = look(path, cursor)
    make(tmp_path, container, [*ROWS, *table(5)])
    assert seen.change(path) is None
    assert look(path, cursor).size > seen.size
    rest = [decoded(row.value) for row in read_rows(path, cursor)]
    assert rest == [*ROWS, *table(5)][read + 1 :]


@pytest.mark.parametrize("container", WHOLE)
def test_what_is_replaced_whole_is_compared_whole(tmp_path: Path, container: str) -> None:
    path = make(tmp_path, container, ROWS)
    seen = look(path, after(path, 30))
    size = path.stat().st_size
    make(tmp_path, container, [*ROWS, *table(5)])
    assert seen.change(path) == f"it has {path.stat().st_size:,} bytes, and had {size:,} when it was read"
    make(tmp_path, container, ROWS)
    assert seen.change(path) is None
    data = bytearray(path.read_bytes())
    data[size // 2] ^= 1
    path.write_bytes(data)
    assert seen.change(path) == f"its {size:,} bytes are others"


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_row_before_the_first_is_a_change(tmp_path: Path, container: str) -> None:
    path = make(tmp_path, container, ROWS)
    seen = look(path, after(path, 40))
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(tmp_path, container, [{"id": "new", "prompt": "x"}, *ROWS])
    assert seen.change(path) is not None


def test_lines_that_follow_a_file_that_was_one_array_are_a_change(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"a": 1}, {"a": 2}]\n')
    seen = look(path, after(path, -1))
    with path.open("a") as file:
        file.write('[{"a": 3}]\n')
    assert seen.change(path) == "it was read as array, and is jsonl"


def test_a_source_that_was_written_down_before_there_were_kinds_is_known(tmp_path: Path) -> None:
    path = make(tmp_path, "jsonl", ROWS)
    now = look(path, after(path, 30))
    text = json.dumps({key: getattr(now, key) for key in ("rows", "bytes", "size", "first_sha256", "last_sha256")})
    import msgspec

    seen = msgspec.json.decode(text, type=Source)
    assert seen.change(path) is None
    path.write_bytes(lines(ROWS[1:]))
    assert seen.change(path) is not None


# Shards


def shard(folder: Path, name: str, rows: list[dict[str, str]]) -> None:
    (folder / name).write_bytes(lines(rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in (1, 3, 5):
        shard(tmp_path, f"s{number}.jsonl", ROWS[:20])
    return tmp_path


def test_a_shard_behind_the_last_is_growth(folder: Path) -> None:
    cursor = after(folder, -1)
    seen = look(folder, cursor)
    assert (seen.rows, seen.file, seen.name) == (60, 2, "s5.jsonl")
    shard(folder, "s10.jsonl", ROWS[:7])
    assert seen.change(folder) is None
    assert look(folder, cursor).size > seen.size
    assert [row.index for row in read_rows(folder, cursor)] == list(range(60, 67))


def test_rows_behind_those_of_the_last_shard_are_growth(folder: Path) -> None:
    cursor = after(folder, -1)
    seen = look(folder, cursor)
    shard(folder, "s5.jsonl", ROWS[:22])
    assert seen.change(folder) is None
    assert [decoded(row.value) for row in read_rows(folder, cursor)] == ROWS[20:22]


def test_a_shard_that_was_not_read_may_come_go_and_change(folder: Path) -> None:
    seen = look(folder, after(folder, 25))
    shard(folder, "s4.jsonl", ROWS[:1])
    (folder / "s5.jsonl").unlink()
    assert seen.change(folder) is None


@pytest.mark.parametrize(
    ("name", "rows", "says"),
    [
        ("s0.jsonl", 1, "its file 2 was s3.jsonl and is s1.jsonl"),
        ("s2.jsonl", 1, "its file 2 was s3.jsonl and is s2.jsonl"),
        ("s1.jsonl", 21, "one of the 1 files before s3.jsonl, which were read to their end, is another"),
        ("s1.jsonl", 19, "one of the 1 files before s3.jsonl, which were read to their end, is another"),
        ("s3.jsonl", 1, "its file s3.jsonl: it has "),
        ("s1.jsonl", None, "its file 2 was s3.jsonl and is s5.jsonl"),
        ("s3.jsonl", None, "its file 2 was s3.jsonl and is s5.jsonl"),
    ],
)
def test_what_moves_a_row_that_was_read_is_a_change(folder: Path, name: str, rows: int | None, says: str) -> None:
    seen = look(folder, after(folder, 25))
    if rows is None:
        (folder / name).unlink()
    else:
        shard(folder, name, ROWS[:rows])
    change = seen.change(folder)
    assert change is not None
    assert change.startswith(says)


def test_shards_that_are_gone_are_a_change(folder: Path) -> None:
    seen = look(folder, after(folder, -1))
    (folder / "s1.jsonl").unlink()
    assert seen.change(folder) == "it has 2 files, of which 3 were read"
