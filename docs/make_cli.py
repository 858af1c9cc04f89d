#!/usr/bin/env python3
"""Writes docs/cli.md from the commands' own --help.

    python docs/make_cli.py

A test says when it must be run again.
"""

import sys
from pathlib import Path

import click

from producer.cli.main import cli

FILE = Path(__file__).with_name("cli.md")
_WIDTH = 100
_HEAD = """\
# Commands

<!-- Made by docs/make_cli.py from the commands' own --help; change the commands, not this page. -->

Data goes to standard output, everything else to standard error. Every command reads `tokenmill.toml` in the current
folder, or what `-c` or `TOKENMILL_CONFIG` names; `demo` and `simulate` need none.

| exit code | means |
| --- | --- |
| 0 | done |
| 1 | a fault of tokenmill; the traceback says where |
| 2 | the command line or the configuration is wrong |
| 3 | too many samples were rejected (`[run] allowed_failures`), a dataset halted or failed, or files are bad |
| 4 | something needed is missing or refuses: Redis, a server, the tokenizer, a file's rights |
| 10 | of `tokenmill worker` alone: `workers drain` or `stop` has ended it, and it is not to be started again |
| 130 | interrupted; the same command goes on |
| 141 | whoever read its output has gone, as in `\\| head` |
"""


def page() -> str:
    """The whole page, with a section for each command in the order of `tokenmill --help`."""
    root = _context(cli, "tokenmill", None)
    parts = [_HEAD, _section("tokenmill", root)]
    for name in cli.list_commands(root):
        command = cli.get_command(root, name)
        assert command is not None
        context = _context(command, name, root)
        parts.append(_section(f"tokenmill {name}", context))
        if isinstance(command, click.Group):
            subcommands = ((one, command.commands[one]) for one in command.list_commands(context))
            parts += [_section(f"tokenmill {name} {one}", _context(of, one, context)) for one, of in subcommands]
    return "\n".join(parts)


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    settings = {**command.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    return click.Context(command, parent, name, **settings)


def _section(title: str, context: click.Context) -> str:
    text = "\n".join(line.rstrip() for line in context.get_help().splitlines())
    return f"## {title}\n\n```text\n{text}\n```\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(0 if FILE.read_text(encoding="utf-8") == page() else "docs/cli.md is stale: python docs/make_cli.py")
    FILE.write_text(page(), encoding="utf-8")
