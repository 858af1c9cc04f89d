"""Options that commands of both sides share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

# For every command: click remembers the help option of the first context that a command runs in.
HELP = {"help_option_names": ["-h", "--help"]}

config_option: Decorator = click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The configuration file; by default TOKENMILL_CONFIG, else tokenmill.toml in this folder.",
)
json_option: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on standard output, for programs."
)
accept_option: Decorator = click.option(
    "--accept-changes",
    is_flag=True,
    help="Go on although the model, tokenizer or sampling is not what the output was begun with (run.json keeps both), "
    "or a source file was replaced (what is answered is kept by its index, all other rows are read from the new file).",
)
force_option: Decorator = click.option(
    "--force", is_flag=True, help="Go on although something is wrong that `tokenmill doctor` finds; run.json says so."
)


def config_path(given: Path | None = None) -> Path:
    """The configuration file's absolute path: -c, else TOKENMILL_CONFIG, else tokenmill.toml in this folder."""
    return Path(given or os.environ.get("TOKENMILL_CONFIG") or "tokenmill.toml").absolute()
