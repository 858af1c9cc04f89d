"""How the demo names the command that it was started by."""

import sys
from pathlib import Path

import pytest

from producer.demo import closing_words, program


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command as `make demo` starts it: in a folder below the current one, and not on the PATH."""
    command = tmp_path / "an env" / "bin" / "tokenmill"
    command.parent.mkdir(parents=True)
    command.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "argv", ["an env/bin/tokenmill", "demo"])
    return command


def test_a_command_that_the_shell_would_not_find_is_named_by_its_path(
    command: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert program() == "'an env/bin/tokenmill'"
    monkeypatch.chdir(command.parent)
    monkeypatch.setattr(sys, "argv", ["tokenmill", "demo"])
    assert program() == "./tokenmill"
    elsewhere = command.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "argv", [str(command), "demo"])
    assert program() == f"'{command}'"


def test_one_on_the_path_is_named_as_it_is(command: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(command.parent))
    assert program() == "tokenmill"
    assert "\n  tokenmill verify -c here/tokenmill.toml   every" in closing_words("here/tokenmill.toml")


def test_another_one_on_the_path_is_not_taken_for_it(
    command: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenmill").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(other))
    assert program() == "'an env/bin/tokenmill'"
