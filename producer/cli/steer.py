"""`pause`, `resume`, `cap`, `weight` and `cancel`: steering the datasets of a job while it runs."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from common.amounts import tokens_of
from common.options import HELP, config_option

if TYPE_CHECKING:
    from common.ledger import Ledger
    from common.settings import Settings


def _each(
    names: Sequence[str],
    config: Path | None,
    act: "Callable[[Settings, Ledger, str], str]",
    allowed: "Callable[[Sequence[str]], bool]" = lambda _: True,
) -> int:
    """Do `act` to each dataset; what cannot be done to one is said, and keeps no other from it.

    Nothing is done unless all are known, and it is `allowed`.
    """
    from common.errors import UsageError
    from common.ledger import OPEN_STATES, Ledger
    from common.settings import load_settings
    from producer.at_work import nobody_works
    from producer.embedded import reachable
    from producer.steer import known

    settings = load_settings(config)
    refused: list[str] = []
    with reachable(settings):
        ledger = Ledger.connect(settings.redis_url)
        chosen = known(ledger, names)
        if not allowed(chosen):
            click.echo("nothing was changed", err=True)
            return 0
        for name in chosen:
            try:
                click.echo(act(settings, ledger, name), err=True)
            except UsageError as error:
                refused.append(str(error))
        missing = nobody_works(ledger)
        if missing and any(ledger.snapshot(name).state in OPEN_STATES for name in chosen):
            click.echo(f"! {missing}", err=True)
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

    It cannot be taken back, not by a restart either, so it asks first; without a terminal it is done with -y alone. To
    stop for a while use `tokenmill pause`.
    """
    from common.errors import UsageError
    from producer import steer

    if not yes and not sys.stdin.isatty():
        raise UsageError(
            f"cancel ends {', '.join(datasets)} for good, and there is no terminal to ask on; add -y to do it all the "
            "same, or use `tokenmill pause`"
        )
    return _each(datasets, config, steer.cancel, lambda names: yes or _confirmed(f"End {', '.join(names)} for good?"))


def _confirmed(question: str) -> bool:
    """What a person answers; Ctrl-C and the end of the input leave with 130."""
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        click.echo("\nnothing was changed", err=True)
        raise click.exceptions.Exit(130) from None
