"""`pause`, `resume`, `cap`, `weight` and `cancel`: steering the datasets of a job while it runs."""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from common.options import HELP, config_option

if TYPE_CHECKING:
    from common.ledger import Ledger
    from common.settings import Settings

_UNITS = {"": 1, "k": 1000, "M": 10**6, "G": 10**9}


def tokens_of(text: str) -> int | None:
    """`12000000`, `12_000_000`, `12M` or `2.5M` in tokens, `none` for no cap; raises UsageError on anything else."""
    from common.errors import UsageError

    if text == "none":
        return None
    match = re.fullmatch(r"(-?[0-9][0-9_,]*(?:\.[0-9]+)?)([kMG]?)", text)
    tokens = float(re.sub("[_,]", "", match[1])) * _UNITS[match[2]] if match else 0.5
    if tokens != int(tokens):
        raise UsageError(f"{text!r} is no number of tokens; write it as 12000000, 12_000_000 or 12M")
    return int(tokens)


def _each(names: Sequence[str], config: Path | None, act: "Callable[[Settings, Ledger, str], str]") -> int:
    """Do `act` to each dataset; what cannot be done to one is said, and keeps no other from it."""
    from common.errors import UsageError
    from common.ledger import Ledger
    from common.settings import load_settings
    from producer.embedded import reachable
    from producer.steer import known

    settings = load_settings(config)
    refused: list[str] = []
    with reachable(settings):
        ledger = Ledger.connect(settings.redis_url)
        for name in known(ledger, names):
            try:
                click.echo(act(settings, ledger, name), err=True)
            except UsageError as error:
                refused.append(str(error))
        ledger.close()
    if refused:
        raise UsageError("\n".join(refused))
    return 0


@click.command(context_settings=HELP)
@click.argument("datasets", nargs=-1, required=True)
@config_option
def pause(datasets: tuple[str, ...], config: Path | None) -> int:
    """Start nothing new of DATASETS; what is in flight ends and counts.

    A pause outlives restarts and Redis; `tokenmill resume` ends it. The other datasets get the slots.
    """
    from producer import steer

    return _each(datasets, config, steer.pause)


@click.command(context_settings=HELP)
@click.argument("datasets", nargs=-1, required=True)
@config_option
def resume(datasets: tuple[str, ...], config: Path | None) -> int:
    """Open DATASETS again that are paused, halted or failed."""
    from producer import steer

    return _each(datasets, config, steer.resume)


@click.command(context_settings=HELP)
@click.argument("words", nargs=-1, required=True, metavar="DATASET... [TOKENS|none]")
@click.option("--add", metavar="TOKENS", help="Raise the cap by so many tokens, in place of setting it; -1M lowers it.")
@click.option("--seen", metavar="TOKENS", help="Only if the cap still is this, as you saw it.")
@config_option
def cap(words: tuple[str, ...], add: str | None, seen: str | None, config: Path | None) -> int:
    """Set the cap of each DATASET: `tokenmill cap B1 12M`, `tokenmill cap B1 B2 --add 500k`, `tokenmill cap B1 none`.

    A cap that is raised opens a capped dataset again. Below what is spent nothing is taken away: nothing new is
    started, what is in flight ends and counts, and the dataset ends as capped. A cap set here holds over restarts,
    until [[datasets]] cap_tokens is changed in the configuration.
    """
    from common.errors import UsageError
    from producer import steer

    if add is not None:
        more = tokens_of(add)
        if more is None or seen is not None:
            raise UsageError("--add takes a number of tokens, and does not go with --seen")
        return _each(words, config, lambda settings, ledger, name: steer.add_to_cap(settings, ledger, name, more))
    *names, last = words
    if not names:
        raise UsageError(f"name a dataset and its cap, as in `tokenmill cap {last} 12M`, or use --add")
    cap_tokens = tokens_of(last)
    if cap_tokens is not None and cap_tokens < 1:
        raise UsageError("a cap is 1 token at least; `tokenmill pause` and `tokenmill cancel` stop a dataset")
    saw = None if seen is None else steer.Seen(tokens_of(seen))
    return _each(names, config, lambda settings, ledger, name: steer.set_cap(settings, ledger, name, cap_tokens, saw))


@click.command(context_settings=HELP)
@click.argument("datasets", nargs=-1, required=True)
@click.argument("weight", type=click.FloatRange(min=0, min_open=True))
@config_option
def weight(datasets: tuple[str, ...], weight: float, config: Path | None) -> int:
    """Give each DATASET the share WEIGHT of the slots, as in `tokenmill weight B1 2`; it holds as a cap does."""
    import math

    from common.errors import UsageError
    from producer import steer

    if not math.isfinite(weight):
        raise UsageError("a weight is a number above 0, as in 0.5 or 2")
    return _each(datasets, config, lambda settings, ledger, name: steer.set_weight(settings, ledger, name, weight))


@click.command(context_settings=HELP)
@click.argument("datasets", nargs=-1, required=True)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@config_option
def cancel(datasets: tuple[str, ...], yes: bool, config: Path | None) -> int:
    """End DATASETS for good: queued samples are withdrawn, what is in flight ends and counts, all records stay.

    It cannot be taken back, not by a restart either; to stop for a while use `tokenmill pause`.
    """
    from producer import steer

    if not yes and sys.stdin.isatty():
        click.confirm(f"End {', '.join(datasets)} for good?", abort=True, err=True)
    return _each(datasets, config, steer.cancel)
