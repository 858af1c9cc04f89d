"""`plan`: samples, tokens and hours before spending them."""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from common.options import HELP, config_option, json_option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from common.chat_template import Tokenizer
    from common.sections import DatasetSettings
    from common.settings import Settings
    from producer.plan.look import Source
    from producer.report.gather import Gathered


def _finite(_context: click.Context, _option: click.Parameter, given: float | None) -> float | None:
    if given is not None and not math.isfinite(given):
        raise click.BadParameter(f"{given} is no rate; give a number")
    return given


@click.command(context_settings=HELP)
@click.argument("datasets", nargs=-1)
@click.option(
    "--pilot",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ask the servers for N real answers of each dataset that has fewer records, and expect their length; "
    "50 will do. They are thrown away.",
)
@click.option(
    "--tokens-per-second",
    type=click.FloatRange(min=0, min_open=True),
    callback=_finite,
    metavar="N",
    help="Completion tokens a second that all servers make together; by default what was measured.",
)
@click.option("--cap", metavar="TOKENS", help="Plan as if each dataset had this cap, as in 12M; `none`: no cap.")
@json_option
@config_option
def plan(
    datasets: tuple[str, ...],
    pilot: int | None,
    tokens_per_second: float | None,
    cap: str | None,
    as_json: bool,
    config: Path | None,
) -> None:
    """Samples, tokens, hours and disk that DATASETS (all, if none is named) still take, before they are spent.

    Writes nothing, and sends the servers no work without --pilot. Each figure says where it comes from: rows are
    counted, or estimated for large files; prompts are tokenized from all over the source; answers and speed come from
    the records in the output folder, or else from --pilot, the servers or the configuration.

    The times: `alone` is with the servers to itself, `done in` beside the other datasets, by its weight. What is
    answered already is left out, and so are turns of conversations that have stopped, which the ledger is asked for.
    Servers that do not answer are named, and planned without.
    """
    import msgspec

    from common.chat_template import Tokenizer
    from common.registered import registered_names
    from common.settings import load_settings
    from producer.enqueue import capped, model_limits
    from producer.plan.look import look
    from producer.report.gather import gather

    settings = load_settings(config)
    chosen, unasked = _chosen(settings, datasets)
    if cap is not None:
        chosen, unasked = capped(chosen, cap), [one for one in unasked if ": cap_tokens" not in one]
    tokenizer = Tokenizer(settings.tokenizer)
    servers, loads, more = _asked(settings, chosen, tokenizer, pilot=pilot is not None)
    unasked += more
    limits = model_limits(settings, servers, tokenizer)
    sources = [look(settings, dataset, tokenizer, *limits) for dataset in chosen]
    # Of all, for the servers' speed is that of all together; those that are planned come first.
    names = [dataset.name for dataset in chosen]
    run = gather(settings.output, [*names, *sorted(registered_names(settings.output))])
    piloted = _pilot(settings, servers, limits[0], chosen, sources, run, pilot) if pilot and servers else None
    stopped, unknown = _stopped(settings, chosen, run)
    unasked += [unknown] if unknown else []
    made = _made(settings, chosen, sources, run, stopped, piloted, servers, loads, tokens_per_second, unasked)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(made) + b"\n")
    else:
        _print(made)


def _print(made: Any) -> None:
    import shutil

    from producer.monitor.figures import look_of
    from producer.plan.words import lines

    for line in lines(made, min(shutil.get_terminal_size().columns, 100), look_of(sys.stdout)):
        click.echo(line)


def _chosen(settings: "Settings", names: tuple[str, ...]) -> "tuple[list[DatasetSettings], list[str]]":
    """The datasets with the caps and weights that hold, save those that are cancelled; and what is to be said."""
    from common.errors import UsageError
    from producer.enqueue import choose
    from producer.in_force import in_force, notes

    asked = choose(settings, names)
    held = [(dataset, *in_force(settings, dataset)) for dataset in asked]
    kept = [dataset for _, dataset, steering in held if steering.state != "cancelled"]
    if not kept:
        raise UsageError("all of these datasets are cancelled, so that there is nothing to plan; name others")
    return kept, [f"{one}." for one in notes(settings, asked)]


