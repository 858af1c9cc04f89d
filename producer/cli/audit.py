"""`audit` and `reconstruct`: data made by anyone."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from common.options import HELP, Decorator, config_option, config_path, json_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from common.chat_template import Tokenizer
    from producer.audit.audit import Audited

tokenizer_option: Decorator = click.option(
    "--tokenizer",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="The model's own folder; by default that of the configuration, if there is one.",
)
trust_option: Decorator = click.option(
    "--trust-remote-code", is_flag=True, help="The tokenizer in DIR is Python code, and may be run."
)


@click.command(context_settings=HELP, short_help="What is wrong with data made by anyone, and why.")
@click.argument("sources", nargs=-1, required=True, metavar="FILE...")
@tokenizer_option
@trust_option
@click.option(
    "--sample",
    "sample_rows",
    type=click.IntRange(1),
    default=1_000,
    show_default=True,
    metavar="N",
    help="Rows to tokenize, chosen evenly from all; everything else is checked on every row.",
)
@json_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.html",
    help="Write the report as one HTML page, too; it needs no network.",
)
@config_option
def audit(
    sources: tuple[str, ...],
    folder: Path | None,
    trust_remote_code: bool,
    sample_rows: int,
    as_json: bool,
    output: Path | None,
    config: Path | None,
) -> int:
    """Look through data made by anyone, and say what is wrong with it, why, and what to do.

    FILE is a file, a folder, a pattern, a URL, a pipe, or - for standard input (both are copied to a temporary file):
    JSON lines, a JSON array, CSV, Parquet or Arrow, plain or .gz or .zst. Rows may be answer objects of OpenAI's API
    (also batch output, with its input beside it), of SGLang's /generate, flat rows with content, reasoning and usage,
    conversations (ShareGPT, messages), ids with a loss mask (SpecForge, speculators, `tokenmill export`), and
    tokenmill's own segments. Of the folder of a run its datasets are taken, of an export's the files of its manifest.

    \b
    tokenmill audit answers.jsonl --tokenizer /models/kimi-k2.5
    tokenmill audit 'shards/*.jsonl.zst' other.parquet -o report.html
    tokenmill audit out              a report for each dataset of a run
    curl ... | tokenmill audit - --json

    It finds reasoning that is missing, tokens that usage claims and the text has not, answers that were cut (also
    where no finish_reason says so), rows that were dropped, duplicates, control tokens and think marks in the wrong
    place, damaged characters, turns out of order, and lines that cannot be read. docs/audit.md lists all checks.

    Files may be larger than memory: a row takes 24 bytes, and some 20 more at the end. Large files of JSON lines are
    read by as many processes as there are cores. Leaves with code 3 if something is wrong; warnings and notes leave
    with 0.
    """  # noqa: D301
    import msgspec

    from producer.audit.show import lines, page

    tokenizer = tokenizer_of(folder, config, trust_remote_code=trust_remote_code)
    audits = [one for named in sources for one in _audits(named, tokenizer, sample_rows)]
    if as_json:
        click.echo(msgspec.json.encode({"sources": audits}))
    else:
        click.echo("\n\n".join("\n".join(lines(one)) for one in audits))
    if output is not None:
        from common.durable import replace_file

        replace_file(output.absolute(), [page(audits).encode("utf-8", "replace")])
        click.echo(str(output), err=True)
    return 3 if any(one.wrong for one in audits) else 0


def _audits(named: str, tokenizer: "Tokenizer | None", sample_rows: int) -> "Iterator[Audited]":
    import msgspec

    from producer.audit.audit import audit as look
    from producer.audit.sources import is_stream, sources_of, spooled

    if is_stream(named):
        with spooled(named) as path:
            yield msgspec.structs.replace(look(path, tokenizer, sample_rows=sample_rows), source=named)
    else:
        for source in sources_of(named):
            yield look(source, tokenizer, sample_rows=sample_rows)


def tokenizer_of(
    folder: Path | None,
    config: Path | None,
    *,
    trust_remote_code: bool,
    kwargs: str | None = None,
    required: bool = False,
) -> "Tokenizer | None":
    """The one that is named, else that of the configuration, if there is one. Raises UsageError, UnavailableError.

    Where it is not `required`, and nobody has named it, a tokenizer that does not load is told of and left out.
    """
    from common.errors import ConfigError, TokenizerUnavailable, UsageError

    if folder is None and config is None and not config_path(None).exists():
        if required:
            raise UsageError("no tokenizer; name the model's own folder with --tokenizer DIR")
        return None
    try:
        tokenizer = _loaded(folder, config, kwargs, trust_remote_code=trust_remote_code)
    except (ConfigError, TokenizerUnavailable) as error:
        if required or folder is not None or config is not None:
            raise
        click.echo(f"warning: {error}; tokens in the text are not checked", err=True)
        return None
    for sentence in tokenizer.warnings:
        click.echo(f"warning: {sentence}", err=True)
    return tokenizer


def _loaded(folder: Path | None, config: Path | None, kwargs: str | None, *, trust_remote_code: bool) -> "Tokenizer":
    import msgspec

    from common.chat_template import Tokenizer
    from common.errors import UsageError
    from common.sections import TokenizerSettings
    from common.settings import load_settings

    if folder is not None:
        settings = TokenizerSettings(path=folder, trust_remote_code=trust_remote_code)
    else:
        settings = load_settings(config).tokenizer
    if kwargs is not None:
        try:
            given = msgspec.json.decode(kwargs, type=dict)
        except msgspec.DecodeError:
            raise UsageError(f"--chat-template-kwargs {kwargs} is no JSON object") from None
        settings = settings.model_copy(update={"chat_template_kwargs": given})
    return Tokenizer(settings)
