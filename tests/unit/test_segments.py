"""What the books make of segments and rejects: torn, foreign, voided, outdone and repeated lines."""

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError, UsageError
from common.records import Head, Written, decode_record, encode_line, sample_id
from common.rejects import Reject, append_rejects, read_rejects
from common.segments import Entry, Fault, count, records, scan
from producer.cli import files
from producer.verify import Finding, Report, verify
from tests.lines import record_line, void_line, write_config, write_segment

SEPARATORS = "\u2028\u2029\x85\x0b\x0c"  # what str.splitlines takes for the end of a line


def indices(output: Path) -> list[int]:
    return [record.index for record in records(output, "A")]


# Lines


def test_a_written_record_reads_back_equal(tmp_path: Path) -> None:
    written = Written(
        dataset="A", index=7, sample_id=sample_id("A", 7), attempt=1_790_000_000_000,
        input_ids=msgspec.Raw(b"[1, 2,3]"), output_ids=[4, 163586], finish_reason="length",
        prompt_tokens=3, completion_tokens=2, cached_tokens=2, latency_seconds=1.25, server="http://s",
        created_at="2026-01-31T12:00:00.000Z", flags=("truncated",), meta={"id": "r\n1"},
    )  # fmt: skip
    write_segment(tmp_path, "w-0.jsonl", encode_line(written))
    (record,) = records(tmp_path, "A")
    assert record.input_ids == [1, 2, 3]
    assert record.output_ids == [4, 163586]
    assert record.meta == {"id": "r\n1"}
    assert (record.sample_id, record.attempt, record.flags) == ("A/7", 1_790_000_000_000, ["truncated"])


@given(data=st.data())
def test_a_segment_cut_at_any_byte_gives_a_prefix_of_its_records_and_at_most_one_torn_line(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    texts = data.draw(st.lists(st.text(max_size=8), min_size=1, max_size=5))
    whole = [record_line(index, meta={"text": text}) for index, text in enumerate(texts)]
    ends = [sum(map(len, whole[: n + 1])) for n in range(len(whole))]
    cut = data.draw(st.integers(0, ends[-1]))
    output = tmp_path_factory.mktemp("cut")
    path = write_segment(output, "w-0.jsonl", b"".join(whole)[:cut])

    expected = sum(end <= cut for end in ends)
    at = ends[expected - 1] if expected else 0
    counted = count(output, "A")
    assert [record.meta["text"] for record in records(output, "A")] == texts[:expected]
    assert [(f.torn, f.line, f.offset, f.end) for f in counted.faults] == (
        [(True, expected + 1, at, cut)] if cut > at else []
    )
    assert counted.ends == {path: at}


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    write_segment(tmp_path, "w-0.jsonl", record_line(0, meta={"text": SEPARATORS}), record_line(1))
    assert [record.meta.get("text") for record in records(tmp_path, "A")] == [SEPARATORS, None]
    append_rejects(tmp_path, "A", [Reject(2, "bad_row", SEPARATORS), Reject(3, "bad_row")])
    assert read_rejects(tmp_path, "A").rows[2].detail == SEPARATORS


def test_a_scan_can_start_in_the_middle(tmp_path: Path) -> None:
    first, second = record_line(0), record_line(1)
    path = write_segment(tmp_path, "w-0.jsonl", first, second, void_line(0))
    entries = list(scan(path, "A", start=len(first)))
    assert [entry.offset for entry in entries] == [len(first), len(first) + len(second)]
    assert [entry.end for entry in entries] == [len(first) + len(second), path.stat().st_size]


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"\x00\x00\x00\n",
        b"no json\n",
        b"\xff\xfe\n",
        b'{"void":{"index":0}}\n',
        b'{"meta":' + b"[" * 10_000 + b"]" * 10_000 + b"}\n",
        record_line(-1),
        record_line(10**9),  # Redis could not hold its bit
        record_line(0, 2**48),
        record_line(0, completion_tokens=10**400),
        record_line(0, dataset="B"),
    ],
)
def test_a_foreign_line_is_a_fault_and_the_lines_around_it_count(tmp_path: Path, line: bytes) -> None:
    first = record_line(1)
    path = write_segment(tmp_path, "w-0.jsonl", first, line, record_line(2), line)
    counted = count(tmp_path, "A")
    assert sorted(counted.entries) == [1, 2]
    assert [(f.line, f.offset, f.torn) for f in counted.faults] == [
        (2, len(first), False),
        (4, 2 * len(first) + len(line), False),
    ]
    # A whole line that is no record is nothing that a writer could still complete.
    assert counted.ends == {path: path.stat().st_size}


# Which record counts


