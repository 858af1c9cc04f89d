"""`doctor` as a person runs it, against servers in processes of their own; and what `enqueue` says of the same ones."""

import json
import socket
from pathlib import Path

import pytest

from common.ledger import Ledger
from tests.acceptance.commands import EXAMPLE_IDS, tokenmill
from tests.acceptance.conftest import Simulate
from tests.conftest import REPO


def configure(folder: Path, *urls: str, redis: str = "embedded") -> None:
    (folder / "a.jsonl").write_text('{"input_ids": [5, 6]}\n')
    (folder / "tokenmill.toml").write_text(
        f'redis = "{redis}"\n[server]\nurls = {json.dumps(urls)}\n[server.api_key_files]\n"{urls[0]}/" = "key"\n'
        f'[tokenizer]\npath = "{REPO}/examples/tokenizer"\n[sampling]\nmax_new_tokens = 64\n'
        '[[datasets]]\nname = "A"\npath = "a.jsonl"\n'
    )
    (folder / "key").write_text("sesame\n")


@pytest.fixture
def closed() -> str:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_doctor_shows_a_server_and_finds_nothing(tmp_path: Path, simulate: Simulate) -> None:
    url = simulate("--speed", "0", "--api-key", "sesame", "--max-running-requests", "7", *EXAMPLE_IDS)
    configure(tmp_path, url)

    done = tokenmill("doctor", folder=tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    shown = done.stdout.splitlines()
    assert shown[0] == url
    assert "  version         0.5.23" in shown
    assert "  running limit   7 requests" in shown
    assert shown[-1] == "the server can be used"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "key", "tokenmill.toml"]


def test_doctor_says_what_is_wrong_and_leaves_with_4(tmp_path: Path, simulate: Simulate, closed: str) -> None:
    locked = simulate("--speed", "0", "--api-key", "sesame", "--profile", "0.5.9", *EXAMPLE_IDS)
    old = simulate("--speed", "0", "--profile", "0.5.2", *EXAMPLE_IDS)
    configure(tmp_path, locked, old, closed)

    done = tokenmill("doctor", "--json", folder=tmp_path)

    assert (done.returncode, done.stderr) == (4, "")
    told = json.loads(done.stdout)
    assert [server["url"] for server in told["servers"]] == [locked, old]
    assert told["warnings"][0].startswith(f"{locked}: SGLang 0.5.9: when its KV pool runs full")
    away, refused = told["refusals"]
    assert away.startswith(f"{closed} cannot be reached (Connection refused)")
    assert refused.startswith(f"{old} runs SGLang 0.5.2, which puts ids of the prompt into output_ids")
    assert "sesame" not in done.stdout


def test_doctor_without_the_key_says_where_it_goes(tmp_path: Path, simulate: Simulate) -> None:
    configure(tmp_path, simulate("--speed", "0", "--api-key", "other", *EXAMPLE_IDS))

    done = tokenmill("doctor", folder=tmp_path)

    assert (done.returncode, done.stderr) == (4, "")
    assert done.stdout.startswith("special ids of the tokenizer\n  think           4092\n")
    *_, sentence = done.stdout.splitlines()
    assert "refuses the API key (401); set it with TOKENMILL_SERVER__API_KEY" in sentence
    assert "sesame" not in sentence


def test_enqueue_goes_on_without_a_server_that_is_away(
    tmp_path: Path, simulate: Simulate, closed: str, valkey: str, ledger: Ledger
) -> None:
    good = simulate("--speed", "0", "--profile", "0.5.13", *EXAMPLE_IDS)
    configure(tmp_path, closed, good, redis=valkey)

    done = tokenmill("enqueue", folder=tmp_path)

    assert (done.returncode, done.stdout) == (0, "")
    away, known, registered = done.stderr.splitlines()
    assert away.startswith(f"warning: {closed} cannot be reached (Connection refused)")
    assert known.startswith(f"warning: {good}: SGLang 0.5.13: an abort")
    assert registered == "A: new, layout input_ids"
    assert ledger.datasets() == ["A"]
    (server,) = json.loads((tmp_path / "out" / "run.json").read_text())["servers"]
    assert (server["url"], server["version"], server["stream_mode"]) == (good, "0.5.13", "cumulative")
