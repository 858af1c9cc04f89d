"""`workers`: more or fewer workers while a job runs."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from common.options import HELP, config_option, config_path, json_option

if TYPE_CHECKING:
    from common.ledger import Ledger
    from common.settings import Settings

_concurrency = click.option(
    "--concurrency", type=click.IntRange(min=1), help="Answers in flight at most; by default [worker] concurrency."
)


@click.group(context_settings=HELP)
def workers() -> None:
    """The workers of a job: list them, add some on this machine, drain or stop any.

    On other machines start them with `tokenmill worker`. With redis = "embedded" they end with `tokenmill run`.
    """


@contextmanager
def _job(config: Path | None, *, running: bool = False) -> "Iterator[tuple[Settings, Ledger]]":
    from common.errors import UsageError
    from common.ledger import Ledger
    from common.settings import load_settings
    from producer.embedded import answers, reachable

    settings = load_settings(config)
    if running and settings.embedded and not answers(settings.redis_socket):
        raise UsageError('nothing runs on this output; with redis = "embedded" start `tokenmill run` first')
    with reachable(settings):
        ledger = Ledger.connect(settings.redis_url)
        yield settings, ledger
        ledger.close()


@workers.command("list", context_settings=HELP)
@json_option
@config_option
def list_workers(as_json: bool, config: Path | None) -> int:
    """Every worker, and what it is doing.

    States: starting; waiting (nothing was enqueued yet); working; draining (it ends when what is in flight has ended);
    stopping; silent (not heard of for 10 s); dead (its process is gone: `workers stop` takes it from the list, as the
    keeper does by itself when its samples are back); unknown (not heard of, and its pid file is of another machine).
    """
    import msgspec

    from producer import display
    from producer.crew import workers_of

    with _job(config) as (settings, ledger):
        found = workers_of(settings, ledger)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode({"workers": found}) + b"\n")
    else:
        display.StandardOutput().print(display.workers(found))
    return 0


@workers.command(context_settings=HELP)
@click.argument("n", type=click.IntRange(1, 1000))
@_concurrency
@config_option
def add(n: int, concurrency: int | None, config: Path | None) -> int:
    """Start N workers more on this machine, as processes of their own.

    They live on when this terminal ends. Each has a log and a pid file in <output>/logs, and a name that no other
    worker has.
    """
    from producer.crew import add_workers

    with _job(config, running=True) as (settings, ledger):
        add_workers(settings, config_path(config), ledger, n, concurrency, _say)
    return 0


@workers.command(context_settings=HELP)
@click.argument("names", nargs=-1, required=True)
@config_option
def drain(names: tuple[str, ...], config: Path | None) -> int:
    """Let the workers NAMES end when what they have in flight has ended, however long that takes; on any machine."""
    return _end(names, config, "drain")


@workers.command(context_settings=HELP)
@click.argument("names", nargs=-1, required=True)
@config_option
def stop(names: tuple[str, ...], config: Path | None) -> int:
    """Let the workers NAMES end within [worker] drain_seconds, as at TERM; on any machine.

    What is in flight then is aborted on the server, and another worker has it within a second. A worker that is
    draining already ends at once.
    """
    return _end(names, config, "stop")


@workers.command(context_settings=HELP)
@click.argument("n", type=click.IntRange(0, 1000))
@_concurrency
@config_option
def scale(n: int, concurrency: int | None, config: Path | None) -> int:
    """Have N workers in all: add some on this machine, or drain those that came last."""
    from producer import crew

    with _job(config, running=True) as (settings, ledger):
        crew.scale(settings, config_path(config), ledger, n, concurrency, _say)
    return 0


def _end(names: Sequence[str], config: Path | None, order: Literal["drain", "stop"]) -> int:
    from common.errors import UsageError
    from producer.crew import end_worker

    refused: list[str] = []
    with _job(config) as (settings, ledger):
        for name in dict.fromkeys(names):
            try:
                _say(end_worker(settings, ledger, name, order))
            except UsageError as error:
                refused.append(str(error))
    if refused:
        raise UsageError("\n".join(refused))
    return 0


def _say(sentence: str) -> None:
    click.echo(sentence, err=True)
