"""The command line explains itself: at once, for every command, in whole sentences, and in docs/cli.md."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from common.ledger import Ledger
from producer.cli.main import cli
from tests.acceptance.commands import TOKENMILL, environment, tokenmill
from tests.conftest import PATIENCE_SECONDS, REPO, SHARED
from tests.integration.status_steps import register
from tests.lines import write_config

COMMANDS = [
    "demo",
    "run",
    "enqueue",
    "status",
    "top",
    "show",
    "pause",
    "resume",
    "cap",
    "weight",
    "cancel",
    "workers",
    "servers",
    "worker",
    "control",
    "flower",
    "doctor",
    "plan",
    "verify",
    "rejects",
    "recover",
    "export",
    "report",
    "audit",
    "reconstruct",
    "simulate",
]
# In this version, and not in the design.
BEYOND = {"servers", "rejects", "weight", "report", "reconstruct"}
# In the design, and not in this version yet.
LATER: set[str] = set()


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def test_help_lists_every_command_and_what_it_does(tmp_path: Path) -> None:
    done = tokenmill("--help", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    listed = done.stdout.partition("Commands:\n")[2]
    names = [line.split()[0] for line in listed.splitlines() if line.startswith("  ") and not line.startswith("   ")]
    assert names == COMMANDS
    assert list(tmp_path.iterdir()) == []


def test_help_loads_nothing_that_takes_time(tmp_path: Path) -> None:
    probe = (
        "import sys\n"
        "from producer.cli.main import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stderr.split())
    assert "click" in loaded
    heavy = {
        "celery",
        "kombu",
        "redis",
        "transformers",
        "tokenizers",
        "pydantic",
        "rich",
        "aiohttp",
        "httpx",
        "msgspec",
    }
    assert loaded & heavy == set()


def test_without_a_command_it_shows_its_help(tmp_path: Path) -> None:
    done = tokenmill(folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: tokenmill [OPTIONS] COMMAND")


def test_it_knows_its_version(tmp_path: Path) -> None:
    done = tokenmill("--version", folder=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("tokenmill, version ")


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_every_command_explains_itself(name: str, option: str) -> None:
    result = CliRunner().invoke(cli, [name, option])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: cli {name} ")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_whole_sentences(name: str) -> None:
    explained = command(name)
    assert explained.help
    # A table stands behind a \b, which keeps its lines.
    prose = (part for part in explained.help.split("\n\n") if not part.strip(" ").startswith("\b"))
    paragraphs = [" ".join(part.split()) for part in prose]
    texts = [*paragraphs, *(_option_help(one) for one in explained.params if isinstance(one, click.Option))]
    for text in texts:
        assert text[0].isupper(), text
        assert text.endswith("."), text


def _option_help(option: click.Option) -> str:
    assert option.help, f"{option.opts} has no help"
    return option.help


def test_hidden_commands_are_there_and_in_no_list() -> None:
    for name in ("keeper", "feeder"):
        assert command(name).hidden
        assert name not in cli.list_commands(click.Context(cli))


def test_the_designs_commands_are_there() -> None:
    design = SHARED / "DESIGN.md"
    if not design.exists():
        pytest.skip("the design lies beside the project, and is not there")
    table = design.read_text().partition("| command | does |")[2].partition("\n\n")[0]
    named = set()
    for line in table.splitlines():
        for text in line.split("|")[1:2]:
            for words in text.split("`")[1::2]:
                first, *rest = words.removeprefix("tokenmill ").split()
                named.add(first)
                # `pause / resume / cap / cancel DATASET` stands for four commands; `workers list / add N` for one.
                if rest[:1] == ["/"]:
                    named.update(word for word in rest if word.islower())
    assert {"demo", "run", "export", "simulate"} <= named
    assert named - LATER == set(COMMANDS) - BEYOND


def test_the_page_in_docs_is_what_the_commands_say() -> None:
    # In a process of its own: click keeps the help option of the first context that a command was run in.
    check = subprocess.run(
        [sys.executable, "docs/make_cli.py", "--check"], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stderr


def test_a_reader_that_has_seen_enough_gets_no_traceback(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*TOKENMILL, "--help"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()  # what `| head -0` does, long before Python has started
    assert process.stderr is not None
    with process.stderr:
        said = process.stderr.read()
    assert (process.wait(PATIENCE_SECONDS), said) == (1, "")


def test_debug_shows_where_an_error_comes_from(tmp_path: Path) -> None:
    done = tokenmill("--debug", "run", folder=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ConfigError" in done.stderr


@pytest.mark.parametrize("command", ["cap --help", "status", "workers list", "servers list", "status --json"])
def test_a_command_whose_reader_has_gone_ends_without_a_word(
    tmp_path: Path, valkey: str, ledger: Ledger, command: str
) -> None:
    """`| head` made it leave with 1, the code of a fault of ours."""
    write_config(tmp_path, valkey)
    register(ledger, "A")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*TOKENMILL, *command.split()],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
