"""`reconstruct`: ids from data that has only text."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from common.options import HELP, config_option, json_option
from producer.cli.audit import tokenizer_of, tokenizer_option, trust_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from producer.audit.reconstructed import Reconstructed
    from producer.audit.sources import Source


@click.command(context_settings=HELP, short_help="Ids from answers that were saved as text; doubtful ones are refused.")
@click.argument("sources", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE.jsonl",
    help="The rows; an earlier file of that name is replaced once all of them are there.",
)
@tokenizer_option
@trust_option
@click.option(
    "--chat-template-kwargs",
    "kwargs",
    metavar="JSON",
    help="""What the server was given for the template, as in '{"enable_thinking": true}'. Without it, what the
    configuration says in [tokenizer]; with --tokenizer nothing, so that the template's own defaults hold.""",
)
@click.option("--uncounted", is_flag=True, help="Take rows that do not state their completion_tokens, too.")
@click.option(
    "--guess-whitespace",
    is_flag=True,
    help="Where the template does not show what stands around a think block, take the newlines of Qwen3's.",
)
@json_option
@config_option
def reconstruct(
    sources: tuple[str, ...],
    output: Path,
    folder: Path | None,
    trust_remote_code: bool,
    kwargs: str | None,
    uncounted: bool,
    guess_whitespace: bool,
    as_json: bool,
    config: Path | None,
) -> int:
    """Make the ids of answers that were saved as text: prompt, think block, answer, tool calls, end token.

    FILE is as for `tokenmill audit`, with rows that hold the prompt (messages), and the answer with its reasoning; for
    a batch of OpenAI's a folder with NAME.input.jsonl and NAME.output.jsonl. The prompt is rendered by the model's own
    chat template; what the model wrote is put together as the template shows it.

    \b
    tokenmill reconstruct answers.jsonl -o ids.jsonl --tokenizer /models/qwen3
        --chat-template-kwargs '{"enable_thinking": true}'
    tokenmill reconstruct export/openai-batch -o ids.jsonl -c tokenmill.toml

    Each row of FILE.jsonl is that of `tokenmill export` in the format ids (id, input_ids, loss_mask, flat columns),
    with the flag `reconstructed`, and with how sure it is: claimed_tokens, sure_tokens (equal to what the row claims,
    end_not_counted, uncounted), sure_whitespace (template, guessed, none), sure_end (stated, assumed).

    A row whose ids are in doubt is refused, and counted by its reason: its tokens are not as many as it claims, its
    prompt is another, its reasoning is missing, control tokens stand in its text, and so on. Whether a server counts
    the end token is decided once for all rows of a FILE. A text has several sequences of ids, and the model may have
    written another one: answers that are asked for as ids have no such doubt.

    Leaves with code 3 if no row could be made.
    """  # noqa: D301
    from producer.audit.reconstruct import Allowed
    from producer.audit.reconstructed import write

    named = _sources(sources, output)
    tokenizer = tokenizer_of(folder, config, trust_remote_code=trust_remote_code, kwargs=kwargs, required=True)
    assert tokenizer is not None
    done = write(named, output.absolute(), tokenizer, Allowed(uncounted, guess_whitespace))
    if as_json:
        _tell_programs(done)
    else:
        _tell(done, output)
    return 0 if done.made or not done.rows else 3


def _sources(named: "Sequence[str]", output: Path) -> list["Source"]:
    """Raises OSError, DataError, and UsageError for what cannot be a source, or is the output."""
    from common.errors import UsageError
    from producer.audit.sources import STANDARD_INPUT, sources_of
    from producer.datasets.places import is_url

    if STANDARD_INPUT in named:
        raise UsageError("reconstruct names the file in its rows, and takes no standard input; put it into a file")
    sources = [one for name in named for one in sources_of(name)]
    if output.exists() and any(output.samefile(file) for one in sources for file in one.files() if not is_url(file)):
        raise UsageError(f"{output} is one of the files to be read; name another with -o")
    return sources


def _tell_programs(done: "Reconstructed") -> None:
    import msgspec

    whole = {
        "rows": done.rows,
        "reconstructed": done.made,
        "tokens": done.tokens,
        "trained_tokens": done.trained_tokens,
        "longest": done.longest,
        "sure": dict(done.sure.most_common()),
        "refused": dict(done.refused.most_common()),
    }
    click.echo(msgspec.json.encode(whole))


def _tell(done: "Reconstructed", output: Path) -> None:
    from producer.audit.finding import share
    from producer.audit.reconstruct import REASONS

    click.echo(
        f"{output}: {done.made:,} of {done.rows:,} rows ({share(done.made, done.rows)}) reconstructed, "
        f"{done.tokens:,} tokens, {done.trained_tokens:,} to learn, longest row {done.longest:,} tokens"
    )
    for what, rows in done.sure.most_common():
        click.echo(f"  sure    {rows:>9,}  {what}")
    for reason, rows in done.refused.most_common():
        click.echo(f"  refused {rows:>9,}  {reason}: {REASONS[reason]}")
        for example in done.examples[reason]:
            click.echo(f"                     - {example}")
