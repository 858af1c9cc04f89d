"""`show`: one sample, decoded."""

import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from common.options import HELP, config_option, json_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.chat_template import Tokenizer
    from common.ledger import Ledger
    from common.settings import Settings
    from producer.monitor.grid import Line


@click.command(context_settings=HELP)
@click.argument("dataset")
@click.argument("index", type=click.IntRange(min=0), required=False)
@click.option("--flag", help="The last answer that has this flag, as in truncated.")
@click.option("--random", "drawn", is_flag=True, help="Any answer; with --flag any that has the flag.")
@click.option("--ids", is_flag=True, help="The token ids, too.")
@json_option
@config_option
def show(
    dataset: str, index: int | None, flag: str | None, drawn: bool, ids: bool, as_json: bool, config: Path | None
) -> int:
    """One sample of DATASET as the model read and wrote it: the one at INDEX, else the last that was answered.

    INDEX is the row's position in its source, counted from 0; with turns = "all" it is 64 times that, plus the number
    of the turn, from 0. Think blocks, answers and tool calls stand under headings
    of their own, and control tokens between ⟦ and ⟧. Where there is no record, it says why: rejected, queued, in
    flight, superseded or not there. A record that was taken back is not shown.

    A record is found by its time, so that little is read of large files; a rare flag is searched for from the end.
    """
    import msgspec

    from common.chat_template import Tokenizer
    from common.errors import UsageError
    from common.settings import load_settings
    from producer.monitor.looking import Looker
    from producer.monitor.sample import read_sample, told

    if index is not None and (flag or drawn):
        raise UsageError("an INDEX names one sample; --flag and --random choose one: use either")
    settings = load_settings(config)
    with ExitStack() as stack:
        looker = Looker(settings, _ledger(settings, stack), dataset)
        if index is not None:
            found = looker.by_index(index)
            entry, superseded = found.entry, found.superseded
            assert entry is not None
        else:
            entry, superseded = looker.drawn(flag) if drawn else looker.newest(flag), ()
    tokenizer = Tokenizer(settings.tokenizer)
    _warn_of_another_tokenizer(settings, tokenizer)
    sample = read_sample(entry, tokenizer, superseded)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(sample.as_json(ids=ids)) + b"\n")
    else:
        _print(told(sample, ids=ids))
    return 0


def _ledger(settings: "Settings", stack: ExitStack) -> "Ledger | None":
    """The ledger for as long as `stack` lasts, or None: the files alone can be looked at where Redis is away."""
    from common.errors import RedisUnavailable
    from common.ledger import Ledger
    from producer.embedded import reachable

    try:
        stack.enter_context(reachable(settings))
        return stack.enter_context(closing(Ledger.connect(settings.redis_url)))
    except RedisUnavailable as error:
        click.echo(f"the files alone are looked at: {error}", err=True)
        return None


def _warn_of_another_tokenizer(settings: "Settings", tokenizer: "Tokenizer") -> None:
    from common.run_file import read_run_file

    made_with = read_run_file(settings.output) or {}
    now = tokenizer.fingerprint()["tokenizer_sha256"]
    if made_with.get("tokenizer_sha256", now) != now:
        click.echo("warning: the texts may be wrong: the ids were made with another tokenizer", err=True)


def _print(lines: "Sequence[Line]") -> None:
    """Whole lines: the terminal breaks long ones, and a pipe gets them as they are."""
    from rich.color import ColorSystem
    from rich.console import Console
    from rich.style import Style

    from producer.monitor.grid import STYLES

    console = Console()
    colours = None if console.color_system is None or console.no_color else ColorSystem.STANDARD
    for line in lines:
        click.echo("".join(Style.parse(STYLES[style]).render(text, color_system=colours) for text, style in line))
