"""`enqueue` as a person runs it: rows from a pipe, the layout named, and the dry run, which needs nothing."""

import json
from pathlib import Path

from common.ledger import Ledger
from tests.acceptance.commands import EXAMPLE_IDS, tokenmill
from tests.acceptance.conftest import Simulate
from tests.conftest import REPO

ROWS = '{"input_ids": [5, 6]}\n{"prompt": "Why?", "id": 7}\n'


def configure(folder: Path, url: str, source: str = "a.jsonl", more: str = "") -> None:
    (folder / "tokenmill.toml").write_text(
        f'{more}[server]\nurls = ["{url}"]\n[tokenizer]\npath = "{REPO}/examples/tokenizer"\n'
        f'[sampling]\nmax_new_tokens = 64\n[[datasets]]\nname = "A"\npath = "{source}"\n'
    )


def test_rows_from_a_pipe_are_kept_and_registered(
    tmp_path: Path, simulate: Simulate, valkey: str, ledger: Ledger
) -> None:
    configure(tmp_path, simulate("--speed", "0", *EXAMPLE_IDS), "-", f'redis = "{valkey}"\n')
    copy = tmp_path / "out" / "A" / "standard-input"

    done = tokenmill("enqueue", folder=tmp_path, piped=ROWS)

    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    kept, registered, nobody = done.stderr.splitlines()
    assert kept.startswith(f"A: standard input was copied to {copy} ({len(ROWS)} bytes)")
    assert registered == "A: new, layouts input_ids (1), prompt (1) of all 2 rows"
    assert nobody.startswith("! neither control nor a worker is heard of: ")
    assert copy.read_text() == ROWS
    assert ledger.datasets() == ["A"]
    again = tokenmill("enqueue", folder=tmp_path)
    assert again.stderr.splitlines() == ["A: goes on, layouts input_ids (1), prompt (1) of all 2 rows", nobody]


def test_a_source_of_which_nothing_can_be_used_is_refused_before_anything_is_written(
    tmp_path: Path, simulate: Simulate, valkey: str, ledger: Ledger
) -> None:
    """A misspelt column gave a reject for each row, and `layout none` was all that was said of it."""
    url = simulate("--speed", "0", *EXAMPLE_IDS)
    configure(tmp_path, url, more=f'redis = "{valkey}"\n')
    config = tmp_path / "tokenmill.toml"
    config.write_text(config.read_text() + 'columns = { prompt = "questoin" }\n')
    (tmp_path / "a.jsonl").write_text('{"question": "Why?"}\n' * 20)
    said = (
        "A: none of its 20 rows can be a prompt: 20 no_prompt (the row has none of the columns that the configuration "
        f"names); correct its `columns` or its path ({tmp_path}/a.jsonl)"
    )

    done = tokenmill("enqueue", folder=tmp_path)

    assert done.returncode == 2
    assert done.stderr.startswith(f"tokenmill: {said}; see `tokenmill enqueue --dry-run`, or ")
    assert (ledger.datasets(), (tmp_path / "out").exists()) == ([], False)
    forced = tokenmill("enqueue", "--force", folder=tmp_path)
    assert forced.returncode == 0
    assert f"warning: {said}" in forced.stderr.splitlines()
    assert ledger.datasets() == ["A"]


def test_nothing_piped_in_is_refused(tmp_path: Path, valkey: str) -> None:
    configure(tmp_path, "http://127.0.0.1:9", "-", f'redis = "{valkey}"\n')
    # An empty pipe is what a script without an input has; only a terminal is refused before the servers are asked.
    done = tokenmill("enqueue", folder=tmp_path, piped="")
    assert (done.returncode, (tmp_path / "out").exists()) == (4, False), done.stderr


def test_a_dry_run_asks_the_server_and_writes_nothing(tmp_path: Path, simulate: Simulate) -> None:
    url = simulate("--speed", "0", "--context-length", "70", *EXAMPLE_IDS)
    configure(tmp_path, url)
    (tmp_path / "a.jsonl").write_text(ROWS)

    done = tokenmill("enqueue", "--dry-run", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stderr == "the server asked; the vocabulary is 4,096 ids, the context 70 tokens\n"
    shown = done.stdout.splitlines()
    assert shown[:6] == [
        f"A: {tmp_path}/a.jsonl",
        "  layout     input_ids (1), prompt (1)",
        "  looked at  2 rows: all there are",
        "  converted  1",
        "  rejected   1 too_long",
        "             row 1: too_long: 13 prompt tokens and max_new_tokens 64 exceed the context of 70",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "tokenmill.toml"]


def test_a_dry_run_without_a_server_says_so(tmp_path: Path) -> None:
    configure(tmp_path, "http://127.0.0.1:9", "-")

    done = tokenmill("enqueue", "--dry-run", "--json", folder=tmp_path, piped=ROWS)

    assert done.returncode == 0, done.stderr
    away, asked = done.stderr.splitlines()
    assert away.startswith("warning: http://127.0.0.1:9 cannot be reached")
    assert asked == "no server asked; the vocabulary is 4,096 ids, the context not known, so that no prompt is too long"
    told = json.loads(done.stdout)
    assert (told["servers"], told["vocab_size"], told["context_length"]) == ([], 4096, None)
    (dataset,) = told["datasets"]
    assert (dataset["rows"], dataset["converted"], dataset["rejected"]) == (2, 2, {})
    assert dataset["prompts"][1]["text"].startswith("⟦<|im_start|>⟧user\nWhy?⟦<|im_end|>⟧")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenmill.toml"]


def test_json_alone_makes_no_sense(tmp_path: Path) -> None:
    configure(tmp_path, "http://127.0.0.1:9")
    (tmp_path / "a.jsonl").write_text(ROWS)
    done = tokenmill("enqueue", "--json", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--json goes with --dry-run" in done.stderr
