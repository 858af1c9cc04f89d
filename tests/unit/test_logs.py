"""One line an event: JSON where no person reads along, and a few lines of what would be thousands."""

import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from common.logs import Json, Lines, about, last_words, one_line
from tests.conftest import wait_until


class Log:
    """A logger with the handler of our processes, and what it has written."""

    def __init__(self, seconds: float) -> None:
        self.stream = io.StringIO()
        self.handler = Lines(self.stream, seconds)
        self.handler.setFormatter(Json())
        self.log = logging.getLogger(f"test-{id(self)}")
        self.log.propagate = False
        self.log.addHandler(self.handler)

    def told(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    def messages(self) -> list[object]:
        return [line["message"] for line in self.told()]


@pytest.fixture
def log() -> Iterator[Log]:
    """Bursts never end by themselves within a test."""
    log = Log(3600.0)
    yield log
    log.log.removeHandler(log.handler)
    log.handler.close()


def test_a_record_is_one_json_object_on_one_line(log: Log) -> None:
    log.log.error("B1 %d: given up\nafter a fault", 7, extra=about("B1", 7))
    (line,) = log.told()
    assert str(line.pop("at")).endswith("Z")
    assert line == {
        "level": "error",
        "logger": log.log.name,
        "message": "B1 7: given up\nafter a fault",
        "dataset": "B1",
        "index": 7,
    }


def test_only_what_applies_stands_there(log: Log) -> None:
    assert about() == {}
    log.log.warning("http://one is down", extra=about(server="http://one"))
    (line,) = log.told()
    assert set(line) == {"at", "level", "logger", "message", "server"}


def test_a_traceback_stays_on_the_line(log: Log) -> None:
    try:
        int("x")
    except ValueError:
        log.log.exception("a fault of ours")
    (line,) = log.told()
    assert "ValueError: invalid literal" in str(line["traceback"])


def test_what_repeats_is_told_five_times_and_then_counted(log: Log) -> None:
    for number in range(105):
        log.log.warning("claims wait, Redis does not answer: %s", OSError(number))
    log.log.warning("something else")
    assert len(log.told()) == 6
    log.handler.close()
    assert log.told()[-1]["message"] == "claims wait, Redis does not answer: 104 (repeated 100 times)"
    assert log.told()[-1]["repeated"] == 100


def test_what_is_about_another_dataset_server_or_level_is_no_repeat(log: Log) -> None:
    for _ in range(9):
        for dataset in ("A", "B"):
            log.log.warning("%s: its source cannot be read", dataset, extra=about(dataset))
        log.log.error("%s: its source cannot be read", "A", extra=about("A"))
    assert len(log.told()) == 3 * 5
    log.handler.close()
    assert [line["repeated"] for line in log.told()[15:]] == [4, 4, 4]


def test_the_end_of_a_burst_is_told_though_nothing_more_is_logged() -> None:
    log = Log(0.2)
    for _ in range(8):
        log.log.warning("again")
    wait_until("it is told", lambda: "again (repeated 3 times)" in log.messages(), 10)
    log.log.warning("again")
    assert log.messages() == ["again"] * 5 + ["again (repeated 3 times)", "again"]


def test_threads_lose_no_line(log: Log) -> None:
    def work(thread: int) -> None:
        for number in range(50):
            log.log.warning(f"{thread} {number}")  # noqa: G004 - each is a kind of its own

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(log.messages())) == 300


def test_a_record_is_cut_down_to_its_first_line() -> None:
    try:
        int("x")
    except ValueError:
        caught = sys.exc_info()
    record = logging.LogRecord("celery.beat", logging.ERROR, __file__, 1, "Message Error: %s\n%s", ("why", []), caught)
    assert one_line(record)
    assert logging.Formatter("%(message)s").format(record) == "Message Error: why"


def test_an_empty_record_stays_empty() -> None:
    record = logging.LogRecord("celery.beat", logging.ERROR, __file__, 1, "", (), None)
    assert one_line(record)
    assert record.getMessage() == ""


@pytest.mark.parametrize(("form", "begins"), [(None, "{"), ("json", "{"), ("text", "20")])
def test_what_our_own_modules_have_to_tell_is_told(form: str | None, begins: str) -> None:
    lines = (
        "import logging",
        "from common.logs import log_to_stderr",
        "log_to_stderr()",
        "logging.getLogger('workers.sglang.steering').info('52 of at most 54 answers in flight')",
        "logging.getLogger('celery.worker').info('a task')",
        "for _ in range(7): logging.getLogger('workers').warning('again')",
    )
    environment = {} if form is None else {"TOKENMILL_LOG_FORMAT": form}
    command = [sys.executable, "-c", "\n".join(lines)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    first, *others = told.stderr.splitlines()
    assert first.startswith(begins)
    assert "52 of at most 54 answers in flight" in first
    assert "workers.sglang.steering" in first
    assert len(others) == 6
    assert "again (repeated 2 times)" in others[-1]  # at the end of the process


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        ("tokenmill: no such file\n", "tokenmill: no such file"),
        ('{"level": "error", "message": "first"}\n{"level": "critical", "message": "why"}\nWarm shutdown\n', "why"),
        ('{"level": "info", "message": "at work"}\n[1]\n', "[1]"),
        ('bye\n{"level": "info", "message": "1 of at most 5 answers in flight"}\n', "bye"),
        ('{"level": "info", "message": "1 of at most 5 answers in flight"}\n', ""),
        ('{"level": "warning", "message": "slow"}\n{"level": "info", "message": "at work"}\n', "slow"),
    ],
)
def test_the_last_words_of_a_process_are_its_last_error(text: str, words: str) -> None:
    assert last_words(text) == words
