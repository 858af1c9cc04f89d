"""Whatever is wrong with what a person gives: one sentence that says what and where, and nothing is written."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.commands import EXAMPLE_IDS, tokenmill
from tests.acceptance.conftest import Simulate
from tests.conftest import REPO

TOKENIZER = REPO / "examples" / "tokenizer"
COMMANDS = ("run", "enqueue", "status", "worker", "control", "flower", "doctor", "verify", "recover", "export")
DATASET = '[[datasets]]\nname = "A"\npath = "a.jsonl"\n'


@pytest.fixture(scope="session")
def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


@pytest.fixture(scope="session")
def server(simulate: Simulate) -> str:
    """A good server."""
    return simulate("--speed", "0", *EXAMPLE_IDS)


class Page(BaseHTTPRequestHandler):
    """Some web server that is no model server: it answers everything with a page."""

    def do_GET(self) -> None:
        page = b"<!DOCTYPE html><html><body>It works!</body></html>"
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    do_POST = do_GET  # noqa: N815 - the library's name

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="session")
def page() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class Bad:
    """A folder with a configuration and a source in it, and what a command must say there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "tokenmill.toml"
        (folder / "a.jsonl").write_text('{"input_ids": [5, 6]}\n')

    def configure(
        self,
        *,
        top: str = "",
        redis: str = "embedded",
        url: str = "http://127.0.0.1:1",
        tokenizer: Path = TOKENIZER,
        datasets: str = DATASET,
    ) -> None:
        self.config.write_text(
            f'output = "out"\nredis = "{redis}"\n{top}\n[server]\nurls = ["{url}"]\n'
            f'[tokenizer]\npath = "{tokenizer}"\n[sampling]\nmax_new_tokens = 64\n{datasets}'
        )

    def assert_refused(self, *arguments: str, code: int, says: list[str], **more: str) -> str:
        """Run the command; assert that it says one sentence with `says` in it, leaves with `code`, writes nothing."""
        before = self.everything()
        done = tokenmill(*arguments, folder=self.folder, **more)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert "Traceback" not in done.stderr
        (sentence,) = done.stderr.splitlines()
        assert sentence.startswith("tokenmill: ")
        for words in says:
            assert words in sentence
        assert self.everything() == before
        assert not (self.folder / "out").exists()
        return sentence

    def everything(self) -> dict[str, int]:
        """All that is in the folder, hidden or not."""
        return {str(path.relative_to(self.folder)): path.stat().st_size for path in self.folder.rglob("*")}


@pytest.fixture
def bad(tmp_path: Path) -> Bad:
    return Bad(tmp_path)


def arguments_of(command: str) -> list[str]:
    return [command, "-o", "files"] if command == "export" else [command]


# The configuration


@pytest.mark.parametrize("command", COMMANDS)
def test_no_configuration(bad: Bad, command: str) -> None:
    bad.assert_refused(
        *arguments_of(command), code=2, says=[f"{bad.config} does not exist", "name another with -c FILE"]
    )


@pytest.mark.parametrize("command", ["run", "worker"])
def test_an_unknown_key(bad: Bad, command: str) -> None:
    bad.configure(top="outptu = 1")
    bad.assert_refused(*arguments_of(command), code=2, says=[f"{bad.config}: unknown key outptu; did you mean output?"])


def test_a_configuration_that_is_named_and_missing(bad: Bad) -> None:
    bad.configure()
    bad.assert_refused("run", "-c", "other.toml", code=2, says=[f"{bad.folder / 'other.toml'} does not exist"])
    bad.assert_refused("run", code=2, says=["other.toml does not exist"], TOKENMILL_CONFIG="other.toml")


def test_a_configuration_that_is_a_folder(bad: Bad) -> None:
    bad.assert_refused("run", "-c", ".", code=2, says=["'-c'", "is a directory", "`tokenmill run --help`"])


@pytest.mark.parametrize(
    ("datasets", "says"),
    [
        ('[[datasets]]\nname = "a/b"\npath = "a.jsonl"\n', "datasets[0].name: 'a/b' cannot be a dataset's name"),
        ('[[datasets]]\nname = "../x"\npath = "a.jsonl"\n', "datasets[0].name: '../x' cannot be a dataset's name"),
        (DATASET + DATASET, "datasets[0] and datasets[1] have one name, 'A'"),
        (DATASET + "cap_tokens = 0\n", "datasets[0].cap_tokens: Input should be greater than 0"),
        (DATASET + 'cap_tokens = "many"\n', "datasets[0].cap_tokens: 'many' is no number of tokens"),
        (DATASET + "cap = 1000\n", "unknown key datasets[0].cap; did you mean cap_tokens?"),
    ],
    ids=["slash", "parent folder", "one name twice", "cap 0", "cap no number", "misspelt cap"],
)
def test_a_wrong_dataset(bad: Bad, datasets: str, says: str) -> None:
    bad.configure(datasets=datasets)
    bad.assert_refused("run", code=2, says=[f"{bad.config}: {says}"])