def _asked(
    settings: "Settings", datasets: "Sequence[DatasetSettings]", tokenizer: "Tokenizer", *, pilot: bool
) -> "tuple[Sequence[Any], Sequence[Any], list[str]]":
    """The facts and loads of the servers that answer, and what could not be asked; before a pilot all is looked at."""
    from common.errors import UnavailableError
    from producer.cli.main import load

    try:
        if pilot:
            beginning = load("workers.doctor.start:Beginning")(settings, datasets)
            warnings = beginning.warnings(beginning.report(tokenizer))
            servers = beginning.servers
        else:
            servers, warnings = load("workers.sglang.preflight:preflight")(settings.server.urls, settings.api_key_of)
    except UnavailableError as error:
        without = "no pilot was made, and " if pilot else ""
        told = str(error).replace("\n", ". ")
        return [], [], [f"{told}. So {without}this is planned without the servers: their speed and KV are not known."]
    for sentence in warnings:
        click.echo(f"warning: {sentence}", err=True)
    return servers, load("workers.sglang.pilot:speeds")(servers, settings.api_key_of), []


def _stopped(
    settings: "Settings", datasets: "Sequence[DatasetSettings]", run: "Gathered"
) -> "tuple[Mapping[str, int], str]":
    """The turns of conversations that are not made, by dataset; Redis is asked only where answers were made of any."""
    from producer.plan.stopped import stopped_turns

    pairs = zip(datasets, run.datasets, strict=False)
    names = [dataset.name for dataset, came in pairs if dataset.turns == "all" and came.samples]
    return stopped_turns(settings, names) if names else ({}, "")


def _pilot(
    settings: "Settings",
    servers: "Sequence[Any]",
    vocab_size: int,
    datasets: "Sequence[DatasetSettings]",
    sources: "Sequence[Source]",
    run: "Gathered",
    count: int,
) -> Any:
    """Real answers for the datasets that have fewer records than were asked for; None if all have enough."""
    from producer.cli.main import load

    ask = load("workers.sglang.pilot:Ask")
    asks = []
    for dataset, source, came in zip(datasets, sources, run.datasets, strict=False):
        params = settings.sampling_of(dataset).params()
        for prompt in source.prompts[:count] if came.samples < count else ():  # they are in no order
            own = params if prompt.max_new_tokens is None else params | {"max_new_tokens": prompt.max_new_tokens}
            asks.append(ask(dataset.name, prompt.input_ids, prompt.prompt_tokens, own))
    if not asks:
        return None
    terminal = sys.stderr.isatty()

    def say(ended: int, in_flight: int) -> None:
        text = f"pilot: {ended:,} of {len(asks):,} answers, {in_flight:,} in flight"
        if terminal:
            click.echo(f"\r{text:<60}", nl=ended == len(asks), err=True)
        elif ended == len(asks):
            click.echo(text, err=True)

    return load("workers.sglang.pilot:pilot")(settings, servers, vocab_size, asks, say)


def _made(
    settings: "Settings",
    datasets: "Sequence[DatasetSettings]",
    sources: "Sequence[Source]",
    run: "Gathered",
    stopped: "Mapping[str, int]",
    piloted: Any,
    servers: "Sequence[Any]",
    loads: "Sequence[Any]",
    tokens_per_second: float | None,
    unasked: list[str],
) -> Any:
    import msgspec

    from producer.plan.make import Asked, kv_tokens_of, make_plan, rate_of
    from producer.plan.words import notes

    told = piloted.told if piloted is not None else ()
    asked = [
        Asked(dataset, source, came, [one for one in told if one.dataset == dataset.name], stopped.get(dataset.name, 0))
        for dataset, source, came in zip(datasets, sources, run.datasets, strict=False)
    ]
    rate = rate_of(tokens_per_second, run, loads, piloted)
    made = make_plan(settings, asked, rate, servers, kv_tokens_of(servers, loads))
    return msgspec.structs.replace(made, notes=notes(made, asked, unasked, len(servers)))
