"""`reconstruct`: ids from data that has only text."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from common.options import HELP, config_option, json_option
from producer.cli.audit import tokenizer_of, tokenizer_option, trust_option

if TYPE_CHECKING:
    from producer.audit.reconstructed import Reconstructed


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
    help="""What the server was given for the template, as in '{"enable_thinking": true}'.""",
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

    FILE is as for `tokenmill audit`, with rows that hold the prompt (messages), and the answer with its reasoning. The
    prompt is rendered by the model's own chat template; what the model wrote is put together as the template shows it.
    Each row of FILE.jsonl is that of `tokenmill export` in the format ids (id, input_ids, loss_mask, flat columns),
    with the flag `reconstructed`, and with how sure it is: claimed_tokens, sure_tokens (equal to what the row claims,
    end_not_counted, uncounted), sure_whitespace (template, guessed, none), sure_end (stated, assumed).

    A row whose ids are in doubt is refused, and counted by its reason: its tokens are not as many as it claims, its
    prompt is another, its reasoning is missing, control tokens stand in its text, and so on. A text has several
    sequences of ids, and the model may have written another one: answers that are asked for as ids have no such doubt.

    Leaves with code 3 if no row could be made.
    """
    import msgspec

    from common.errors import UsageError
    from producer.audit.reconstruct import Allowed
    from producer.audit.reconstructed import write
    from producer.audit.sources import STANDARD_INPUT, sources_of

    if STANDARD_INPUT in sources:
        raise UsageError("reconstruct names the file in its rows, and takes no standard input; put it into a file")
    tokenizer = tokenizer_of(folder, config, trust_remote_code=trust_remote_code, kwargs=kwargs, required=True)
    assert tokenizer is not None
    named = [one for source in sources for one in sources_of(source)]
    done = write(named, output.absolute(), tokenizer, Allowed(uncounted, guess_whitespace))
    if as_json:
        whole = {
            "rows": done.rows,
            "reconstructed": done.made,
            "tokens": done.tokens,
            "trained_tokens": done.trained_tokens,
            "longest": done.longest,
            "sure": dict(done.sure.most_common()),
            "refused": dict(done.refused.most_common()),
        }
        sys.stdout.buffer.write(msgspec.json.encode(whole) + b"\n")
    else:
        _tell(done, output)
    return 0 if done.made or not done.rows else 3


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
