"""`doctor` as a person runs it, against servers in processes of their own; and what `enqueue` says of the same ones."""

import json
import socket
from pathlib import Path
from urllib.request import urlopen

import pytest

from common.ledger import Ledger
from tests.acceptance.commands import EXAMPLE_IDS, tokenmill
from tests.acceptance.conftest import Simulate
from tests.conftest import REPO


def configure(folder: Path, *urls: str, redis: str = "embedded", max_new_tokens: int = 64) -> None:
    (folder / "a.jsonl").write_text('{"input_ids": [5, 6]}\n')
    (folder / "tokenmill.toml").write_text(
        f'redis = "{redis}"\n[server]\nurls = {json.dumps(urls)}\n[server.api_key_files]\n"{urls[0]}/" = "key"\n'
        f'[tokenizer]\npath = "{REPO}/examples/tokenizer"\n[sampling]\nmax_new_tokens = {max_new_tokens}\n'
        '[[datasets]]\nname = "A"\npath = "a.jsonl"\n'
    )
    (folder / "key").write_text("sesame\n")


@pytest.fixture
def closed() -> str:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_doctor_looks_at_everything_and_finds_nothing(tmp_path: Path, simulate: Simulate) -> None:
    url = simulate("--speed", "0", "--api-key", "sesame", *EXAMPLE_IDS, "--tokenizer", f"{REPO}/examples/tokenizer")
    configure(tmp_path, url, max_new_tokens=20_000)

    done = tokenmill("doctor", folder=tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    shown = done.stdout.splitlines()
    assert shown[0] == f"ok       reachable            {url}"
    assert "ok       release              SGLang 0.5.23; no fault of it is known" in shown
    assert max(map(len, shown)) <= 80
    assert shown[-1] == "nothing is wrong, no warnings: the server can be used"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "key", "tokenmill.toml"]


def test_doctor_says_what_is_wrong_and_leaves_with_4(tmp_path: Path, simulate: Simulate, closed: str) -> None:
    locked = simulate("--speed", "0", "--api-key", "sesame", "--profile", "0.5.9", *EXAMPLE_IDS)
    old = simulate("--speed", "0", "--profile", "0.5.2", *EXAMPLE_IDS)
    configure(tmp_path, locked, old, closed)

    done = tokenmill("doctor", "--json", folder=tmp_path)

    assert (done.returncode, done.stderr) == (4, "")
    told = json.loads(done.stdout)
    assert [server["url"] for server in told["servers"]] == [locked, old]
    wrong = [check for check in told["checks"] if check["state"] == "wrong"]
    assert [check["name"] for check in wrong] == ["reachable", "release"]
    assert wrong[0]["says"] == f"{closed} cannot be reached (Connection refused)"
    assert wrong[1]["says"].startswith(f"{old}: runs SGLang 0.5.2, which puts ids of the prompt into output_ids")
    assert wrong[1]["do"].startswith("upgrade it to 0.5.5 or later")
    warned = [check["says"] for check in told["checks"] if check["state"] == "warning"]
    assert any(says.startswith(f"{locked}, {old}: SGLang") or f"{locked}: SGLang 0.5.9" in says for says in warned)
    assert "sesame" not in done.stdout


def test_doctor_without_the_key_says_where_it_goes(tmp_path: Path, simulate: Simulate) -> None:
    configure(tmp_path, simulate("--speed", "0", "--api-key", "other", *EXAMPLE_IDS))

    done = tokenmill("doctor", "--json", "--no-probe", folder=tmp_path)

    assert (done.returncode, done.stderr) == (4, "")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["special_ids"]["says"].startswith("<think> 4092, </think> 4093")
    assert "refuses the API key (401)" in checks["reachable"]["says"]
    assert checks["reachable"]["do"].startswith("set it with TOKENMILL_SERVER__API_KEY")
    assert "sesame" not in done.stdout


def test_run_refuses_what_is_wrong_unless_it_is_forced_and_run_json_says_so(tmp_path: Path, simulate: Simulate) -> None:
    configure(tmp_path, simulate("--speed", "0", "--fault", "no_output_ids:next=2", *EXAMPLE_IDS))
    url = json.loads(tokenmill("doctor", "--no-probe", "--json", folder=tmp_path).stdout)["servers"][0]["url"]

    refused = tokenmill("run", folder=tmp_path)

    assert (refused.returncode, refused.stdout) == (4, "")
    [sentence] = refused.stderr.splitlines()
    assert sentence.startswith(f"tokenmill: {url}: 2 of 2 short answers were not good (no_output_ids)")
    assert sentence.endswith("or go on all the same with --force")
    assert not (tmp_path / "out").exists()

    urlopen(f"{url}/_sim/faults", data=json.dumps({"no_output_ids": {"next": 2}}).encode()).close()
    done = tokenmill("run", "--force", folder=tmp_path)

    assert done.returncode == 0, done.stderr
    assert f"warning: forced: {url}: 2 of 2 short answers were not good (no_output_ids)" in done.stderr
    [forced] = json.loads((tmp_path / "out" / "run.json").read_text())["forced"]
    assert forced["name"] == "probe_answers"
    again = tokenmill("run", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "out" / "run.json").read_text())["forced"] == [forced]


def test_enqueue_goes_on_without_a_server_that_is_away(
    tmp_path: Path, simulate: Simulate, closed: str, valkey: str, ledger: Ledger
) -> None:
    good = simulate("--speed", "0", "--profile", "0.5.13", *EXAMPLE_IDS)
    configure(tmp_path, closed, good, redis=valkey)

    done = tokenmill("enqueue", folder=tmp_path)

    assert (done.returncode, done.stdout) == (0, "")
    away, known, registered, nobody = done.stderr.splitlines()
    assert away.startswith(f"warning: {closed} cannot be reached (Connection refused)")
    assert known.startswith(f"warning: {good}: SGLang 0.5.13: an abort")
    assert registered == "A: new, layout input_ids"
    assert nobody.startswith("! neither control nor a worker is heard of: ")
    assert ledger.datasets() == ["A"]
    (server,) = json.loads((tmp_path / "out" / "run.json").read_text())["servers"]
    assert (server["url"], server["version"], server["stream_mode"]) == (good, "0.5.13", "cumulative")
