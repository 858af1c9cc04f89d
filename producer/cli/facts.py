"""What `run` and `enqueue` ask of the servers before they write anything."""

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.sections import DatasetSettings
    from common.settings import Settings


def checked_facts(
    settings: "Settings", datasets: "Sequence[DatasetSettings]", *, accept_changes: bool, force: bool = False
) -> dict[str, Any]:
    """What the job is made with; says what `doctor` would warn of, and which caps cannot be met well.

    With `force` what is wrong is told, and noted among the facts, and the job goes on. Raises UnavailableError,
    ServerUnavailable, ServerRefused, TokenizerUnavailable, and UsageError if the output was made otherwise, or nothing
    of a source can be used.
    """
    from common.chat_template import Tokenizer
    from common.errors import UsageError
    from common.reading import READING, packed_for
    from common.run_file import FORCED, refuse_changes
    from producer.cli.main import load
    from producer.enqueue import model_facts, small_caps, unusable_sources

    for sentence in unusable_sources(settings.output, datasets):
        if not force:
            raise UsageError(f"{sentence}; see `tokenmill enqueue --dry-run`, or go on all the same with --force")
        click.echo(f"warning: {sentence}", err=True)
    # The servers are tried while the tokenizer loads.
    beginning = load("workers.doctor.start:Beginning")(settings, datasets, force=force)
    tokenizer = Tokenizer(settings.tokenizer)
    facts = model_facts(settings, datasets, beginning.servers, tokenizer)
    report = beginning.report(tokenizer)
    for sentence in (*beginning.warnings(report), *small_caps(datasets, settings.sampling.max_new_tokens)):
        click.echo(f"warning: {sentence}", err=True)
    if wrong := load("workers.doctor.start:forced")(report):
        facts[FORCED] = wrong
    if not accept_changes:
        refuse_changes(settings.output, facts)
    return facts | {READING: packed_for(settings.output, facts, tokenizer)}
