"""A file of JSON lines cut into stretches of bytes: each row is in one of them, whole."""

import ctypes
import json
import mmap
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producer.audit.gather import Gathered
from producer.audit.rows import see
from producer.audit.sample import Candidates
from producer.audit.stretches import Stretch, Wanted, _rows, part_of
from producer.datasets.compressed import Text
from producer.datasets.cursor import BadLine, Cursor
from producer.datasets.jsonl import rows
from tests.unit.audit_steps import clean, write

LIMIT = 100
LINES = (
    st.sampled_from([b"", b"\r", b"  ", b"\xef\xbb\xbf{}", b"{}", b'{"a": 1}\r', b" [1] ", b"x" * 99, b"x" * 100])
    | st.binary(max_size=30).map(lambda some: some.replace(b"\n", b""))
    | st.integers(90, 300).map(lambda size: b"y" * size)
)


def cut(path: Path, size: int) -> list[Stretch]:
    whole = path.stat().st_size
    return [Stretch(str(path), start, min(start + size, whole)) for start in range(0, whole, size)]


@settings(max_examples=300, deadline=None)
@given(st.lists(LINES, max_size=12), st.booleans(), st.integers(1, 400))
def test_stretches_have_the_rows_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], ends: bool, size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "stretches.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n" * ends)
    expected = [(row.value, row.size) for row in rows(Text(str(path), ""), Cursor(), LIMIT)]
    found = [row for one in cut(path, size) for row in _rows(one, LIMIT)]
    assert found == expected


def test_rows_before_an_error_are_counted(tmp_path: Path) -> None:
    """The memory of this process is a file; where it shows a file that was cut since, it cannot be read."""
    line, size = b'{"question": "q", "answer": "a"}\n', mmap.PAGESIZE * 200
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n" + line * (size // len(line)) + b" " * (size % len(line)))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as memory:
        file.truncate(size // 2)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        part = part_of(Wanted(Stretch("/proc/self/mem", start + 1, start + size), 10_000, 0, 1.0, 0))
    assert part.rows == (size // 2 - 1) // len(line)
    assert isinstance(part.error, OSError)


def test_a_stretch_within_a_line_has_no_row(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": "q" * 1_000}])
    counts = [len(list(_rows(one, 10_000))) for one in cut(path, 100)]
    assert counts == [1] + [0] * (len(counts) - 1)


def test_a_line_of_too_many_bytes_is_one_row(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"a": 1}, {"question": "q" * 1_000}, {"b": 1}])
    found = [value for one in cut(path, 64) for value, _ in _rows(one, LIMIT)]
    assert [isinstance(one, BadLine) for one in found] == [False, True, False]


def gathered(path: Path, size: int, sample_rows: int = 0) -> Gathered:
    seen = Gathered("rows", sample_rows)
    for one in cut(path, size):
        seen.add(part_of(Wanted(one, 10_000, sample_rows, seen.sample.below, 0)))
    return seen


def plain(seen: Gathered) -> dict[str, Any]:
    """All that was seen, but the sample."""
    found: dict[str, Any] = {}
    for name, value in vars(seen).items():
        if name == "sample":
            continue
        # Also the order in which things came counts, since the first of equals is told.
        found[name] = json.dumps(vars(value), default=str) if hasattr(value, "__dict__") else value
        if isinstance(value, dict):
            found[name] = list(value.items())
    return found


def test_parts_make_what_the_whole_would_have_made(tmp_path: Path) -> None:
    rows = [*clean(60), *clean(20), {"prompt": "p", "output": 1}, {"nothing": 1}, *({"question": "q"} for _ in "abc")]
    path = write(tmp_path / "rows.jsonl", rows)
    whole = plain(gathered(path, 10**9))
    for size in (100, 1_000, 4_096, 20_000):
        assert plain(gathered(path, size)) == whole
    assert whole["rows"] == 85


def test_a_sample_is_of_so_many_rows_from_all_over() -> None:
    sample = Candidates(20)
    for start in range(0, 1_000, 100):
        part = Candidates(20, sample.below, seed=start)
        for index, row in enumerate(clean(100)):
            part.offer(_seen(row), index)
        assert len(part.drawn) < 40
        sample.merge(part, start)
    indices = [one.index for one in sample.rows()]
    assert (len(indices), indices) == (20, sorted(indices))
    assert len({index // 100 for index in indices}) > 5


def test_no_more_is_drawn_than_what_is_below() -> None:
    part = Candidates(20, below=0.1)
    for index, row in enumerate(clean(200)):
        part.offer(_seen(row), index)
    assert all(number < 0.1 for number, _ in part.drawn)
    everyone = Candidates(200)
    for index, row in enumerate(clean(200)):
        everyone.offer(_seen(row), index)
    lowest = sorted(number for number, _ in everyone.drawn)[:20]
    assert sorted(number for number, _ in part.drawn)[:20] == [one for one in lowest if one < 0.1]


def _seen(row: Any) -> Any:
    return see(msgspec.json.encode(row))
