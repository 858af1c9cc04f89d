"""A source that is replaced or grows between two lives of a dataset: each row keeps its index, or nothing is read."""

import gzip
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from common.errors import UsageError
from common.ledger import Ledger, Settled
from producer.cli import operate
from producer.datasets.standard_input import keep_standard_input
from producer.recover import recover
from producer.sources import read_source
from tests.integration.feed_steps import BAD, Feed, Row, answer, begin, first_ids, ids, numbered


@pytest.fixture
def feed(tmp_path: Path, valkey: str, ledger: Ledger) -> Feed:
    return Feed(tmp_path, valkey, ledger)


def test_what_was_read_is_on_disk_before_the_rows_are_queued(feed: Feed) -> None:
    feed.write(*numbered(300))
    begin(feed)
    shutil.rmtree(feed.output / "A")
    feed.output.joinpath("A").write_text("a file where the dataset's folder should be")
    assert feed.feed() == 0
    assert (feed.queued(), feed.state().cursor, feed.state().state) == ([], "", "open")
    feed.output.joinpath("A").unlink()
    assert feed.feed() == 300
    seen = read_source(feed.output, "A")
    assert seen is not None
    assert (seen.rows, seen.bytes) == (300, feed.source.stat().st_size)


def test_a_source_that_is_replaced_while_the_job_runs_fails_its_dataset_until_it_is_back(feed: Feed) -> None:
    rows = numbered(20)
    feed.write(*rows)
    begin(feed)
    feed.admit(window=5)
    assert feed.feed() == 5
    feed.write(ids(9), *rows)
    feed.admit(window=10)
    assert feed.feed() == 0
    state = feed.state()
    assert (state.state, feed.queued()) == ("failed", list(range(5)))
    assert f"its source {feed.source} was replaced after it was read: its first " in state.reason

    feed.write(*rows)
    assert begin(feed) == []
    assert feed.feed() == 15
    assert first_ids(feed) == {index: index for index in range(20)}


@pytest.mark.parametrize("lost", ["nothing", "Redis", "Redis, and it was recovered"])
def test_a_replaced_source_is_refused_whatever_was_lost(feed: Feed, lost: str) -> None:
    rows = numbered(20)
    feed.write(*rows)
    begin(feed)
    feed.feed()
    answer(feed, list(range(8)))
    if lost != "nothing":
        feed.ledger.redis.flushall()
    if lost == "Redis, and it was recovered":
        recover(feed.settings, feed.ledger)

    feed.write(*rows[1:])
    with pytest.raises(UsageError, match=r"a\.jsonl of dataset A: it has .* --accept-changes"):
        begin(feed)
    feed.write(*rows)
    assert begin(feed) == []
    feed.feed()
    assert first_ids(feed) == {index: index for index in range(8, 20)}


@pytest.mark.parametrize("lost", ["nothing", "Redis"])
def test_an_accepted_source_gives_all_rows_that_are_not_done(feed: Feed, lost: str) -> None:
    feed.write(*numbered(10), BAD)
    begin(feed)
    assert feed.feed() == 10
    answer(feed, [0, 1, 2])
    in_flight, _ = feed.ledger.claim("A", "w", 60, [3])
    if lost == "Redis":
        feed.ledger.redis.flushall()

    feed.write(*(ids(1000 + index) for index in range(12)))
    (note,) = begin(feed, accept=True)
    assert note.startswith("A: its source was replaced (its first ")
    feed.feed()
    # Rows 0 to 2 have a record, 10 has a reject. No prompt of the old file is left, whoever had it in hand.
    assert first_ids(feed) == {index: 1000 + index for index in (3, 4, 5, 6, 7, 8, 9, 11)}
    assert (feed.state().done, feed.state().rejected) == (3, 1)
    late = Settled(3, in_flight[0].attempt, 3, 2, 1, ())
    if lost == "nothing":
        (claimed,), _ = feed.ledger.claim("A", "w", 60, [3])
        assert claimed.attempt > in_flight[0].attempt
        assert feed.ledger.settle("A", [late]) == [False]
    # It is the source from now on.
    assert begin(feed) == []


def test_a_replaced_source_is_not_accepted_while_workers_live(feed: Feed) -> None:
    feed.write(*numbered(10))
    begin(feed)
    feed.feed()
    before = feed.state()
    feed.write(*numbered(10)[::-1])
    feed.ledger.heartbeat("generate@host", {"kind": "worker", "limit": 4})
    with pytest.raises(UsageError, match="was replaced, and generate@host may have its old rows in flight; stop them"):
        begin(feed, accept=True)
    assert (feed.state().queued, feed.state().cursor) == (before.queued, before.cursor)
    feed.ledger.heartbeat("generate@host", None)
    assert len(begin(feed, accept=True)) == 1


