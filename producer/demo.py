"""`tokenmill demo`: the whole path on this machine, with a simulated server and the project's own prompts."""

import contextlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from common.errors import TokenmillError, UsageError
from common.settings import ENV_PREFIX, RESERVED_ENV
from producer.children import Child

_MARK = "# Written by `tokenmill demo`"
# Decode runs twelve times as fast as a real server's, so that the table can be watched for some ten seconds.
_PACE = ("--speed", "12", "--mean-tokens", "380", "--cv", "0.5", "--max-running-requests", "12")
# The tokenizer of examples/ has 4,096 ids; those from 4088 on are control tokens: <|im_end|> 4090, </think> 4093.
_IDS = ("--vocab-size", "4096", "--last-id", "4087", "--end-token-id", "4090", "--think-end-token-id", "4093")
_START_SECONDS = 30.0

_CONFIG = """\
{mark}; a real job's configuration looks the same. docs/configuration.md has the keys.
output = "."
redis  = "embedded"

[server]
urls = ["{url}"]

[tokenizer]
path = "{examples}/tokenizer"

[sampling]
max_new_tokens = 1024
temperature = 1.0

[worker]
concurrency = 12

[[datasets]]
name = "chat"
path = "{examples}/prompts/chat.jsonl"
cap_tokens = 40_000

[[datasets]]
name = "code"
path = "{examples}/prompts/code.jsonl"
cap_tokens = 25_000

[[datasets]]
name = "tools"
path = "{examples}/prompts/tools.jsonl"
cap_tokens = 25_000
"""


_NEXT = """
next:
  {program} verify -c {config}   every line checked, and the ledger against the files
  {program} status -c {config}   the same figures again
  {program} show tools -c {config}   the last answer, decoded
  {program} export -c {config} --format ids -o DIR   training files with loss masks
For a real job write tokenmill.toml (docs/configuration.md has its keys), then `{program} run`."""


def program() -> str:
    """What to type for `tokenmill` here: where the shell would not find this one, the path that it was started by.

    `make demo` puts the command into .venv/bin, which is on nobody's PATH.
    """
    places = (Path(sys.argv[0]), Path(sys.executable).with_name("tokenmill"))  # the second for python -m
    started = next((place.absolute() for place in places if place.name == "tokenmill" and place.is_file()), None)
    found = shutil.which("tokenmill")
    if started is None or (found and started.samefile(found)):
        return "tokenmill"
    here = Path.cwd()
    if not started.is_relative_to(here):
        return shlex.quote(str(started))
    # A shell takes a name without a slash for one on the PATH.
    return shlex.quote(f"./{started.name}" if started.parent == here else str(started.relative_to(here)))


def closing_words(config: str) -> str:
    """What to type next; `config` is the demo's configuration as a person would type it."""
    return _NEXT.format(program=program(), config=config)


def examples() -> Path:
    """The example prompts and tokenizer: beside the packages in a checkout, inside this one when installed."""
    installed = Path(__file__).with_name("_examples")
    return installed if installed.is_dir() else Path(__file__).parents[1] / "examples"


def forget_settings() -> None:
    """Drop TOKENMILL_ settings from the environment: a demo must not write into a real job's output."""
    for name in list(os.environ):
        if name.startswith(ENV_PREFIX) and name not in RESERVED_ENV:
            del os.environ[name]


def clear(folder: Path) -> None:
    """Make room for a demo: an earlier demo's folder is removed; anything else is left alone, with a UsageError."""
    config = folder / "tokenmill.toml"
    if folder.exists() and any(folder.iterdir()):
        if not config.is_file() or not config.read_text(encoding="utf-8").startswith(_MARK):
            raise UsageError(f"{folder} exists and is not an earlier demo's; name another folder with -o")
        shutil.rmtree(folder)


def configure(folder: Path, url: str) -> Path:
    """The demo's folder with its configuration, whose path is the answer."""
    config = folder / "tokenmill.toml"
    folder.mkdir(parents=True, exist_ok=True)
    config.write_text(_CONFIG.format(mark=_MARK, url=url, examples=examples()), encoding="utf-8")
    return config


@contextlib.contextmanager
def simulator(folder: Path) -> Iterator[str]:
    """A simulated server of its own for the demo; yields its address."""
    port_file = folder / "port"
    arguments = ["simulate", "--port", "0", "--port-file", str(port_file), *_PACE, *_IDS]
    child = Child("the simulated server", arguments, folder / "none", folder / "server.log")
    child.start()
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not port_file.exists():
            if time.monotonic() > deadline or child.wait(0.05):
                raise TokenmillError(f"the simulated server did not start{child.last_words()}")
        yield f"http://127.0.0.1:{port_file.read_text().strip()}"
    finally:
        child.terminate()
        if not child.wait(10):
            child.kill()
