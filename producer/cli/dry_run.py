"""`enqueue --dry-run`: what would be sent."""

import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.sections import DatasetSettings
    from common.settings import Settings


def show(settings: "Settings", datasets: "Sequence[DatasetSettings]", *, as_json: bool) -> int:
    """Print what `datasets` would send; what may be wrong with that goes to standard error.

    Raises TokenizerUnavailable, and DataError and OSError for a source of which no row can be read.
    """
    import msgspec

    from common.chat_template import Tokenizer
    from producer.dry_run import MARKS, dry_run, lines
    from producer.enqueue import model_limits, small_caps

    tokenizer = Tokenizer(settings.tokenizer)
    servers, warnings = _asked(settings)
    vocab_size, context_length = model_limits(settings, servers, tokenizer)
    unread = [sentence for dataset in datasets for sentence in tokenizer.unread(dataset)]
    caps = small_caps(datasets, settings.sampling.max_new_tokens)
    for sentence in (*warnings, *tokenizer.warnings, *unread, *caps, *_refusals(settings, datasets)):
        click.echo(f"warning: {sentence}", err=True)
    context = f"{context_length:,} tokens" if context_length else "not known, so that no prompt is too long"
    told = "the server" if len(servers) == 1 else f"{len(servers)} servers" if servers else "no server"
    click.echo(f"{told} asked; the vocabulary is {vocab_size:,} ids, the context {context}", err=True)
    found = []
    for dataset in datasets:
        found.append(dry_run(settings, dataset, tokenizer, vocab_size, context_length))
        if not as_json:
            text = "\n".join([*lines(found[-1]), ""])
            # Where the output is no terminal click takes the colours out, and the marks remain.
            click.echo(text.replace(MARKS[0], f"\x1b[36m{MARKS[0]}").replace(MARKS[1], f"{MARKS[1]}\x1b[0m"))
    if as_json:
        whole = {
            "servers": [server.url for server in servers],
            "vocab_size": vocab_size,
            "context_length": context_length,
            "datasets": found,
        }
        sys.stdout.buffer.write(msgspec.json.encode(whole) + b"\n")
    return 0


def _asked(settings: "Settings") -> "tuple[Sequence[Any], list[str]]":
    """What the servers say of themselves, and warnings; nothing has to be there for a dry run."""
    from common.errors import UnavailableError
    from producer.cli.main import load

    try:
        servers, warnings = load("workers.sglang.preflight:preflight")(settings.server.urls, settings.api_key_of)
    except UnavailableError as error:
        instead = "[server] context_length" if settings.server.context_length else "no context"
        return [], [f"{error} (for this dry run {instead} and the tokenizer's vocabulary count)"]
    return servers, list(warnings)


def _refusals(settings: "Settings", datasets: "Sequence[DatasetSettings]") -> list[str]:
    """For what reason `enqueue` itself would refuse, as far as that needs no server."""
    from common.errors import UsageError
    from producer.sources import refuse_replaced

    try:
        refuse_replaced(settings.output, datasets)
    except UsageError as error:
        return [str(error)]
    return []
