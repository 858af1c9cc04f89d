"""Lines are taken apart and their ids read many at a time: what comes out is what a JSON parser would have found."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from common.errors import DataError
from common.records import Written, encode_line
from common.segments import Entry, Fault, scan
from producer.cli.main import cli
from producer.export.choose import Wanted, choose
from producer.export.id_texts import apart, are_ids, read_ids, together
from producer.export.rows import NOT_A_ROW, row_of, rows_of
from tests.lines import record_line, void_line, write_config, write_segment


def line_of(
    index: int = 0, prompt: tuple[int, ...] = (5, 60, 0), answer: tuple[int, ...] = (7,), **changes: Any
) -> bytes:
    """A line as a worker writes it."""
    fields: dict[str, Any] = {
        "dataset": "A", "index": index, "sample_id": f"A/{index}", "attempt": 3,
        "input_ids": msgspec.Raw(msgspec.json.encode(prompt)), "output_ids": list(answer), "finish_reason": "stop",
        "prompt_tokens": len(prompt), "completion_tokens": len(answer), "cached_tokens": 0, "latency_seconds": 0.5,
        "server": "http://gpu1:30000", "created_at": "2026-01-31T12:00:00.000Z", "flags": ("truncated",),
        "meta": {"id": 7},
    }  # fmt: skip
    return encode_line(Written(**(fields | changes)))


def texts(*lists: list[int]) -> list[bytes]:
    return [",".join(map(str, ids)).encode() for ids in lists]


def test_a_line_as_workers_write_it_is_taken_apart() -> None:
    line = line_of(meta={"id": "ü ]", "labels": ["input_ids", {"a": [1]}]})
    parts = apart(line)
    assert parts is not None
    assert (parts.input_ids, parts.output_ids) == (b"5,60,0", b"7")
    whole = json.loads(line)
    del whole["input_ids"], whole["output_ids"]
    assert json.loads(parts.rest) == whole


@pytest.mark.parametrize(
    "line",
    [
        void_line(1),
        record_line(0),  # with blanks
        line_of(meta={"input_ids": [1]}),
        line_of(sample_id='A"1'),
        line_of()[:60],
        line_of().replace(b"],", b",", 1),
        line_of().replace(b'"output_ids"', b'"outputs"'),
        b'{"meta":' + line_of()[:-1] + b"}\n",
        b"",
    ],
)
def test_other_lines_are_left_to_a_parser(line: bytes) -> None:
    assert apart(line) is None


def test_ids_are_read_one_text_after_another() -> None:
    rng = random.Random(5)
    lists = [[rng.randrange(10 ** rng.randint(1, 8)) for _ in range(rng.randint(1, 40))] for _ in range(300)]
    lists += [[0], [9], [10**8 - 1, 0, 10**8 - 1]]
    ids = read_ids(texts(*lists), [len(one) for one in lists])
    assert ids is not None
    assert ids.dtype == np.int32
    assert ids.tolist() == [one for ids in lists for one in ids]


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ([b"1,2", b"3"], [1, 2]),  # as many in all
        ([b"1,2", b"3"], [2, 2]),
        ([b"1,2", b"3"], [2, 0]),
        ([b"123456789"], [1]),
        ([b"1, 2"], [2]),
        ([b"1,-2"], [2]),
        ([b"1.5"], [1]),
        ([b"1,,2"], [3]),
        ([b"", b"1"], [0, 1]),
        ([b""], [0]),
    ],
)
def test_ids_that_are_not_plain_are_not_read(given: list[bytes], tokens: list[int]) -> None:
    assert read_ids(given, tokens) is None


def test_only_what_json_takes_for_a_list_of_whole_numbers_is_ids() -> None:
    decode = msgspec.json.Decoder(list[int]).decode
    for size in range(6):
        for letters in itertools.product("019, -.e/:", repeat=size):
            text = "".join(letters).encode()
            try:
                plain = bool(decode(b"[" + text + b"]")) and not {b" ", b"-", b".", b"e"} & {bytes([c]) for c in text}
            except msgspec.DecodeError:
                plain = False
            assert are_ids([text]) == plain, text
    assert are_ids([b"1,2", b"3"])
    assert not are_ids([b"1,2", b"", b"3"])


def test_items_are_gathered_to_some_bytes_and_none_is_lost() -> None:
    sizes = [1000, 70_000, 30_000, 30_000, 10_000, 5]
    assert list(together(sizes, int)) == [[1000, 70_000], [30_000, 30_000, 10_000], [5]]
    assert list(together([], int)) == []


def damaged(rng: random.Random, line: bytes) -> bytes:
    """The line with a byte or two changed, gone, or too many."""
    found = bytearray(line[:-1])
    for _ in range(rng.randint(0, 2)):
        at, letter = rng.randrange(len(found)), rng.choice(b'0123456789,[]{}":\\ -.e\0')
        how = rng.randrange(3)
        found[at : at + (how != 1)] = b"" if how == 2 else bytes([letter])
    return bytes(found) + b"\n"


def test_what_is_chosen_of_damaged_lines_is_what_the_books_count(tmp_path: Path) -> None:
    """One line in three is damaged; together they are more than what is read at once."""
    rng = random.Random(11)
    lines: list[bytes] = []
    for n in range(3000):
        line = line_of(n, tuple(rng.choices(range(2000), k=5)), tuple(rng.choices(range(2000), k=9)))
        lines.append(damaged(rng, line) if n % 3 == 0 else line)
    path = write_segment(tmp_path, "a-0.jsonl", *lines)
    found = list(scan(path, "A"))
    books = {entry.what.index: entry for entry in found if isinstance(entry, Entry)}
    faults = sum(isinstance(one, Fault) for one in found)
    chosen = choose(tmp_path, ["A"], Wanted())
    tally = chosen.tallies["A"]
    assert faults > 100
    assert tally["faults"] >= faults  # a damaged finish_reason, which the books do not look at, is one more
    assert len(books) - tally["records"] == tally["faults"] - faults
    taken = {(int(pick["index"]), int(pick["offset"])) for pick in chosen.picks}
    assert taken <= {(index, entry.offset) for index, entry in books.items()}


def test_rows_of_many_lines_are_those_of_each() -> None:
    rng = random.Random(12)
    same = alone = 0
    for n in range(3000):
        lines = [line_of(n), damaged(rng, line_of(n + 1, parent=n, turn=1, turns=2))]
        try:
            json.loads(lines[1])
        except ValueError:  # such a line is not chosen (above)
            continue
        try:
            wanted = [row_of(line) for line in lines]
        except NOT_A_ROW:
            assert rows_of(lines) is None
            continue
        found = rows_of(lines)
        if found is None:
            alone += 1
            continue
        same += 1
        for (row, parent), (other, of_other) in zip(found, wanted, strict=True):
            assert row.input_ids.tolist() == other.input_ids.tolist()
            assert parent == of_other
            for name in ("id", "index", "row_id", "finish_reason", "flags", "spans", "prompt_tokens"):
                assert getattr(row, name) == getattr(other, name)
    assert same > 500
    assert alone > 0


def test_a_record_without_ids_is_an_error_where_equal_ones_are_looked_for(tmp_path: Path) -> None:
    write_segment(tmp_path, "a-0.jsonl", line_of(0), line_of(1).replace(b'"output_ids"', b'"outputs"'))
    with pytest.raises(DataError, match=r"at byte \d+ of .*a-0.jsonl cannot be read"):
        choose(tmp_path, ["A"], Wanted(dedupe=True))


def test_an_export_is_the_same_however_its_lines_are_spelt(tmp_path: Path) -> None:
    """As workers write them, or with blanks, so that each is parsed as JSON."""
    lines = [line_of(n, tuple(range(n % 7 + 1)), tuple(range(n, 2 * n + 1))) for n in range(200)]
    files: dict[str, list[bytes]] = {}
    for place, spelt in (("x", lines), ("y", [json.dumps(json.loads(line)).encode() + b"\n" for line in lines])):
        write_segment(tmp_path / place / "out", "a-0.jsonl", *spelt)
        write_config(tmp_path / place)
        config = str(tmp_path / place / "tokenmill.toml")
        for layout in ("ids", "parquet", "arrow"):
            folder = tmp_path / place / layout
            options = ["--format", layout, "--dedupe", "--shuffle", "3", "--eval", "0.1"]
            done = CliRunner().invoke(cli, ["export", "-c", config, "-o", str(folder), *options])
            assert done.exit_code == 0, done.exception
            for path in folder.rglob("*"):
                if path.is_file() and path.name != "manifest.json":
                    files.setdefault(f"{layout} {path.relative_to(folder)}", []).append(path.read_bytes())
    assert len(files) > 8
    assert all(len(found) == 2 and found[0] == found[1] for found in files.values())
