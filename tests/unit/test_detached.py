"""Pid files: whose process is meant, and never another's that has its pid by now."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from common.processes import began, is_gone
from producer.detached import Detached, changing, detached, living_here
from tests.conftest import wait_until


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def worker(logs: Path, pid: int, since: str | None, name: str = "w2", host: str | None = None) -> Detached:
    """A pid file as `workers add` writes it."""
    one = Detached(name, host or socket.gethostname(), pid, since or "", 1.0)
    logs.mkdir(exist_ok=True)
    (logs / f"{one.label}.pid").write_bytes(msgspec.json.encode(one))
    return msgspec.structs.replace(one, logs=str(logs))


def test_when_a_process_began_tells_it_from_others(sleeper: subprocess.Popen[bytes]) -> None:
    assert began(os.getpid()) == began(os.getpid())
    assert began(sleeper.pid) not in {None, began(os.getpid())}
    sleeper.kill()
    # Nobody has waited for it yet: its pid is still taken, by nothing that could work.
    wait_until("it has ended", lambda: began(sleeper.pid) is None)
    sleeper.wait()
    assert began(sleeper.pid) is None


def test_a_pid_that_was_given_to_another_process_is_left_alone(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    one = worker(tmp_path / "logs", sleeper.pid, "an earlier boot 12345")
    assert not one.lives
    one.terminate()
    one.kill()
    assert one.wait(0)
    assert sleeper.poll() is None
    assert living_here(tmp_path) == []
    assert [found.label for found in detached(tmp_path)] == [one.label]
    one.forget()
    one.forget()
    assert detached(tmp_path) == []


def test_its_own_process_is_ended(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    one = worker(tmp_path / "logs", sleeper.pid, began(sleeper.pid))
    assert [found.pid for found in living_here(tmp_path)] == [sleeper.pid]
    assert not one.wait(0)
    one.terminate()
    assert one.wait(20)
    assert sleeper.wait() < 0


def test_that_of_another_machine_is_never_taken_for_one_of_this(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    worker(tmp_path / "logs", sleeper.pid, began(sleeper.pid), host="elsewhere")
    assert living_here(tmp_path) == []
    assert [found.label for found in detached(tmp_path)] == ["w2@elsewhere"]


def test_files_of_others_are_passed_over(tmp_path: Path) -> None:
    worker(tmp_path / "logs", 1, "x")
    (tmp_path / "logs" / "a@b.pid").write_text("12345\n")
    (tmp_path / "logs" / "celery.pid").write_text("12345\n")
    assert [found.name for found in detached(tmp_path)] == ["w2"]
    assert detached(tmp_path / "nothing") == []


def test_what_its_log_says_is_found(tmp_path: Path) -> None:
    one = worker(tmp_path / "logs", 1, "x")
    assert one.last_words() == ""
    one.log_file.write_text('{"level": "critical", "message": "this worker cannot begin"}\nbye\n')
    assert one.last_words() == "this worker cannot begin"


def test_changes_come_one_after_the_other(tmp_path: Path) -> None:
    with changing(tmp_path):
        assert (tmp_path / "logs" / ".workers").exists()
    with changing(tmp_path):
        pass


def test_a_process_is_gone_only_where_that_is_proved(sleeper: subprocess.Popen[bytes]) -> None:
    here = {"host": socket.gethostname(), "pid": sleeper.pid, "began": began(sleeper.pid)}
    assert not is_gone(here)
    assert not is_gone({"host": here["host"], "pid": sleeper.pid})  # one of an older release
    assert is_gone(here | {"began": "an earlier boot 12345"})  # its pid is another's now
    sleeper.kill()
    sleeper.wait()
    assert is_gone(here)
    assert is_gone({"host": here["host"], "pid": sleeper.pid})
    assert not is_gone(here | {"host": "elsewhere"})
    assert not is_gone({"host": here["host"]})
