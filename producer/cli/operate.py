"""`enqueue` and `status`."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from common.options import HELP, accept_option, config_option, force_option, json_option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.ledger import Ledger
    from common.sections import DatasetSettings
    from common.settings import Settings


@click.command(context_settings=HELP)
@click.argument("datasets", nargs=-1)
@click.option("--cap", metavar="TOKENS", help="A cap in place of the configured one, as in 12M; `none`: no cap.")
@click.option("--wait", is_flag=True, help="Stay, show progress, and leave when the datasets have ended.")
@click.option("--dry-run", "dry", is_flag=True, help="Show what would be sent, and send nothing; needs no Redis.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: one JSON object on standard output.")
@accept_option
@force_option
@config_option
def enqueue(
    datasets: tuple[str, ...],
    cap: str | None,
    wait: bool,
    dry: bool,
    as_json: bool,
    config: Path | None,
    accept_changes: bool,
    force: bool,
) -> int:
    """Register DATASETS (all that are configured, if none is named) and start feeding them.

    Workers and control must run for anything to happen: `tokenmill worker`, `tokenmill control`. Enqueueing a dataset
    again is safe: it takes over a changed cap, and answers no row twice.

    A dry run looks at the first 300 rows of each dataset, and at some from all over a large one. It shows their
    layouts, three prompts as the model would get them, with ⟦ ⟧ around every control token, how long prompts are, and
    how many rows would be rejected and why.
    """
    from common.broker import make_celery
    from common.errors import UsageError
    from common.ledger import Ledger
    from common.settings import load_settings
    from producer.at_work import nobody_works
    from producer.cli.facts import checked_facts
    from producer.enqueue import ask_for_a_tick, capped, choose
    from producer.run import begin
    from producer.sources import refuse_replaced

    settings = load_settings(config)
    chosen = choose(settings, datasets)
    chosen = chosen if cap is None else capped(chosen, cap)
    if as_json and not dry:
        raise UsageError("--json goes with --dry-run; `tokenmill status --json` tells what a job is doing")
    if dry:
        from producer.cli.dry_run import show

        return show(settings, chosen, as_json=as_json)
    if settings.embedded:
        raise UsageError('enqueue needs a shared Redis; with redis = "embedded" use `tokenmill run`')
    if not accept_changes:
        refuse_replaced(settings.output, chosen)
    ledger = Ledger.connect(settings.redis_url)
    facts = checked_facts(settings, chosen, accept_changes=accept_changes, force=force)
    for line in begin(settings, ledger, chosen, facts):
        click.echo(line, err=True)
    ask_for_a_tick(make_celery("tokenmill", settings))
    if missing := nobody_works(ledger):
        click.echo(f"! {missing}", err=True)
    return _wait(settings, ledger, chosen, facts) if wait else 0


def _wait(
    settings: "Settings", ledger: "Ledger", chosen: "Sequence[DatasetSettings]", facts: "Mapping[str, Any]"
) -> int:
    from producer import display
    from producer.run import exit_code, failures, restore_books, stderr_console, watch

    console = stderr_console()

    def restore(lost: set[str]) -> None:
        restore_books(settings, ledger, [one for one in chosen if one.name in lost], facts, console)

    names = {one.name for one in chosen}
    last = watch(ledger, names, lambda: None, restore, console)
    ours = {**last, "datasets": [d for d in last["datasets"] if d["name"] in names]}
    for line in (*display.rejects(ours), *display.stopped(ours), *failures(ours, settings.run.allowed_failures)):
        click.echo(line, err=True)
    return exit_code(ours, False, settings.run.allowed_failures)


@click.command(context_settings=HELP)
@json_option
@click.option("--follow", is_flag=True, help="Print again every 2 s until Ctrl-C.")
@config_option
def status(as_json: bool, follow: bool, config: Path | None) -> int:
    """What every dataset, worker and server is doing, once.

    States: open (being fed and answered), closing (its cap is near, answers in flight are awaited), capped, exhausted
    (its source has ended), paused, cancelled, halted (something was wrong with the answers), failed (its source cannot
    be read).
    """
    import msgspec

    from common.ledger import Ledger
    from common.settings import load_settings
    from producer import display
    from producer.embedded import reachable
    from producer.restore import trouble
    from producer.status import snapshot

    settings = load_settings(config)
    with reachable(settings):
        ledger = Ledger.connect(settings.redis_url)
        while True:
            seen = snapshot(ledger)
            seen["troubles"] = [*trouble(settings, ledger), *seen["troubles"]]
            if as_json:
                sys.stdout.buffer.write(msgspec.json.encode(seen) + b"\n")
                sys.stdout.flush()
            else:
                display.StandardOutput().print(display.Page(seen))
            if not follow:
                return 0
            time.sleep(2)