def test_the_highest_attempt_counts_in_whichever_file_it_stands(tmp_path: Path) -> None:
    write_segment(tmp_path, "a-0.jsonl", record_line(0, 5, answer=[50]), record_line(1, 1, answer=[10]))
    write_segment(tmp_path, "b-0.jsonl", record_line(0, 3, answer=[30]), record_line(1, 2, answer=[20, 21]))
    counted = count(tmp_path, "A")
    assert counted.superseded == 2
    assert {record.index: record.output_ids for record in records(tmp_path, "A")} == {0: [50], 1: [20, 21]}


def test_a_void_takes_one_attempt_back_and_an_older_one_counts_again(tmp_path: Path) -> None:
    write_segment(tmp_path, "a-0.jsonl", record_line(0, 1), record_line(1, 1), record_line(2, 1), void_line(2, 1))
    write_segment(tmp_path, "b-0.jsonl", record_line(0, 2), record_line(1, 2), void_line(0, 2))
    counted = count(tmp_path, "A")
    attempts = {index: entry.what.attempt for index, entry in counted.entries.items()}
    assert attempts == {0: 1, 1: 2}
    assert counted.superseded == 3


def test_a_void_may_stand_in_the_writers_next_segment(tmp_path: Path) -> None:
    # "w-10" sorts before "w-9": the void is read before its record.
    write_segment(tmp_path, "w-9.jsonl", record_line(0), record_line(1))
    write_segment(tmp_path, "w-10.jsonl", void_line(0))
    assert indices(tmp_path) == [1]


def test_a_record_that_was_written_twice_counts_once(tmp_path: Path) -> None:
    write_segment(tmp_path, "w-0.jsonl", record_line(0), record_line(1))
    write_segment(tmp_path, "w-1.jsonl", record_line(1), record_line(2))
    assert indices(tmp_path) == [0, 1, 2]
    assert count(tmp_path, "A").superseded == 1


def test_no_folder_means_no_records(tmp_path: Path) -> None:
    assert indices(tmp_path) == []
    assert read_rejects(tmp_path, "A").rows == {}


def test_a_record_that_counts_and_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    first = record_line(0)
    write_segment(tmp_path, "w-0.jsonl", first, record_line(1, input_ids=[-1]))
    with pytest.raises(DataError, match=rf"byte {len(first)} of .*w-0\.jsonl"):
        list(records(tmp_path, "A"))


# Rejects


def test_the_first_reject_of_an_index_counts(tmp_path: Path) -> None:
    append_rejects(tmp_path, "A", [Reject(3, "too_long", "9,000 tokens", "row-3"), Reject(4, "bad_row", id=17)])
    append_rejects(tmp_path, "A", [Reject(3, "bad_row")])
    path = tmp_path / "A" / "rejects.jsonl"
    assert json.loads(path.read_text().splitlines()[0]) == {
        "index": 3, "reason": "too_long", "detail": "9,000 tokens", "id": "row-3",
    }  # fmt: skip
    read = read_rejects(tmp_path, "A")
    assert {index: (row.reason, row.id) for index, row in read.rows.items()} == {
        3: ("too_long", "row-3"),
        4: ("bad_row", 17),
    }
    assert read.faults == []


@given(cut=st.integers(1, 60))
def test_rejects_are_never_appended_to_a_torn_line(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    output = tmp_path_factory.mktemp("rejects")
    append_rejects(output, "A", [Reject(0, "bad_row"), Reject(1, "bad_row", "x" * 40)])
    path = output / "A" / "rejects.jsonl"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    (torn,) = read_rejects(output, "A").faults
    assert torn.torn
    append_rejects(output, "A", [Reject(2, "bad_row")])
    read = read_rejects(output, "A")
    assert read.faults == []
    assert sorted(read.rows) == [0, 2]


def test_a_foreign_line_among_rejects_is_a_fault(tmp_path: Path) -> None:
    path = write_segment(tmp_path, "rejects.jsonl", b'{"index":0,"reason":"x"}\n', b'{"index":-1,"reason":"x"}\n')
    (fault,) = read_rejects(tmp_path, "A").faults
    assert (fault.path, fault.line, fault.offset, fault.torn) == (path, 2, 25, False)


# verify


def only_fault(report: Report) -> Finding:
    (fault,) = report.faults
    return fault


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"no json\n", "not a record: JSON is malformed"),
        (record_line(1, dataset="B"), "a record of dataset 'B'"),
        (record_line(1, completion_tokens=9), "2 output_ids, but completion_tokens is 9"),
        (record_line(1, prompt_tokens=9), "3 input_ids, but prompt_tokens is 9"),
        (record_line(1, prompt=[4, -4]), "not a whole record: Expected `int` >= 0 - at `$.input_ids[1]`"),
        (record_line(1, answer=[-1]), "not a whole record: Expected `int` >= 0 - at `$.output_ids[0]`"),
        (record_line(1, output_ids=["8", 9]), "not a whole record: Expected `int`, got `str`"),
        (record_line(1, finish_reason="abort"), "finish_reason 'abort' is neither stop nor length"),
        (record_line(0), "index 0, attempt 1 a second time"),
        (void_line(0, 2), "void without a record: index 0, attempt 2"),
    ],
)
def test_verify_names_each_fault_by_file_line_and_byte(tmp_path: Path, line: bytes, reason: str) -> None:
    first = record_line(0)
    path = write_segment(tmp_path, "w-0.jsonl", first, line, record_line(2))
    fault = only_fault(verify(tmp_path, ["A"]))
    assert (fault.path, fault.line, fault.byte) == (str(path), 2, len(first))
    assert fault.reason.startswith(reason)