@pytest.mark.parametrize("state", ["exhausted", "open", "capped"])
def test_rows_that_were_appended_are_read_on(feed: Feed, state: str) -> None:
    rows: list[Row] = numbered(10)
    feed.write(*rows)
    begin(feed)
    feed.feed()
    answer(feed, list(range(10)))
    feed.ledger.transition("A", state, ["open"], "why")
    assert feed.state().ended
    before = feed.source.stat().st_size

    feed.write(*rows, ids(77, 1), ids(78, 1))
    assert begin(feed) == [f"A: its source has grown from {before:,} to {feed.source.stat().st_size:,} bytes"]
    assert feed.state().state == ("capped" if state == "capped" else "open")
    feed.ledger.transition("A", "open", ["capped"])
    assert feed.feed() == 2
    assert first_ids(feed) == {10: 77, 11: 78}
    assert begin(feed) == []


@pytest.mark.parametrize(
    "touch", [lambda path: path.touch(), lambda path: path.write_bytes(path.read_bytes())], ids=["time", "written anew"]
)
def test_a_source_that_was_only_touched_is_no_matter(feed: Feed, touch: Callable[[Path], object]) -> None:
    feed.write(*numbered(10))
    begin(feed)
    feed.feed()
    touch(feed.source)
    assert begin(feed) == []
    assert (feed.queued(), feed.state().state) == (list(range(10)), "open")


# Other kinds than one file of JSON lines


def configure(feed: Feed, path: str) -> None:
    feed.configure()
    feed.config.write_text(feed.config.read_text().replace('"a.jsonl"', f'"{path}"'))


def lines(rows: list[Row]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def test_a_folder_of_shards_of_several_kinds_is_fed_as_one_source(feed: Feed) -> None:
    configure(feed, "shards")
    folder = feed.source.parent / "shards"
    folder.mkdir()
    rows = numbered(700)
    (folder / "s-1.jsonl").write_bytes(lines(rows[:200]))
    (folder / "s-2.jsonl.gz").write_bytes(gzip.compress(lines(rows[200:500])))
    pq.write_table(pa.Table.from_pylist(rows[500:600]), folder / "s-10.parquet")
    begin(feed)
    assert feed.feed() == 600
    assert first_ids(feed) == {index: index for index in range(600)}
    assert begin(feed) == []

    (folder / "s-11.json").write_text(json.dumps(rows[600:]))
    (note,) = begin(feed)
    assert note.startswith("A: its source has grown from ")
    assert feed.feed() == 100
    assert first_ids(feed) == {index: index for index in range(700)}

    (folder / "s-3.jsonl").write_bytes(lines(rows[:1]))
    with pytest.raises(UsageError, match=r"shards of dataset A: its file 4 was s-11\.json and is s-10\.parquet; put"):
        begin(feed)


def test_a_compressed_file_that_is_cut_off_loses_no_row_before_its_end(feed: Feed) -> None:
    configure(feed, "a.jsonl.gz")
    source = feed.source.with_suffix(".jsonl.gz")
    whole = gzip.compress(lines(numbered(3000)))
    source.write_bytes(whole[: len(whole) // 2])
    begin(feed)
    feed.admit(window=5000)
    feed.feed()
    state, queued = feed.state(), len(feed.queued())
    assert 1000 < queued < 2000
    assert first_ids(feed) == {index: index for index in range(queued)}
    assert (state.state, state.ended) == ("failed", False)
    assert f"{source} is cut off: it ends at byte {len(whole) // 2:,} within a compressed stream" in state.reason

    source.write_bytes(whole)
    (note,) = begin(feed, accept=True)
    assert "its source was replaced" in note
    feed.admit(window=5000)
    assert feed.feed() == 3000
    assert first_ids(feed) == {index: index for index in range(3000)}


def test_standard_input_is_fed_from_its_copy(feed: Feed) -> None:
    configure(feed, "-")
    keep_standard_input(feed.output, feed.settings.datasets[0], io.BytesIO(lines(numbered(10))))
    assert begin(feed) == []
    assert feed.feed() == 10
    assert begin(feed) == []


def test_enqueue_refuses_before_it_asks_anyone(feed: Feed) -> None:
    feed.write(*numbered(10))
    begin(feed)
    feed.feed()
    feed.write(*numbered(10)[1:])
    result = CliRunner().invoke(operate.enqueue, ["-c", str(feed.config)])  # no server is configured that answers
    assert isinstance(result.exception, UsageError)
    assert "a source is not the one that was read before" in str(result.exception)


def test_an_empty_source_that_gets_rows_is_read(feed: Feed) -> None:
    feed.write()
    begin(feed)
    feed.feed()
    feed.ledger.transition("A", "exhausted", ["open"])
    feed.write(*numbered(2))
    assert len(begin(feed)) == 1
    assert feed.feed() == 2


def test_a_file_of_ours_that_cannot_be_read_fails_the_dataset(feed: Feed) -> None:
    feed.write(*numbered(10))
    begin(feed)
    feed.admit(window=5)
    feed.feed()
    (feed.output / "A" / "source.log").write_text("?")
    feed.admit()
    assert feed.feed() == 0
    assert feed.state().state == "failed"
    assert "source.log has no whole line" in feed.state().reason
