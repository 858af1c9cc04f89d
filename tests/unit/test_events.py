"""events.jsonl: one line an event, whoever writes, and readable whatever died within a write."""

import threading
from pathlib import Path

import msgspec
import pytest

from common.events import EVENTS, all_events, append_event, last_events, make_event, operator, server_changes
from common.ledger import Event


def test_an_event_is_one_json_line_with_the_promised_fields(tmp_path: Path) -> None:
    append_event(tmp_path / "out", make_event("paused", "3 answers in flight", "A"))
    (line,) = (tmp_path / "out" / EVENTS).read_text().splitlines()
    told = msgspec.json.decode(line)
    assert list(told) == ["at", "who", "what", "dataset", "detail"]
    assert told["at"].endswith("Z")
    assert told["who"] == operator()
    assert "@" in told["who"]
    assert (told["what"], told["dataset"], told["detail"]) == ("paused", "A", "3 answers in flight")


def test_an_event_without_a_dataset_says_null(tmp_path: Path) -> None:
    append_event(tmp_path, make_event("workers_added", "w2@host", who="ann@host"))
    assert msgspec.json.decode((tmp_path / EVENTS).read_bytes())["dataset"] is None


def test_the_last_ones_are_read_from_the_end(tmp_path: Path) -> None:
    assert last_events(tmp_path, 5) == []
    for number in range(300):
        append_event(tmp_path, Event("2026-01-31T12:00:00.000Z", "keeper", "capped", "A", str(number)))
    assert [event.detail for event in last_events(tmp_path, 3)] == ["297", "298", "299"]
    assert last_events(tmp_path, 0) == []
    assert len(last_events(tmp_path, 1000)) == 300


def test_a_long_file_is_read_from_its_last_mebibyte(tmp_path: Path) -> None:
    line = msgspec.json.encode(Event("2026-01-31T12:00:00.000Z", "keeper", "halted", "A", "x" * 3000)) + b"\n"
    (tmp_path / EVENTS).write_bytes(line * 1000)
    assert len(last_events(tmp_path, 1000)) == 2**20 // len(line)


@pytest.mark.parametrize("torn", [b'{"at":"2026-01', b"\xff\xfe", b"[]\n"])
def test_a_torn_line_costs_no_other(tmp_path: Path, torn: bytes) -> None:
    append_event(tmp_path, make_event("paused", "first", "A"))
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(torn)
    append_event(tmp_path, make_event("resumed", "second", "A"))
    assert [event.detail for event in all_events(tmp_path)] == ["first", "second"]
    assert [event.detail for event in last_events(tmp_path, 9)] == ["first", "second"]


def test_many_writers_lose_no_line(tmp_path: Path) -> None:
    def write(writer: int) -> None:
        for number in range(20):
            append_event(tmp_path, make_event("cap", f"{writer} {number}", "A", "ann@host"))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {event.detail for event in all_events(tmp_path)} == {f"{w} {n}" for w in range(8) for n in range(20)}
    assert len((tmp_path / EVENTS).read_bytes().splitlines()) == 160


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(AssertionError, match="exploded"):
        make_event("exploded", "")


def test_which_servers_were_changed_stands_there(tmp_path: Path) -> None:
    append_event(tmp_path, make_event("server_added", "http://two:30000 is used from now on"))
    append_event(tmp_path, make_event("server_drained", "http://one:30000 is asked for nothing new"))
    append_event(tmp_path, make_event("server_drained", "http://two:30000 is asked for nothing new"))
    append_event(tmp_path, make_event("server_down", "no answer", who="http://three:30000"))
    assert server_changes(tmp_path) == {"http://two:30000": "drained", "http://one:30000": "drained"}
