"""`turns = "all"` through the whole of `tokenmill run`: keeper, feeds, workers, and a second run without its Redis."""

import json
import shutil
from pathlib import Path

import pytest

from common.records import Record
from common.segments import records
from tests.acceptance.commands import EXAMPLE_IDS, tokenmill
from tests.acceptance.conftest import Simulate
from tests.conftest import REPO
from tests.integration.conversation_steps import assert_own_history, talk

pytestmark = pytest.mark.timeout(300)
TURNS = {f"t{row}": (1, 2, 5)[row % 3] for row in range(9)}
# Single characters: others may be pieces of one, and an answer of such pieces is damaged.
LETTERS = ("--first-id", "0", "--last-id", "90", "--mean-tokens", "20", "--cv", "0.3", "--speed", "0")


def found(folder: Path) -> dict[str, list[Record]]:
    """The records of each row, in the order of their turns."""
    by_row: dict[str, list[Record]] = {}
    for record in sorted(records(folder / "out", "A"), key=lambda one: one.index):
        by_row.setdefault(record.meta["id"], []).append(record)
    return by_row


def test_every_turn_is_made_once_and_a_second_run_makes_none(tmp_path: Path, simulate: Simulate) -> None:
    server = simulate(*EXAMPLE_IDS, *LETTERS)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(talk(name, turns)) + "\n" for name, turns in TURNS.items()))
    (tmp_path / "tokenmill.toml").write_text(
        f'output = "out"\nredis = "embedded"\n[server]\nurls = ["{server}"]\n'
        '[gates]\naction = "none"\n'
        f'[tokenizer]\npath = "{REPO}/examples/tokenizer"\n[sampling]\nmax_new_tokens = 200\n'
        '[[datasets]]\nname = "A"\npath = "a.jsonl"\nturns = "all"\n'
    )
    for _ in range(2):
        done = tokenmill("run", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        made = found(tmp_path)
        assert {name: len(turns) for name, turns in made.items()} == TURNS
        for name, turns in made.items():
            assert_own_history(name, turns, TURNS[name])
        assert tokenmill("verify", "--json", folder=tmp_path).returncode == 0
        shutil.rmtree(tmp_path / "out" / ".redis")
