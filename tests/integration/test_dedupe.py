"""Rows with one prompt: the first to be fed is answered, the others are rejects that name it, whatever is lost."""

import json
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import cast

import pytest

from common.broker import make_celery
from common.ledger import Ledger, Settled
from common.ledger._keys import SHARED_PROMPTS, keys_of
from producer.feed import Feeder
from producer.recover import recover, recover_dataset
from tests.integration.feed_steps import TOKENIZER, Feed, answer, begin, ids
from tests.lines import record_line, write_segment


class Feeds(Feed):
    """A dataset A, and a dataset B beside it."""

    def configure(self, tokenizer: Path = TOKENIZER, more: str = "") -> None:
        super().configure(tokenizer, more)
        text = self.config.read_text()
        self.config.write_text(f'{text}[[datasets]]\nname = "B"\npath = "b.jsonl"\n{more}\n')

    def write_b(self, *rows: object) -> None:
        self.source.with_name("b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def feed_b(self) -> int:
        self.ledger.admit("B", room=10**6, window=1000, tokens_per_second=0)
        app = make_celery("test", self.settings)
        with closing(app):
            return Feeder(self.settings, app, self.ledger).feed("B")

    def rejected(self, dataset: str) -> dict[int, str]:
        """The details of the dataset's duplicates, by index."""
        path = self.output / dataset / "rejects.jsonl"
        lines = [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
        assert {line["reason"] for line in lines} <= {"duplicate"}
        return {line["index"]: line["detail"] for line in lines}

    def noted(self) -> dict[bytes, int]:
        """How many prompts each key holds."""
        return {key: self.redis_size(key) for key in (SHARED_PROMPTS.encode(), keys_of("A").prompts_fed.encode())}

    def redis_size(self, key: bytes) -> int:
        size = self.ledger.redis.hlen(key.decode())
        assert isinstance(size, int)
        return size


@pytest.fixture
def feed(tmp_path: Path, valkey: str, ledger: Ledger) -> Feeds:
    feed = Feeds(tmp_path, valkey, ledger)
    feed.configure(more='dedupe = "all"')
    feed.write_b()
    return feed


def only_within(feed: Feeds) -> None:
    feed.configure(more='dedupe = "dataset"')


def test_the_first_is_fed_and_the_others_are_rejects_that_name_it(feed: Feeds) -> None:
    only_within(feed)
    feed.write(ids(1), ids(2), ids(1, id="third"), ids(1, 1), ids(2), ids(1))
    begin(feed)
    assert feed.feed() == 3
    assert feed.prompts() == {0: [1], 1: [2], 3: [1, 1]}
    first = {"index": 2, "reason": "duplicate", "detail": "its prompt is that of A/0", "id": "third"}
    assert feed.reject_lines()[0] == first
    assert feed.rejected("A") == {index: f"its prompt is that of A/{row}" for index, row in ((2, 0), (4, 1), (5, 0))}
    assert (feed.state().rejects, feed.state().ended) == ({"duplicate": 3}, True)


def test_it_holds_from_one_step_of_the_feed_to_the_next(feed: Feeds) -> None:
    only_within(feed)
    feed.write(*(ids(index % 150) for index in range(400)))
    begin(feed)
    assert feed.feed() == 150
    assert feed.queued() == list(range(150))
    assert feed.rejected("A") == {index: f"its prompt is that of A/{index % 150}" for index in range(150, 400)}


def test_datasets_are_compared_only_if_they_say_so(feed: Feeds) -> None:
    feed.write(ids(1), ids(2))
    feed.write_b(ids(3), ids(2), ids(3))
    begin(feed)
    assert (feed.feed(), feed.feed_b()) == (2, 1)
    assert feed.rejected("B") == {
        1: "its prompt is that of A/1",
        2: "its prompt is that of B/0",
    }

    feed.ledger.redis.flushall()
    (feed.output / "B" / "rejects.jsonl").unlink()
    only_within(feed)
    begin(feed)
    assert (feed.feed(), feed.feed_b()) == (2, 2)
    assert feed.rejected("B") == {2: "its prompt is that of B/0"}


@pytest.mark.parametrize("dedupe", ["dataset", "all"])
@pytest.mark.parametrize("died", ["before its rejects were written", "before its rows were queued"])
def test_a_row_that_is_fed_again_is_no_duplicate_of_itself(feed: Feeds, dedupe: str, died: str) -> None:
    feed.configure(more=f'dedupe = "{dedupe}"')
    feed.write(ids(1), ids(2), ids(1))
    begin(feed)
    rejects = feed.output / "A" / "rejects.jsonl"
    if died == "before its rejects were written":
        rejects.mkdir(parents=True)
        assert feed.feed() == 0
        rejects.rmdir()
    else:
        feed.feed()
        feed.ledger.redis.delete(keys_of("A").queued, keys_of("A").payloads, keys_of("A").done)
        feed.ledger.redis.hdel(keys_of("A").state, "cursor", "ended", "fed", "rejected")
        feed.ledger.redis.delete(keys_of("A").rejects)
    assert (feed.state().cursor, feed.state().queued, feed.state().rejected) == ("", 0, 0)
    assert sorted(feed.noted().values()) == [0, 2]

    assert feed.feed() == 2
    assert feed.queued() == [0, 1]
    assert feed.rejected("A") == {2: "its prompt is that of A/0"}
    assert feed.state().rejects == {"duplicate": 1}


@pytest.mark.parametrize("dedupe", ["dataset", "all"])
@pytest.mark.parametrize("how", ["recover", "begin"])
def test_the_records_tell_when_redis_was_lost(feed: Feeds, dedupe: str, how: str) -> None:
    feed.configure(more=f'dedupe = "{dedupe}"')
    feed.write(ids(1), ids(2), ids(1), ids(3), ids(4), ids(2), ids(3))
    feed.write_b(ids(2), ids(9))
    begin(feed)
    feed.admit(window=3)
    assert feed.feed() == 3  # rows 0, 1 and 3; 2 is a duplicate, 4 to 6 are not fed
    answer(feed, [1])
    feed.ledger.redis.flushall()
    if how == "recover":
        recover(feed.settings, feed.ledger)
    begin(feed)
    assert sorted(feed.noted().values()) == [0, 1]  # of the one that is answered; the others are fed again
    feed.feed()
    assert feed.queued() == [0, 3, 4]
    assert feed.rejected("A") == {index: f"its prompt is that of A/{row}" for index, row in ((2, 0), (5, 1), (6, 3))}
    assert feed.feed_b() == (1 if dedupe == "all" else 2)


def test_what_a_worker_answers_after_redis_was_lost_is_known_when_its_row_is_read_again(feed: Feeds) -> None:
    only_within(feed)
    feed.write(ids(1), ids(2), ids(3), ids(1), ids(1))
    begin(feed)
    feed.admit(window=3)
    feed.feed()
    claimed, _ = feed.ledger.claim("A", "w", 60, [0])
    feed.ledger.redis.flushall()
    write_segment(feed.output, "w-1.jsonl", record_line(1, 1, prompt=[2]))
    begin(feed)
    assert feed.ledger.settle("A", [Settled(0, claimed[0].attempt, 1, 2, 0, ())]) == [True]
    feed.feed()
    assert feed.queued() == [2]
    assert feed.rejected("A") == {3: "its prompt is that of A/0", 4: "its prompt is that of A/0"}
    assert (feed.state().done, feed.state().rejected) == (2, 2)


def test_a_recovery_of_one_dataset_keeps_what_the_others_have_fed(feed: Feeds) -> None:
    feed.write(ids(1), ids(2))
    feed.write_b(ids(3))
    begin(feed)
    feed.feed()
    feed.feed_b()
    answer(feed, [0])
    recover_dataset(feed.output, feed.settings.datasets[0], feed.ledger)
    shared = feed.ledger.redis.hvals(SHARED_PROMPTS)
    assert isinstance(shared, list)
    assert sorted(shared) == [b"A 0", b"B 0"]


@pytest.mark.parametrize(("before", "after"), [("", "dataset"), ("", "all"), ("dataset", "all"), ("all", "dataset")])
def test_what_was_fed_before_it_was_turned_on_counts(feed: Feeds, before: str, after: str) -> None:
    feed.configure(more=f'dedupe = "{before}"' if before else "")
    rows = [ids(1), ids(2)]
    feed.write(*rows)
    begin(feed)
    feed.feed()
    answer(feed, [0])
    feed.configure(more=f'dedupe = "{after}"')
    feed.write(*rows, ids(2), ids(1), ids(5))
    begin(feed)
    assert feed.feed() == 1
    assert feed.rejected("A") == {2: "its prompt is that of A/1", 3: "its prompt is that of A/0"}


def test_a_shuffled_dataset_keeps_the_first_of_its_order(feed: Feeds) -> None:
    feed.configure(more='dedupe = "all"\nshuffle = 7')
    feed.write(*(ids(1) for _ in range(10)))
    begin(feed)
    assert feed.feed() == 1
    assert feed.queued() == [9]
    assert set(feed.rejected("A").values()) == {"its prompt is that of A/9"}


def test_a_prompt_that_is_refused_stands_in_nobody_s_way(feed: Feeds) -> None:
    only_within(feed)
    feed.write(ids(5000), ids(5000))  # beyond the vocabulary
    begin(feed)
    feed.feed()
    assert [line["reason"] for line in feed.reject_lines()] == ["id_out_of_range"] * 2


@pytest.mark.parametrize("shared", [False, True])
def test_a_prompt_takes_some_60_bytes_of_redis(ledger: Ledger, shared: bool) -> None:
    def used_bytes() -> int:
        return int(cast("dict[str, int]", ledger.redis.info("memory"))["used_memory"])

    ledger.remember("B1_glaive", [(0, b"")], shared=shared)
    before, prompts = used_bytes(), 50_000
    noted = [(10**6 + index, blake2b(b"%d" % index, digest_size=16).digest()) for index in range(prompts)]
    assert ledger.remember("B1_glaive", noted, shared=shared) == {}
    assert used_bytes() - before < 80 * prompts