def test_verify_counts_what_the_books_count_also_where_a_line_is_faulty(tmp_path: Path) -> None:
    write_segment(tmp_path, "w-0.jsonl", record_line(0, input_ids="gone"), record_line(1, finish_reason="abort"))
    (books,) = verify(tmp_path, ["A"]).datasets
    heads = [entry.what for entry in count(tmp_path, "A").entries.values()]
    assert books.samples == len(heads) == 2
    assert books.completion_tokens == sum(h.completion_tokens for h in heads if isinstance(h, Head)) == 4


def test_verify_reports_the_books_of_each_dataset(tmp_path: Path) -> None:
    write_segment(
        tmp_path, "w-0.jsonl", record_line(0, 1), record_line(1, 1, finish_reason="length", flags=["truncated"]),
        record_line(2, 1), void_line(2, 1), record_line(0, 2, answer=[1, 2, 3]),
    )  # fmt: skip
    append_rejects(tmp_path, "A", [Reject(2, "bad_row"), Reject(0, "bad_row"), Reject(2, "bad_row")])
    report = verify(tmp_path, ["A", "empty"])
    assert report.faults == []
    books, empty = report.datasets
    assert (books.segments, books.records, books.samples, books.superseded) == (1, 4, 2, 2)
    assert (books.prompt_tokens, books.completion_tokens, books.total_tokens) == (6, 5, 11)
    assert (books.truncated, books.rejects) == (1, 1)
    assert report.notes == ["A: 1 sample with a reject and a record; the record counts"]
    assert (empty.segments, empty.samples, empty.rejects) == (0, 0, 0)


def test_a_torn_last_line_is_a_note(tmp_path: Path) -> None:
    path = write_segment(tmp_path, "w-0.jsonl", record_line(0), record_line(1)[:-1])
    report = verify(tmp_path, ["A"])
    assert report.faults == []
    assert report.datasets[0].samples == 1
    (note,) = report.notes
    assert note.startswith(f"{path}:2 (byte {len(record_line(0))}): torn last line")


def test_the_command_works_without_redis_and_says_so(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    write_segment(tmp_path / "out", "w-0.jsonl", record_line(0))
    result = CliRunner().invoke(files.verify, ["-c", str(config)])
    assert result.exit_code == 0
    assert result.stdout.startswith("A: 1 sample, 5 tokens (3 prompt + 2 completion)")
    assert "the ledger was not compared" in result.stderr


def test_the_command_prints_json_and_ends_with_3_on_faults(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    path = write_segment(tmp_path / "out", "w-0.jsonl", record_line(0), b"?\n")
    result = CliRunner().invoke(files.verify, ["A", "-c", str(config), "--json"])
    assert isinstance(result.exception, DataError)
    assert result.exception.exit_code == 3
    report = json.loads(result.stdout)
    assert report["datasets"][0]["samples"] == 1
    assert report["ledger_compared"] is False
    (fault,) = report["faults"]
    assert (fault["path"], fault["line"], fault["byte"]) == (str(path), 2, len(record_line(0)))


@pytest.mark.parametrize("name", ["nope", "..", ".redis", "../out"])
def test_an_unknown_dataset_is_refused(tmp_path: Path, name: str) -> None:
    config = write_config(tmp_path)
    (tmp_path / "out" / ".redis").mkdir(parents=True)
    result = CliRunner().invoke(files.verify, [name, "-c", str(config)])
    assert isinstance(result.exception, UsageError)
    assert "known are A" in str(result.exception)


def test_the_scan_tells_records_voids_and_faults_apart(tmp_path: Path) -> None:
    path = write_segment(tmp_path, "w-0.jsonl", record_line(0), void_line(0), b"?\n")
    kinds = [type(item.what).__name__ if isinstance(item, Entry) else "fault" for item in scan(path, "A")]
    assert kinds == ["Head", "Voided", "fault"]
    assert isinstance(list(scan(path, "A"))[-1], Fault)
    assert decode_record(record_line(0)).sample_id == "A/0"
