"""`export`."""

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from common.amounts import tokens_of
from common.errors import UsageError
from common.options import HELP, config_option

if TYPE_CHECKING:
    from common.settings import Settings
    from producer.export.export import MakeWriter
    from producer.export.push import Target
    from producer.export.texts import Texts

_T = TypeVar("_T")
TEXTS = ("messages", "sharegpt", "openai-batch")
FORMATS = ("ids", "parquet", "arrow", *TEXTS)
STATES = ("open", "paused", "capped", "exhausted", "halted", "failed", "cancelled")
FINISH_REASONS = ("stop", "length")


class _Tokens(click.ParamType[tuple[str, int | None]]):
    """`A=10M`, or `10M` for all datasets (key ""); None for `none`, no cap."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int | None]:
        name, _, number = str(value).rpartition("=")
        try:
            tokens = tokens_of(number)
        except UsageError as error:
            self.fail(str(error), param, ctx)
        if tokens is not None and tokens < 1:
            self.fail(f"{value!r} leaves nothing to learn; write 1 or more, as 12000000, 12_000_000 or 12M", param, ctx)
        return name, tokens


class _Share(click.ParamType[tuple[str, float]]):
    """`A=2`."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        name, _, number = str(value).rpartition("=")
        try:
            share = float(number)
        except ValueError:
            share = 0
        if not name or not 0 < share < float("inf"):
            self.fail(f"{value!r} is no dataset with its share; write DATASET=WEIGHT, as in A=2", param, ctx)
        return name, share


@click.command(context_settings=HELP, short_help="Training files with loss masks.")
@click.argument("datasets", nargs=-1, metavar="[DATASET]...")
@config_option
@click.option("--format", "layout", type=click.Choice(FORMATS), default="ids", show_default=True, help="See above.")
@click.option("-o", "--output", "folder", type=click.Path(path_type=Path), metavar="DIR", help="A new or empty folder.")
@click.option("--overwrite", is_flag=True, help="Replace the earlier export in DIR.")
@click.option("--dry-run", is_flag=True, help="Print the counts, write nothing.")
@click.option(
    "--state",
    "states",
    type=click.Choice(STATES),
    multiple=True,
    metavar="STATE",
    help=f"Only datasets in this state, or one of these: {', '.join(STATES)}.",
)
@click.option("--flag", "flags", multiple=True, metavar="FLAG", help="Only answers with this flag (each, if repeated).")
@click.option("--no-flag", "no_flags", multiple=True, metavar="FLAG", help="No answer with this flag.")
@click.option("--finish-reason", "finish_reasons", multiple=True, metavar="REASON", help="Only these: stop, length.")
@click.option("--min-tokens", type=click.IntRange(0), default=0, help="Only answers of so many tokens at least.")
@click.option("--max-tokens", type=click.IntRange(1), help="Only answers of so many tokens at most.")
@click.option("--max-length", type=click.IntRange(2), help="Longest row, in tokens; see --too-long.")
@click.option(
    "--too-long",
    type=click.Choice(["drop", "cut", "split"]),
    default="drop",
    show_default=True,
    help="What becomes of rows beyond --max-length.",
)
@click.option(
    "--cap",
    "caps",
    type=_Tokens(),
    multiple=True,
    metavar="[DATASET=]N",
    help="Tokens of each dataset to train on at most, as 12000000 or 12M.",
)
@click.option(
    "--mix",
    type=_Share(),
    multiple=True,
    metavar="DATASET=W",
    help="Shares of the tokens to train on; datasets without one are left out.",
)
@click.option("--dedupe", is_flag=True, help="Of equal prompts with equal answers, one.")
@click.option("--join-turns", is_flag=True, help="A conversation is one row, where its template allows that.")
@click.option("--shuffle", type=int, metavar="SEED", help="Mix all datasets; by default source order, one by one.")
@click.option(
    "--eval",
    "held_out",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    metavar="SHARE",
    help="Prompts held out, with all their answers; --cap and --mix leave these alone.",
)
@click.option("--push", metavar="URL", help="Copy it there, too: hf://datasets/OWNER/NAME, s3://…, gs://….")
@click.option("--shard-rows", type=click.IntRange(1), help="Rows of a parquet or arrow file at most.")
@click.option("--shard-bytes", type=click.IntRange(1), default=512 << 20, help="Its bytes, about.")
def export(datasets: Sequence[str], config: Path | None, layout: str, folder: Path | None, **options: Any) -> None:
    """Write the answers of each DATASET (by default all) as training files into the folder DIR.

    \b
    ids           ids/train.jsonl: id, input_ids, loss_mask and flat columns; for SpecForge's
                  data.prompts_path (the file) and speculators' prepare-data (the folder ids)
    parquet       parquet/train-*.parquet, with a dataset card
    arrow         arrow/train, for datasets.load_from_disk, with seq_len
    messages      messages/train.jsonl: conversation_id, messages; for Model-Optimizer
    sharegpt      sharegpt/train.json: id, conversations of human and gpt, one question
                  and its answer; for EAGLE
    openai-batch  openai-batch/train.input.jsonl and train.output.jsonl: requests and
                  answers of OpenAI's batches

    The last three are texts. Each row is read back from its ids with the tokenizer of the configuration and rendered
    again: one that does not come out with the same ids is left out and counted, by reason. Rows cannot be cut, split
    or joined there.

    The loss mask is 0 on the prompt and 1 on what the model wrote, its end token included. Beside the rows stand
    token_counts.json (how often each id is learnt, for SpecForge's vocabulary mapping) and manifest.json (what is in
    there, and from what; `tokenmill verify DIR` checks it). Trainers cut longer rows in silence, SpecForge at 2,048
    and speculators at 8,192 tokens unless told otherwise: tell them the longest row, which is printed here.

    \b
    tokenmill export -o train --no-flag truncated --eval 0.02 --shuffle 1
    tokenmill export chat code --mix chat=1 --mix code=2 --cap chat=5M --format parquet -o train

    The same records, options and seed give the same bytes. Needs no Redis, and may run beside the run; nothing stands
    under DIR before all of it is on disk.
    """  # noqa: D301
    from common.settings import load_settings
    from producer.cli.chosen import chosen
    from producer.export.choose import Wanted
    from producer.export.export import Shape
    from producer.export.export import export as write
    from producer.export.told import sentences, unknown

    _refuse_unknown(options)
    if folder is None and not options["dry_run"]:
        raise UsageError("export needs a folder for the files; name it with -o DIR, or count with --dry-run")
    settings = load_settings(config)
    names, others = _in_states(settings, chosen(settings, datasets), options["states"])
    mix = _by_dataset(options["mix"], names, "--mix")
    caps = _by_dataset(options["caps"], names, "--cap")
    if mix:
        others |= {name: "not_in_mix" for name in names if name not in mix}
        names = [name for name in names if name in mix]
    texts = _texts(settings, names, layout, options) if layout in TEXTS else None
    target = _target(options)
    wanted = Wanted(
        **{key: options[key] for key in ("flags", "no_flags", "finish_reasons", "min_tokens", "max_tokens")},
        others=others,
        gated=dict.fromkeys(names, settings.gates.dropped)
        | {dataset.name: settings.gates_of(dataset).dropped for dataset in settings.datasets},
        dedupe=options["dedupe"],
        shuffle=options["shuffle"],
        held_out=options["held_out"],
        caps={name: tokens for name, tokens in caps.items() if tokens is not None},
        mix=mix,
    )
    shape = Shape(
        **{key: options[key] for key in ("join_turns", "max_length", "too_long")},
        whole=texts is not None,
        check=texts.check if texts is not None else None,
    )
    done = write(
        settings.output,
        names,
        wanted,
        shape,
        None if options["dry_run"] else texts.writer if texts is not None else _writer(layout, options),
        folder or Path("-"),
        layout=layout,
        command=["tokenmill", *sys.argv[1:]],
        overwrite=options["overwrite"],
    )
    forgotten = () if datasets else unknown(settings.output, {dataset.name for dataset in settings.datasets})
    for sentence in (*sentences(done, wanted, shape), *forgotten):
        click.echo(sentence, err=True)
    for path in done.files:
        click.echo(done.folder / path)
    if target is not None:
        target.push(done.folder, [*done.files, "manifest.json"])
        click.echo(f"pushed to {target.url}", err=True)


