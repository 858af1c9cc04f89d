"""Child processes: started again when they die, given up on when they do nothing else, ended together."""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from common.errors import TokenmillError
from producer.children import Child, stop_all
from tests.conftest import PATIENCE_SECONDS, wait_until

# A command that runs until it is told to end, and one that ends at once.
STAYS = ("simulate", "--port", "0")
ENDS = ("--version",)
Make = Callable[..., Child]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes children, and kills them at the end."""
    children: list[Child] = []

    def make(*arguments: str) -> Child:
        child = Child("the child", arguments, tmp_path / "tokenmill.toml", tmp_path / "child.log")
        children.append(child)
        return child

    yield make
    for child in children:
        child.kill()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def log(folder: Path) -> str:
    return (folder / "child.log").read_text()


def test_a_child_runs_until_it_is_told_to_end(make: Make, tmp_path: Path) -> None:
    child = make(*STAYS)
    assert child.pid is None
    assert child.wait(0)  # there is none to wait for
    child.start()
    wait_until("it is ready", lambda: "simulated SGLang on" in log(tmp_path))
    child.look_after()
    assert not child.wait(0)
    child.terminate()
    assert child.wait(PATIENCE_SECONDS)
    child.terminate()  # a second time is no fault
    child.kill()


def test_a_child_that_ended_is_started_again(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    child = make(*STAYS)
    child.start()
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert child.wait(PATIENCE_SECONDS)

    def again() -> bool:
        child.look_after()
        return child.pid not in {None, first}

    with caplog.at_level(logging.WARNING):
        wait_until("it was started again", again)
    assert "the child ended (by signal SIGKILL); starting it again" in caplog.text
    assert not child.wait(0)


def test_a_child_that_does_nothing_but_die_is_given_up(make: Make, tmp_path: Path) -> None:
    child = make("no-such-command")
    child.start()

    def given_up() -> str:
        child._pause = 0.0  # the pauses between its starts, 15 s in all, are not what is tested
        try:
            child.look_after()
        except TokenmillError as error:
            return str(error)
        return ""

    wait_until("it is given up", given_up)
    said = given_up()
    assert said.startswith("the child ended ")
    assert "times in a row, with exit code 2; the end of " in said
    assert said.endswith("No such command 'no-such-command' (see `tokenmill --help`)")
    assert log(tmp_path).count("No such command") == 6


def test_last_words(make: Make, tmp_path: Path) -> None:
    child = make(*ENDS)
    child.start()
    assert child.wait(PATIENCE_SECONDS)
    assert child.last_words().startswith(f"; the end of {tmp_path / 'child.log'} says: tokenmill, version ")
    (tmp_path / "child.log").write_text("")
    assert child.last_words() == f"; {tmp_path / 'child.log'} is empty"


def test_a_child_has_the_configuration_of_its_parent(make: Make, tmp_path: Path) -> None:
    child = make("status")
    child.start()
    assert child.wait(PATIENCE_SECONDS)
    assert f"{tmp_path / 'tokenmill.toml'} does not exist" in child.last_words()


def test_children_that_do_not_end_in_time_are_killed(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    children = [make(*STAYS), make(*STAYS)]
    for child in children:
        child.start()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)  # it cannot even see the TERM
        wait_until("it stands still", partial(is_stopped, child.pid))
    with caplog.at_level(logging.WARNING):
        stop_all(children, 0.2)
    assert all(child.wait(0) for child in children)
    assert caplog.text.count("did not end within 0 s and is killed") == 2