def test_an_unknown_variable(bad: Bad) -> None:
    bad.configure()
    bad.assert_refused(
        "run", code=2, says=["the environment variable TOKENMILL_OUTPU", "TOKENMILL_OUTPUT?"], TOKENMILL_OUTPU="x"
    )


@pytest.mark.parametrize("command", ["run", "enqueue"])
def test_no_datasets(bad: Bad, command: str) -> None:
    bad.configure(datasets="")
    bad.assert_refused(command, code=2, says=["has no [[datasets]]; add one"])


@pytest.mark.parametrize("command", ["recover", "verify", "export"])
def test_no_datasets_to_look_at(bad: Bad, command: str) -> None:
    bad.configure(datasets="")
    bad.assert_refused(*arguments_of(command), code=2, says=["has no [[datasets]]"])


@pytest.mark.parametrize("command", ["run", "enqueue"])
@pytest.mark.parametrize("is_folder", [False, True], ids=["missing", "a folder"])
def test_a_source_that_has_no_file(bad: Bad, command: str, is_folder: bool) -> None:
    bad.configure(redis="redis://127.0.0.1:1")
    source = bad.folder / "a.jsonl"
    source.unlink()
    if is_folder:
        source.mkdir()
    says = (
        f"the source of dataset A cannot be read: {source} has no file of rows"
        if is_folder
        else f"the source of dataset A, {source}, is not a file; correct its path"
    )
    bad.assert_refused(command, code=2, says=[says])


# The command line


@pytest.mark.parametrize("command", ["enqueue", "verify", "export"])
def test_a_dataset_that_is_not_configured(bad: Bad, command: str) -> None:
    bad.configure(redis="redis://127.0.0.1:1")
    bad.assert_refused(*arguments_of(command), "B", code=2, says=["'B'", "A"])