def _in_states(settings: "Settings", names: list[str], states: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The datasets in one of `states`, all if there are none, and as what the others are counted."""
    if not states:
        return names, {}
    from producer.states import in_states

    names, others = in_states(settings.output, names, states)
    return names, {name: f"state_{state.replace(' ', '_')}" for name, state in others.items()}


def _refuse_unknown(options: dict[str, Any]) -> None:
    """Raises UsageError for a flag or finish reason that no record can have."""
    from common.flags import FLAGS, UNCOUNTED
    from common.records import MAX_NEW_TOKENS_CUT
    from common.settings import nearest

    flags = {*FLAGS, UNCOUNTED, MAX_NEW_TOKENS_CUT}
    known: tuple[tuple[str, str, Collection[str]], ...] = (
        ("--flag", "flags", flags),
        ("--no-flag", "no_flags", flags),
        ("--finish-reason", "finish_reasons", FINISH_REASONS),
    )
    for option, key, those in known:
        for word in options[key]:
            if word not in those:
                raise UsageError(f"{option} {word}: no answer can have that{nearest(word, set(those))}")


def _writer(layout: str, options: dict[str, Any]) -> "MakeWriter":
    if layout == "ids":
        from producer.export.jsonl import JsonLines

        return JsonLines
    from producer.export.columnar import Arrow, Limits, parquet

    limits = Limits(options["shard_rows"], options["shard_bytes"])
    kind = parquet if layout == "parquet" else Arrow
    return lambda folder, split: kind(folder, split, limits)


def _texts(settings: "Settings", names: Sequence[str], layout: str, options: dict[str, Any]) -> "Texts":
    from common.run_file import read_run_file
    from producer.export.conversations import conversations
    from producer.export.texts import Texts, request_of

    for is_given, option in (
        (options["join_turns"], "--join-turns"),
        (options["too_long"] != "drop", f"--too-long {options['too_long']}"),
    ):
        if is_given:
            raise UsageError(f"{option} makes rows that are no whole answer, and {layout} has texts of whole answers")
    run = read_run_file(settings.output) or {}
    return Texts(conversations(settings, names), layout, {name: request_of(run, name) for name in names})


def _target(options: dict[str, Any]) -> "Target | None":
    """Where to push to; what cannot be reached is told before all the rows are written."""
    from producer.export.push import Target

    if options["push"] is None or options["dry_run"]:
        return None
    return Target(options["push"], overwrite=options["overwrite"])


def _by_dataset(amounts: Sequence[tuple[str, _T]], names: Sequence[str], option: str) -> dict[str, _T]:
    """Amounts by dataset; one without a name is that of all that are not named."""
    from common.settings import nearest

    named = dict(amounts)
    for name in named:
        if name and name not in names:
            raise UsageError(f"{option} names {name!r}, which is not exported{nearest(name, set(names))}")
    everyone = dict.fromkeys(names, named.pop("")) if "" in named else {}
    return everyone | named
