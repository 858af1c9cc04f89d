"""A shuffled dataset and one with a limit, through the feed and a real Valkey: the order survives whatever is lost."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from common.errors import DataError, UsageError
from common.ledger import Ledger
from common.turns import TURNS
from producer.datasets.permutation import Permutation
from producer.recover import recover
from producer.sources import read_source
from tests.integration.feed_steps import BAD, Feed, answer, begin, first_ids, ids, numbered

SEED = 5


@pytest.fixture
def feed(tmp_path: Path, valkey: str, ledger: Ledger) -> Feed:
    feed = Feed(tmp_path, valkey, ledger)
    feed.configure(more=f"shuffle = {SEED}")
    return feed


def order(size: int, seed: int = SEED) -> list[int]:
    return [Permutation(size, seed)[step] for step in range(size)]


def feed_up_to(feed: Feed, queued: int) -> None:
    """Feed until so many samples are queued."""
    feed.admit(window=queued)
    feed.feed()
    assert len(feed.queued()) == queued


def test_rows_are_queued_in_the_order_of_the_seed_under_their_own_index(feed: Feed) -> None:
    feed.write(*numbered(300))
    (note,) = begin(feed)
    assert note.startswith("A: its 300 rows were counted for the shuffle in ")
    assert note.endswith(f"takes 2,400 bytes in {feed.output / 'A'}")
    feed_up_to(feed, 7)
    assert feed.ledger.unsent("A", 100) == order(300)[:7]
    feed_up_to(feed, 200)
    feed_up_to(feed, 300)
    assert feed.ledger.unsent("A", 1000) == order(300)
    assert first_ids(feed) == {index: index for index in range(300)}
    feed.admit()
    assert feed.feed() == 0
    assert feed.state().ended
    assert begin(feed) == []


def test_a_row_that_is_no_prompt_is_rejected_under_its_own_index(feed: Feed) -> None:
    rows = numbered(40)
    rows[11] = BAD
    feed.write(*rows)
    begin(feed)
    assert feed.feed() == 39
    assert [line["index"] for line in feed.reject_lines()] == [11]
    assert 11 not in feed.queued()


@pytest.mark.parametrize("lost", ["Redis", "Redis, and it was recovered", "the table", "Redis and the table"])
def test_the_order_survives_what_is_lost(feed: Feed, lost: str) -> None:
    feed.write(*numbered(50))
    begin(feed)
    feed_up_to(feed, 20)
    answer(feed, order(50)[:8])
    if "Redis" in lost:
        feed.ledger.redis.flushall()
    if "recovered" in lost:
        recover(feed.settings, feed.ledger)
    if "table" in lost:
        for path in (feed.output / "A").glob("shuffle.*"):
            path.unlink()

    begin(feed)
    feed.feed()
    assert feed.ledger.unsent("A", 100) == order(50)[8:]
    assert first_ids(feed) == {index: index for index in order(50)[8:]}


def test_without_its_table_a_dataset_fails_with_what_makes_it(feed: Feed) -> None:
    feed.write(*numbered(50))
    begin(feed)
    (feed.output / "A" / "shuffle.json").unlink()
    assert feed.feed() == 0
    assert feed.state().state == "failed"
    assert "`tokenmill run` and `tokenmill enqueue A` make it" in feed.state().reason
    (note,) = begin(feed)
    assert "were counted for the shuffle" in note
    assert feed.feed() == 50


def test_another_order_is_refused_and_accepted_as_another_source_is(feed: Feed) -> None:
    feed.write(*numbered(50))
    begin(feed)
    feed_up_to(feed, 20)
    answer(feed, order(50)[:8])

    feed.configure(more="shuffle = 6")
    with pytest.raises(UsageError, match=r"in another order \(it was shuffle = 5, and is shuffle = 6\); put"):
        begin(feed)
    notes = begin(feed, accept=True)
    assert "A: its order is another (it was shuffle = 5, and is shuffle = 6)" in notes[0]
    feed.feed()
    assert feed.ledger.unsent("A", 100) == [index for index in order(50, 6) if index not in order(50)[:8]]

    feed.configure()
    with pytest.raises(UsageError, match=r"it was shuffle = 6, and is that of the source"):
        begin(feed)
    begin(feed, accept=True)
    feed.feed()
    assert feed.ledger.unsent("A", 100) == sorted(set(range(50)) - set(order(50)[:8]))


def test_rows_that_were_appended_come_behind_the_others(feed: Feed) -> None:
    feed.write(*numbered(30))
    begin(feed)
    feed_up_to(feed, 10)
    feed.write(*numbered(45))
    grown, counted = begin(feed)
    assert grown.startswith("A: its source has grown from ")
    assert counted.startswith("A: its 45 rows were counted ")
    feed.feed()
    expected = order(30) + [30 + index for index in order(15)]
    assert feed.ledger.unsent("A", 100) == expected
    seen = read_source(feed.output, "A")
    assert seen is not None
    assert (seen.rows, seen.parts, seen.shuffle) == (45, [30, 45], SEED)

    # It had ended, and grows again; and all of that order stands when Redis is lost.
    feed.write(*numbered(46))
    begin(feed)
    feed.feed()
    assert feed.ledger.unsent("A", 100) == [*expected, 45]
    feed.ledger.redis.flushall()
    begin(feed)
    feed.feed()
    assert feed.ledger.unsent("A", 100) == [*expected, 45]


def test_a_source_that_is_replaced_is_refused_whichever_rows_were_fed(feed: Feed) -> None:
    feed.write(*numbered(50))
    begin(feed)
    feed_up_to(feed, 1)
    changed = numbered(50)
    changed[49] = ids(3999, 7)  # it was not fed, but may have been
    feed.write(*changed)
    feed.admit()
    assert feed.feed() == 0
    assert "was replaced after it was read" in feed.state().reason
    with pytest.raises(UsageError, match="--accept-changes"):
        begin(feed)
    assert len(begin(feed, accept=True)) == 2
    feed.feed()
    assert feed.ledger.unsent("A", 100) == order(50)
    assert first_ids(feed)[49] == 3999


def test_a_source_without_random_access_is_copied_once(feed: Feed) -> None:
    feed.write(*numbered(300))
    source = feed.source.with_suffix(".jsonl.gz")
    source.write_bytes(gzip.compress(feed.source.read_bytes()))
    feed.config.write_text(feed.config.read_text().replace('"a.jsonl"', '"a.jsonl.gz"'))
    (note,) = begin(feed)
    copy = feed.output / "A" / "shuffle.rows"
    assert note.startswith("A: its 300 rows were copied for the shuffle in ")
    assert f"takes {2400 + copy.stat().st_size:,} bytes in" in note
    assert feed.feed() == 300
    assert feed.ledger.unsent("A", 1000) == order(300)
    assert first_ids(feed) == {index: index for index in range(300)}
    assert begin(feed) == []
    source.write_bytes(gzip.compress(feed.source.read_bytes() * 2))
    with pytest.raises(UsageError, match="--accept-changes"):
        begin(feed)


def test_a_folder_of_shards_is_shuffled_over_all_of_them(feed: Feed) -> None:
    folder = feed.source.parent / "shards"
    folder.mkdir()
    rows = numbered(60)
    for number in range(3):
        part = rows[20 * number : 20 * number + 20]
        (folder / f"s-{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    feed.config.write_text(feed.config.read_text().replace('"a.jsonl"', '"shards"'))
    begin(feed)
    feed.feed()
    assert feed.ledger.unsent("A", 100) == order(60)
    assert first_ids(feed) == {index: index for index in range(60)}


def test_a_damaged_source_is_refused_before_a_row_is_fed(feed: Feed) -> None:
    source = feed.source.with_suffix(".jsonl.gz")
    feed.write(*numbered(3000))
    source.write_bytes(gzip.compress(feed.source.read_bytes())[:-100])
    feed.config.write_text(feed.config.read_text().replace('"a.jsonl"', '"a.jsonl.gz"'))
    with pytest.raises(DataError, match="is cut off"):
        begin(feed)
    assert feed.ledger.datasets() == []


# Limit


@pytest.mark.parametrize("seed", [None, SEED])
def test_a_limit_ends_the_dataset_and_raising_it_goes_on(feed: Feed, seed: int | None) -> None:
    shuffle = "" if seed is None else f"shuffle = {seed}\n"
    expected = list(range(40)) if seed is None else order(40)
    feed.configure(more=f"{shuffle}limit = 12")
    feed.write(*numbered(40))
    begin(feed)
    assert feed.feed() == 12
    assert feed.ledger.unsent("A", 100) == expected[:12]
    assert feed.state().ended
    assert feed.feed() == 0
    feed.ledger.transition("A", "exhausted", ["open"])
    assert begin(feed) == []
    assert (feed.state().state, feed.state().ended) == ("exhausted", True)

    feed.configure(more=f"{shuffle}limit = 30")
    begin(feed)
    assert feed.state().state == "open"
    assert feed.feed() == 18
    assert feed.ledger.unsent("A", 100) == expected[:30]
    feed.configure(more=f"{shuffle}limit = 3")  # what is queued stays
    begin(feed)
    assert feed.feed() == 0
    assert len(feed.queued()) == 30
    feed.configure(more=shuffle)
    begin(feed)
    assert feed.feed() == 10
    assert feed.ledger.unsent("A", 100) == expected


def test_a_limit_counts_rejected_rows_and_stands_after_redis_was_lost(feed: Feed) -> None:
    feed.configure(more="limit = 5")
    feed.write(ids(0, 7), BAD, *numbered(40)[2:])
    begin(feed)
    assert feed.feed() == 4
    answer(feed, [0, 2])
    feed.ledger.redis.flushall()
    begin(feed)
    assert feed.feed() == 2
    assert feed.queued() == [3, 4]
    assert feed.state().ended


def test_a_raised_limit_goes_on_though_the_one_who_raised_it_was_killed(feed: Feed) -> None:
    feed.configure(more="limit = 5")
    feed.write(*numbered(9))
    begin(feed)
    feed.feed()
    feed.configure(more="limit = 7")
    feed.ledger.register(feed.settings.datasets[0])  # and no more
    begin(feed)
    assert feed.feed() == 2


def test_a_source_of_one_row_less_than_its_table_is_told(feed: Feed) -> None:
    feed.write(*numbered(20))
    begin(feed)
    feed.write(*numbered(19))
    assert feed.feed() == 0
    assert feed.state().state == "failed"
    shutil.rmtree(feed.output / "A")
    begin(feed)
    assert feed.feed() == 19


def test_conversations_are_shuffled_by_their_rows(feed: Feed) -> None:
    feed.configure(more=f'turns = "all"\nshuffle = {SEED}\nlimit = 4')
    feed.write(*({"messages": [{"role": "user", "content": f"What is {row}?"}]} for row in range(9)))
    begin(feed)
    assert feed.feed() == 4
    assert feed.queued() == sorted(TURNS * row for row in order(9)[:4])