@pytest.mark.parametrize("cap", ["0", "-5", "many", "1.5", ""])
def test_a_cap_that_is_none(bad: Bad, cap: str) -> None:
    bad.configure()
    bad.assert_refused("enqueue", "--cap", cap, code=2, says=["--cap", cap])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["enqeue"], ["'enqeue'", "Did you mean 'enqueue'?", "`tokenmill --help`"]),
        (["zzz"], ["'zzz'", "`tokenmill --help`"]),
        (["--zzz"], ["'--zzz'", "`tokenmill --help`"]),
        (["run", "--zzz"], ["'--zzz'", "`tokenmill run --help`"]),
        (["run", "extra"], ["extra", "`tokenmill run --help`"]),
        (["export", "--cap", "much", "-o", "x"], ["--cap", "`tokenmill export --help`"]),
        (["export", "-o", "x", "--format", "csv"], ["--format", "'csv'"]),
        (["worker", "--concurrency", "0"], ["--concurrency", "`tokenmill worker --help`"]),
        (["worker", "--name", "a/b"], ["'a/b' cannot be a worker's name"]),
        (["flower", "--port", "70000"], ["--port", "`tokenmill flower --help`"]),
        (["simulate", "--vocab-size", "0"], ["vocab_size is 0"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_command_line(bad: Bad, arguments: list[str], says: list[str]) -> None:
    bad.configure()
    bad.assert_refused(*arguments, code=2, says=says)


def test_flower_elsewhere_needs_a_password(bad: Bad) -> None:
    bad.configure()
    bad.assert_refused("flower", "--address", "0.0.0.0", code=2, says=["0.0.0.0", "TOKENMILL_FLOWER_BASIC_AUTH"])


def test_an_embedded_redis_is_not_for_enqueue(bad: Bad) -> None:
    bad.configure()
    bad.assert_refused("enqueue", code=2, says=['redis = "embedded"', "`tokenmill run`"])


def test_status_before_anything_was_run(bad: Bad) -> None:
    bad.configure()
    bad.assert_refused("status", code=4, says=[f"nothing was run yet in {bad.folder / 'out'}", "`tokenmill run`"])


def test_a_demo_does_not_replace_a_folder_that_is_not_a_demos(bad: Bad) -> None:
    done = tokenmill("demo", "-o", ".", folder=bad.folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not an earlier demo's; name another folder with -o" in done.stderr
    assert list(bad.everything()) == ["a.jsonl"]


# What is needed and not there


@pytest.mark.parametrize("command", ["run", "enqueue", "status", "worker", "control", "flower", "recover"])
def test_a_redis_that_does_not_answer(bad: Bad, command: str, closed_port: int) -> None:
    bad.configure(redis=f"redis://:sesame@127.0.0.1:{closed_port}")
    sentence = bad.assert_refused(
        command, code=4, says=[f"Redis at redis://127.0.0.1:{closed_port} does not answer", "correct `redis`"]
    )
    assert "sesame" not in sentence


def test_a_redis_that_does_not_answer_and_a_good_server(bad: Bad, closed_port: int, server: str) -> None:
    bad.configure(redis=f"redis://127.0.0.1:{closed_port}", url=server)
    bad.assert_refused("run", code=4, says=[f"Redis at redis://127.0.0.1:{closed_port} does not answer"])


def test_a_redis_socket_that_is_not_there(bad: Bad) -> None:
    bad.configure(redis=f"unix://{bad.folder / 'none.sock'}")
    bad.assert_refused("run", code=4, says=["none.sock does not answer"])


def test_a_server_that_cannot_be_reached(bad: Bad, closed_port: int, valkey: str) -> None:
    url = f"http://127.0.0.1:{closed_port}"
    bad.configure(url=url)
    bad.assert_refused("run", code=4, says=[f"{url} cannot be reached", "[server] urls"])
    bad.configure(url=url, redis=valkey)
    bad.assert_refused("enqueue", code=4, says=[f"{url} cannot be reached", "[server] urls"])


def test_a_server_that_answers_with_a_page(bad: Bad, page: str) -> None:
    bad.configure(url=page)
    bad.assert_refused("run", code=4, says=[f"{page} answers, but not as SGLang does", "[server] urls"])


@pytest.mark.parametrize("broken", ["missing", "empty", "cut off"])
def test_a_tokenizer_that_does_not_load(bad: Bad, broken: str, server: str) -> None:
    folder = bad.folder / "tokenizer"
    if broken != "missing":
        folder.mkdir()
    if broken == "cut off":
        (folder / "tokenizer.json").write_text("{")
    bad.configure(url=server, tokenizer=folder)
    bad.assert_refused(
        "run", code=4, says=[str(folder), "[tokenizer] path" if broken == "missing" else "does not load"]
    )


def test_an_answer_longer_than_the_context(bad: Bad, simulate: Simulate) -> None:
    bad.configure(url=simulate("--speed", "0", "--context-length", "64", *EXAMPLE_IDS))
    bad.assert_refused("run", code=4, says=["max_new_tokens 64 leaves no room", "context of 64 tokens"])


def test_an_output_that_cannot_be_made(bad: Bad, server: str) -> None:
    bad.configure(url=server)
    (bad.folder / "out").write_text("a file")
    done = tokenmill("run", folder=bad.folder)
    assert (done.returncode, done.stdout) == (4, "")
    (sentence,) = done.stderr.splitlines()
    assert sentence == f"tokenmill: {bad.folder / 'out'}: File exists; correct that, then repeat the command"
    assert (bad.folder / "out").read_text() == "a file"


# Rows


@pytest.mark.timeout(900)
def test_bad_rows_are_rejects_and_cost_nothing_else(bad: Bad, server: str) -> None:
    rows = [
        {"input_ids": [5, 6]},
        {"input_ids": [5, 4096]},
        {"text": "x"},
        {"input_ids": [7] * 140_000},
        {"messages": [{"role": "user", "content": "Wie groß?"}]},
    ]
    lines = [json.dumps(row) for row in rows]
    (bad.folder / "a.jsonl").write_text("\n".join([*lines[:3], "no JSON", *lines[3:]]))
    bad.configure(url=server, top="run = { allowed_failures = 0.7 }")
    done = tokenmill("run", folder=bad.folder)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    rejects = (bad.folder / "out" / "A" / "rejects.jsonl").read_text().splitlines()
    assert sorted((row["index"], row["reason"]) for row in map(json.loads, rejects)) == [
        (1, "id_out_of_range"),
        (2, "no_prompt"),
        (3, "not_json"),
        (4, "too_long"),
    ]
    verified = tokenmill("verify", "--json", folder=bad.folder)
    assert verified.returncode == 0, verified.stderr
    (books,) = json.loads(verified.stdout)["datasets"]
    assert (books["samples"], books["rejects"]) == (2, 4)
    # More than the allowed share: the same, and exit code 3.
    bad.config.write_text(bad.config.read_text().replace("allowed_failures = 0.7", "allowed_failures = 0.5"))
    assert tokenmill("run", folder=bad.folder).returncode == 3
