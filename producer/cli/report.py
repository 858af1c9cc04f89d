"""`report`."""

from pathlib import Path

import click

from common.options import HELP, config_option


@click.command(context_settings=HELP)
@click.argument("datasets", nargs=-1)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("report.html"),
    show_default=True,
    metavar="FILE",
    help="The page; an earlier one of that name is replaced.",
)
@config_option
def report(datasets: tuple[str, ...], output: Path, config: Path | None) -> None:
    """One HTML page on DATASETS (all, if none is named): what was asked and what came. It needs no network.

    Tokens against the caps over time, throughput, lengths of the answers, how they ended, flags, rejects, servers and
    versions; its plots are SVG. Reads the files of the run alone, also while it goes on.
    """
    from common.durable import replace_file
    from common.settings import load_settings
    from common.words import counted
    from producer.cli.chosen import chosen
    from producer.report.gather import gather
    from producer.report.page import render

    settings = load_settings(config)
    run = gather(settings.output, chosen(settings, datasets))
    replace_file(output.absolute(), [render(run).encode()])
    answers = sum(one.samples for one in run.datasets)
    click.echo(f"{output}: {counted(answers, 'answer')} of {counted(len(run.datasets), 'dataset')}", err=True)
