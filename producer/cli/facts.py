"""What `run` and `enqueue` ask of the servers before they write anything."""

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.sections import DatasetSettings
    from common.settings import Settings


def checked_facts(
    settings: "Settings", datasets: "Sequence[DatasetSettings]", *, accept_changes: bool
) -> dict[str, Any]:
    """What the job is made with; says what may go wrong with servers and template, and which caps cannot be met well.

    Raises ServerUnavailable, ServerRefused, TokenizerUnavailable, and UsageError if the output was made otherwise.
    """
    from common.chat_template import Tokenizer
    from common.reading import READING, packed_for
    from common.run_file import refuse_changes
    from producer.cli.main import load
    from producer.enqueue import model_facts, small_caps

    servers, warnings = load("workers.sglang.preflight:preflight")(settings.server.urls, settings.api_key_of)
    tokenizer = Tokenizer(settings.tokenizer)
    unread = [sentence for dataset in datasets for sentence in tokenizer.unread(dataset)]
    caps = small_caps(datasets, settings.sampling.max_new_tokens)
    for sentence in (*warnings, *tokenizer.warnings, *unread, *caps):
        click.echo(f"warning: {sentence}", err=True)
    facts = model_facts(settings, datasets, servers, tokenizer)
    if not accept_changes:
        refuse_changes(settings.output, facts)
    return facts | {READING: packed_for(settings.output, facts, tokenizer)}
