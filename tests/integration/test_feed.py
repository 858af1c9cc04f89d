"""The feed on a real ledger: rows become queued samples or rejects, each once, and no row before it is wanted."""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from common.broker import make_celery
from common.ledger import Ledger, Settled
from common.ledger._keys import keys_of
from common.rejects import read_rejects
from producer.datasets.containers import Cursor
from producer.feed import Feeder
from tests.conftest import PATIENCE_SECONDS
from tests.integration.feed_steps import BAD, MAX_NEW_TOKENS, TOKENIZER, VOCAB_SIZE, Feed, Row, ids, numbered


@pytest.fixture
def feed(tmp_path: Path, valkey: str, ledger: Ledger) -> Feed:
    return Feed(tmp_path, valkey, ledger)


@pytest.fixture(scope="module")
def library() -> Any:
    return AutoTokenizer.from_pretrained(TOKENIZER, local_files_only=True)


def test_rows_are_queued_with_their_ids_and_their_meta(feed: Feed, library: Any) -> None:
    turns = [{"role": "user", "content": "Wie groß?"}, {"role": "assistant", "content": "1,5 m"}]
    feed.write(
        ids(5, 6, 7, id="first"),
        {"messages": turns, "id": "second", "language": "de"},
        "",
        ids(4095),
    )
    feed.register()

    assert feed.feed() == 3

    rendered = library.apply_chat_template(
        turns[:1], tokenize=True, add_generation_prompt=True, return_dict=False, tools=None
    )
    assert feed.prompts() == {0: [5, 6, 7], 1: rendered, 2: [4095]}
    assert [feed.meta(index) for index in range(3)] == [{"id": "first"}, {"id": "second", "language": "de"}, {}]
    assert feed.queued() == [0, 1, 2]
    assert feed.messages() == []  # the keeper sends them, by the shares of all datasets
    assert feed.asked_to_keep() == 1
    assert feed.state().ended
    assert (feed.state().queued, feed.state().rejected) == (3, 0)
    assert feed.reject_lines() == []


