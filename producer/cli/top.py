"""`top`: the live screen."""

import sys
from pathlib import Path

import click

from common.options import HELP, config_option


@click.command(context_settings=HELP)
@config_option
def top(config: Path | None) -> int:
    """A live screen of the job, once a second: datasets, workers, servers and what has happened; with keys to steer it.

    The arrows select a dataset, or with Tab a worker. Keys: p pause, r resume, c change the cap, d drain a worker,
    Enter open the newest sample, q quit. p and r act at once; c and d say what follows, and ask first. Each does what
    `tokenmill pause`, `resume`, `cap` and `workers drain` do.

    It needs a terminal of 60 x 16 characters or more. NO_COLOR is heeded, and nothing is told by colour alone. In a
    pipe use `tokenmill status --follow`.
    """
    from common.errors import UsageError
    from common.ledger import Ledger
    from common.settings import load_settings
    from producer.embedded import answers
    from producer.monitor.figures import look_of

    if not (sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()):
        raise UsageError("top needs a terminal for its input and its output; use `tokenmill status --follow` in a pipe")
    settings = load_settings(config)
    if settings.embedded and not answers(settings.redis_socket):
        raise UsageError(
            f"nothing runs on {settings.output}; start `tokenmill run`, or look at `tokenmill status` for how it ended"
        )
    ledger = Ledger.connect(settings.redis_url)
    from producer.monitor.top import watch

    watch(settings, ledger, look_of(sys.stdout))
    return 0
