"""The commands that steer, as they are typed: what asks before it is done, and what says that nobody would do it."""

from pathlib import Path

import pytest

from common.ledger import Ledger
from tests.acceptance.commands import TOKENMILL, environment, tokenmill
from tests.integration.status_steps import at_work, register
from tests.lines import write_config
from tests.terminals import Terminal

NOBODY = (
    "! neither control nor a worker is heard of: nothing will start until `tokenmill run` is started, or `tokenmill "
    "control` and `tokenmill worker`\n"
)


@pytest.fixture
def folder(tmp_path: Path, valkey: str, ledger: Ledger) -> Path:
    """A job with dataset A, which is open."""
    write_config(tmp_path, valkey)
    register(ledger, "A", cap_tokens=1000)
    return tmp_path


def test_what_cannot_be_taken_back_is_not_done_where_nobody_can_be_asked(folder: Path, ledger: Ledger) -> None:
    """`echo | tokenmill cancel A` cancelled at once."""
    for piped in ("", "\n", "y\n"):
        done = tokenmill("cancel", "A", folder=folder, piped=piped)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "tokenmill: cancel ends A for good, and there is no terminal to ask on; add -y to do it all the same, or "
            "use `tokenmill pause`\n"
        )
    assert ledger.snapshot("A").state == "open"
    assert tokenmill("cancel", "A", "-y", folder=folder, piped="").returncode == 0
    assert ledger.snapshot("A").state == "cancelled"


@pytest.mark.parametrize(("keys", "code"), [("n\n", 0), ("\n", 0), ("\x04", 130), ("\x03", 130)])
def test_who_does_not_confirm_is_told_that_nothing_was_changed(
    folder: Path, ledger: Ledger, keys: str, code: int
) -> None:
    terminal = Terminal([*TOKENMILL, "cancel", "A"], folder, environment(folder))
    try:
        terminal.wait_for("it asks", lambda: "End A for good? [y/N]" in terminal.text())
        terminal.type(keys)
        assert terminal.end() == code
        assert terminal.text().rstrip().endswith("nothing was changed")
        assert "interrupted" not in terminal.text()
    finally:
        terminal.close()
    assert ledger.snapshot("A").state == "open"


def test_a_name_is_looked_at_before_anything_is_asked(folder: Path) -> None:
    terminal = Terminal([*TOKENMILL, "cancel", "AA"], folder, environment(folder))
    try:
        assert terminal.end() == 2
        assert "no dataset of this job is named 'AA'" in terminal.text()
        assert "for good?" not in terminal.text()
    finally:
        terminal.close()


def test_what_opens_a_dataset_says_that_nobody_works(folder: Path, ledger: Ledger) -> None:
    ledger.admit("A", room=0, window=1, tokens_per_second=0)
    assert ledger.snapshot("A").state == "capped"
    done = tokenmill("cap", "A", "2k", folder=folder)
    assert done.stderr == "A: cap 1,000 tokens -> 2,000 tokens; it is open again\n" + NOBODY
    assert tokenmill("pause", "A", folder=folder).stderr.count("\n") == 1
    assert tokenmill("resume", "A", folder=folder).stderr.endswith(NOBODY)
    at_work(ledger)
    assert NOBODY not in tokenmill("cap", "A", "3k", folder=folder).stderr