def test_a_column_of_text_is_fed(feed: Feed, library: Any) -> None:
    feed.configure(more='columns.prompt = "question"')
    feed.write({"question": "How many?", "answer": "3"})
    feed.register()
    assert feed.feed() == 1
    assert feed.prompts()[0] == library.apply_chat_template(
        [{"role": "user", "content": "How many?"}], tokenize=True, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize(
    ("room", "window", "wanted"), [(10**6, 10, 10), (7, 1000, 7), (1, 1, 1), (0, 1000, 0), (10**6, 300, 300)]
)
def test_no_row_is_read_beyond_the_window_and_the_room(feed: Feed, room: int, window: int, wanted: int) -> None:
    feed.write(*numbered(wanted), *[BAD] * 500)
    feed.register(room=room, window=window)

    assert feed.feed() == wanted
    assert feed.feed() == 0

    assert feed.queued() == list(range(wanted))
    # The next rows are no JSON: had one been looked at, it would be a reject.
    assert (feed.state().queued, feed.state().rejected, feed.reject_lines()) == (wanted, 0, [])
    assert not feed.state().ended
    assert Cursor.parse(feed.state().cursor).index == wanted


def test_what_was_claimed_makes_place_for_the_next_rows(feed: Feed) -> None:
    feed.write(*numbered(12), BAD)
    feed.register(window=8)
    assert feed.feed() == 8
    claimed, _ = feed.ledger.claim("A", "w1", 60, [0, 1, 2])
    assert len(claimed) == 3
    assert feed.feed() == 3
    assert feed.queued() == list(range(3, 11))
    feed.admit(room=9, window=1000)
    assert feed.feed() == 1
    assert (feed.queued(), feed.state().rejected) == (list(range(3, 12)), 0)


def test_rejects_take_no_place_in_the_window(feed: Feed) -> None:
    feed.write(*[row for index in range(6) for row in (BAD, ids(index))], BAD)
    feed.register(window=4)
    assert feed.feed() == 4
    assert feed.queued() == [1, 3, 5, 7]
    assert [line["index"] for line in feed.reject_lines()] == [0, 2, 4, 6]
    assert feed.state().rejected == 4


def test_a_source_ends_with_its_last_row(feed: Feed) -> None:
    feed.write(*numbered(5))
    feed.register(window=5)
    assert feed.feed() == 5
    assert not feed.state().ended  # nothing was asked for beyond the fifth row, so nobody knows
    feed.admit(window=6)
    assert feed.feed() == 0
    assert feed.state().ended
    assert feed.queued() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_source_ends_at_once(feed: Feed, text: str) -> None:
    feed.source.write_text(text)
    feed.register()
    assert feed.feed() == 0
    assert feed.state().ended
    feed.admit()
    assert feed.state().state == "exhausted"


@pytest.mark.parametrize("state", ["paused", "closing", "capped", "halted", "exhausted", "failed"])
def test_only_an_open_dataset_is_fed(feed: Feed, state: str) -> None:
    feed.write(BAD)
    feed.register()
    feed.ledger.transition("A", state, ["open"])
    assert feed.feed() == 0
    assert (feed.state().cursor, feed.state().rejected) == ("", 0)


def test_nothing_is_fed_before_the_model_is_known(feed: Feed) -> None:
    feed.write(*numbered(3))
    feed.register()
    feed.ledger.redis.delete("tokenmill:model")
    assert feed.feed() == 0
    assert feed.state().cursor == ""


def test_bad_rows_are_rejected_by_name_and_cost_the_others_nothing(feed: Feed) -> None:
    user = {"role": "user", "content": "a"}
    broken_call: Row = {"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}
    feed.write(
        "{",
        ids(1),
        ids(id="r2"),
        ids(1, VOCAB_SIZE, id="r3"),
        ids(-1, 5, id=4),
        ids(2**70),
        {"messages": [{"role": "user", "content": [{"type": "image"}]}], "id": "r6"},
        {"messages": [user, broken_call, user], "id": "r7"},
        {"messages": [{"role": "system", "content": "s"}]},
        {"text": "x"},
        {"messages": [user], "tools": "x"},
        {"messages": [user], "uuid": "u11"},
    )
    feed.register()

    assert feed.feed() == 2

    assert feed.queued() == [1, 11]
    assert sorted((line["index"], line["reason"], line["id"]) for line in feed.reject_lines()) == [
        (0, "not_json", None),
        (2, "bad_input_ids", "r2"),
        (3, "id_out_of_range", "r3"),
        (4, "id_out_of_range", 4),
        (5, "id_out_of_range", None),
        (6, "not_text", "r6"),
        (7, "bad_tools", "r7"),
        (8, "no_user_turn", None),
        (9, "no_prompt", None),
        (10, "bad_tools", None),
    ]
    assert all(line["detail"] for line in feed.reject_lines())
    state = feed.state()
    assert state.rejected == 10
    assert state.rejects == Counter(line["reason"] for line in feed.reject_lines())
    assert feed.ledger.done_among("A", range(12)) == set(range(12)) - {1, 11}


@pytest.mark.parametrize("context", [MAX_NEW_TOKENS + 3, None])
def test_prompt_and_answer_must_fit_the_context(feed: Feed, context: int | None) -> None:
    feed.set_model(context)
    feed.write(ids(1, 2), ids(1, 2, 3), ids(1, 2, 3, 4, id="long"))
    feed.register()
    feed.feed()
    rejects = [(line["index"], line["reason"], line["id"]) for line in feed.reject_lines()]
    assert rejects == ([(2, "too_long", "long")] if context else [])
    assert feed.queued() == ([0, 1] if context else [0, 1, 2])


def test_a_row_of_a_megabyte_and_a_half(feed: Feed, library: Any) -> None:
    long = {"messages": [{"role": "user", "content": "lorem ipsum " * 125_000}]}
    feed.write(long, ids(5))
    feed.register()
    assert feed.feed() == 2
    expected = library.apply_chat_template(
        long["messages"], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert len(expected) > 250_000
    assert feed.prompts() == {0: expected, 1: [5]}


def test_a_row_of_a_megabyte_and_a_half_that_is_too_long(feed: Feed) -> None:
    feed.set_model(100_000)
    feed.write({"messages": [{"role": "user", "content": "lorem ipsum " * 125_000}]}, ids(5))
    feed.register()
    assert feed.feed() == 1
    assert [(line["index"], line["reason"]) for line in feed.reject_lines()] == [(0, "too_long")]
    assert (feed.output / "A" / "rejects.jsonl").stat().st_size < 1000


def test_many_long_rows_are_all_read_and_the_source_ends_with_the_last(feed: Feed) -> None:
    feed.write(*["x" * 1_000_000] * 20, ids(5))
    feed.register()
    assert feed.feed() == 1
    assert feed.state().rejected == 20
    assert (feed.queued(), feed.state().ended) == ([20], True)


def test_rejects_are_on_disk_before_they_are_counted(feed: Feed) -> None:
    feed.write(ids(0), BAD, ids(2))
    feed.register()
    feed.output.mkdir()
    in_the_way = feed.output / "A"
    in_the_way.write_text("a file where the dataset's folder should be")

    assert feed.feed() == 0  # nothing could be written, so nothing was counted or queued, and nobody gave up

    state = feed.state()
    assert (state.state, state.cursor, state.rejected, state.queued) == ("open", "", 0, 0)
    assert feed.asked_to_keep() == 0
    in_the_way.unlink()
    assert feed.feed() == 2
    assert (feed.state().rejected, feed.queued()) == (1, [0, 2])
    assert [line["index"] for line in feed.reject_lines()] == [1]


def test_rows_that_are_done_are_skipped_after_a_recovery(feed: Feed) -> None:
    feed.write(*[BAD if index % 10 == 3 else row for index, row in enumerate(numbered(300))])
    feed.register()
    done = {*range(0, 140, 2), 13, 299}
    records = [Settled(index, 1, 2, 5, 0, ()) for index in sorted(done - {13})]
    assert all(feed.ledger.settle("A", records, rebuild=True))
    assert feed.ledger.reject("A", [(13, 0, "not_json")], rebuild=True) == [True]

    fed = feed.feed()

    bad = {index for index in range(300) if index % 10 == 3}
    assert feed.queued() == sorted(set(range(300)) - done - bad)
    assert fed == len(feed.queued())
    # The row that had its reject already gets no second line, and is not counted again.
    assert [line["index"] for line in feed.reject_lines()] == sorted(bad - {13})
    assert (feed.state().rejected, feed.state().done) == (len(bad), len(records))


@pytest.mark.parametrize("lock", ["held", "run out"])
def test_two_feeders_at_once_queue_each_row_once(feed: Feed, lock: str) -> None:
    rows = 2_000
    bad = set(range(5, rows, 50))
    feed.write(*[BAD if index in bad else ids(index % 4000, 7, 8) for index in range(rows)])
    feed.register(window=rows)
    settings = feed.settings
    start = threading.Barrier(3)
    fed: list[int] = []

    def work() -> None:
        app = make_celery("test", settings)
        with closing(app), closing(Ledger.connect(settings.redis_url)) as own:
            feeder = Feeder(settings, app, own)
            start.wait(PATIENCE_SECONDS)
            while not own.snapshot("A").ended:
                fed.append(feeder.feed("A"))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    start.wait(PATIENCE_SECONDS)
    while lock == "run out" and any(thread.is_alive() for thread in threads):
        # As when a feed is stopped for minutes: then the cursor alone keeps the two apart.
        feed.ledger.redis.delete(keys_of("A").feeding)
    for thread in threads:
        thread.join()

    good = sorted(set(range(rows)) - bad)
    assert sum(fed) == len(good)
    assert feed.queued() == good
    assert feed.state().rejected == len(bad)
    assert set(read_rejects(feed.output, "A").rows) == bad
    assert {index: prompt[0] for index, prompt in feed.prompts().items()} == {index: index % 4000 for index in good}


def test_a_feed_that_lost_the_cursor_changes_nothing(feed: Feed) -> None:
    """Another feed took the rows while this one rendered them."""
    feed.write(*numbered(4))
    feed.register()
    assert feed.feed() == 4
    before = feed.state().cursor
    answer = feed.ledger.feed(
        "A", before="", after='{"index":9,"offset":9}', ended=True, rejected=[(8, "x")], samples=[(7, b"y")]
    )
    assert answer is None
    assert (feed.state().cursor, feed.state().rejected, feed.queued()) == (before, 0, [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        pytest.param(
            lambda feed: feed.source.unlink(),
            "its source {} cannot be read: No such file or directory; correct that and start it again",
            id="gone",
        ),
        pytest.param(
            lambda feed: (feed.source.unlink(), feed.source.mkdir()), "{} has no file of rows; known are", id="a folder"
        ),
    ],
)
def test_a_source_that_cannot_be_read_fails_its_dataset(feed: Feed, spoil: Callable[[Feed], None], says: str) -> None:
    feed.write(*numbered(3))
    feed.register()
    spoil(feed)

    assert feed.feed() == 0

    state = feed.state()
    assert state.state == "failed"
    assert state.reason.startswith(says.format(feed.source))
    if feed.source.is_dir():
        feed.source.rmdir()
    feed.write(*numbered(3))
    feed.register()  # what `run` and `enqueue` do
    assert (feed.state().state, feed.state().reason) == ("open", "")
    assert feed.feed() == 3


def test_a_source_that_goes_away_in_the_middle_keeps_what_was_queued(feed: Feed) -> None:
    feed.write(*numbered(10))
    feed.register(window=4)
    assert feed.feed() == 4
    feed.source.unlink()
    feed.admit(window=8)
    assert feed.feed() == 0
    assert (feed.state().state, feed.queued()) == ("failed", [0, 1, 2, 3])
    feed.write(*numbered(10))
    feed.register()
    assert feed.feed() == 6
    assert feed.queued() == list(range(10))


def test_a_tokenizer_that_does_not_load_fails_the_dataset_with_its_reason(feed: Feed, tmp_path: Path) -> None:
    feed.configure(tokenizer=tmp_path / "none")
    feed.write(*numbered(3))
    feed.register()
    assert feed.feed() == 0
    assert feed.state().state == "failed"
    assert feed.state().reason == f"[tokenizer] path {tmp_path / 'none'} is not a folder; name the model's own folder"


def test_the_lock_is_given_back(feed: Feed) -> None:
    feed.write(*numbered(3))
    feed.register()
    feed.feed()
    assert not feed.ledger.redis.exists(keys_of("A").feeding)
    feed.ledger.redis.set(keys_of("A").feeding, "another feed's")
    feed.admit()
    assert feed.feed() == 0
    assert feed.ledger.redis.get(keys_of("A").feeding) == b"another feed's"


def test_what_is_a_datasets_own_holds_for_its_prompts(feed: Feed, library: Any) -> None:
    own = "max_new_tokens = 10\nchat_template_kwargs = { thinking = false }\n[datasets.sampling]\nfit = 'cut'"
    feed.configure(more=own)
    feed.set_model(30)
    turns = [{"role": "user", "content": "Why?"}]
    feed.write({"messages": turns}, ids(*[5] * 17), ids(*[5] * 20), ids(*[5] * 28))
    feed.register()

    assert feed.feed() == 3

    rendered = library.apply_chat_template(
        turns, tokenize=True, add_generation_prompt=True, return_dict=False, thinking=False
    )
    assert feed.prompts()[0] == rendered
    assert [feed.max_new_tokens(index) for index in range(3)] == [None, None, 8]
    assert [(line["index"], line["reason"]) for line in feed.reject_lines()] == [(3, "too_long")]
