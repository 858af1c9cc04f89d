"""`run` and `demo`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from common.options import HELP, accept_option, config_option, config_path, force_option

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console


@click.command(context_settings=HELP)
@accept_option
@force_option
@config_option
def run(config: Path | None, accept_changes: bool, force: bool) -> int:
    """The whole job on one machine: until every dataset has reached its cap or its source has ended.

    Run it again to resume, after Ctrl-C, a crash or a power cut: nothing that was written is made a second time. To go
    further, raise a cap_tokens in the configuration and run it again. Progress goes to standard error.
    """
    from producer.run import stderr_console

    return _run(config_path(config), stderr_console(), accept_changes=accept_changes, force=force)


@click.command(context_settings=HELP)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo-out"),
    show_default=True,
    metavar="DIR",
    help="The folder for the demo's files; an earlier demo's is replaced.",
)
def demo(output: Path) -> int:
    """The whole path on this machine, in under a minute: no Redis, no GPU, no model needed.

    Starts an embedded Valkey, a simulated SGLang server, the control process and a worker; answers three datasets of
    example prompts up to their caps; ends with a summary and with what to type next.
    """
    import tempfile

    from producer.demo import clear, closing_words, configure, forget_settings, simulator
    from producer.run import stderr_console

    console = stderr_console()
    forget_settings()
    clear(output.absolute())
    with tempfile.TemporaryDirectory(prefix="tokenmill-demo-") as scratch, simulator(Path(scratch)) as url:
        config = configure(output.absolute(), url)
        click.echo(f"simulated SGLang on {url}, output in {output}", err=True)
        code = _run(config, console)
    if code == 0:
        click.echo(closing_words(_shown(config)), err=True)
    return code


def _run(config: Path, console: "Console", *, accept_changes: bool = False, force: bool = False) -> int:
    from common.ledger import Ledger
    from common.settings import load_settings
    from producer.cli.facts import checked_facts
    from producer.enqueue import choose
    from producer.run import exit_code, failures
    from producer.run import run as run_job
    from producer.sources import refuse_replaced

    settings = load_settings(config)
    datasets = choose(settings, [])
    if not accept_changes:
        refuse_replaced(settings.output, datasets)
    if not settings.embedded:
        Ledger.connect(settings.redis_url).close()
    facts = checked_facts(settings, datasets, accept_changes=accept_changes, force=force)
    last, interrupted = run_job(settings, config, datasets, facts, console)
    _summary(last, settings.output, console)
    if interrupted:
        click.echo(f"interrupted; go on with: tokenmill run -c {_shown(config)}", err=True)
    else:
        for sentence in failures(last, settings.run.allowed_failures):
            click.echo(sentence, err=True)
    return exit_code(last, interrupted, settings.run.allowed_failures)


def _summary(last: "Mapping[str, Any]", output: Path, console: "Console") -> None:
    from producer import display

    if last:
        console.print(display.Datasets(last))
        for line in display.rejects(last):
            click.echo(f"{line}; each with its index: {_shown(output)}/<dataset>/rejects.jsonl", err=True)
    click.echo(f"files: {_shown(output)}/<dataset>/*.jsonl, {_shown(output)}/run.json", err=True)


def _shown(path: Path) -> str:
    """A path as a person would type it here."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
