"""The workers' commands: `worker`, `doctor`, and the keeper that `control` starts."""

import os
import re
from pathlib import Path

import click

from common.options import HELP, config_option, config_path, json_option
from common.parent import DISMISSED


@click.command(context_settings=HELP)
@click.option(
    "--concurrency", type=click.IntRange(min=1), help="Answers in flight at most; by default [worker] concurrency."
)
@click.option("--name", help="The worker's name in status, Flower and its segments; by default made of its process id.")
@click.option("--pid-file", type=click.Path(path_type=Path), hidden=True, help="Removed at the end.")
@config_option
def worker(concurrency: int | None, name: str | None, pid_file: Path | None, config: Path | None) -> int:
    """One generate worker: claims samples, calls the servers, writes segments.

    Start as many as you like, whenever you like. TERM or Ctrl-C drains for [worker] drain_seconds, then gives back
    what is not answered; another worker has it within a second. It leaves with 0 then, and with 10 if `tokenmill
    workers drain` or `stop` has ended it: whoever starts it anew whenever it ends need not in that case.
    """
    from common.broker import GENERATE_QUEUE
    from common.errors import UsageError
    from common.ledger import Ledger

    if name is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise UsageError(f"{name!r} cannot be a worker's name; use 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    os.environ["TOKENMILL_CONFIG"] = str(config_path(config))
    os.environ["CELERY_CUSTOM_WORKER_POOL"] = "workers.pool:AsyncioPool"  # before Celery's pools are imported
    from common.consumer import run_celery
    from workers.app import app, settings
    from workers.pool import AsyncioPool

    Ledger.connect(settings.redis_url).close()
    code = run_celery(
        app,
        [
            "--pool=custom",
            f"--queues={GENERATE_QUEUE}",
            f"--concurrency={concurrency or settings.worker.concurrency}",
            f"--hostname={name or f'w{os.getpid()}'}@%h",
            "--task-events",
            "--without-gossip",
            "--without-mingle",
        ],
    )
    if pid_file is not None:
        pid_file.unlink(missing_ok=True)
    return DISMISSED if code == 0 and AsyncioPool.dismissed else code


@click.command(context_settings=HELP)
@click.option("--no-probe", is_flag=True, help="Send no server any work: only ask each what it is.")
@json_option
@config_option
def doctor(as_json: bool, no_probe: bool, config: Path | None) -> int:
    """What servers, tokenizer and chat template really are, and what is wrong with them.

    Each check is ok, a warning, or wrong, and says what to do. Every server in [server] urls is asked what it is, and
    tried with a few prompts: one twice without chance, three questions from end to end. One that has requests waiting
    is not tried. Leaves with 4 if something is wrong: `run` would refuse to begin.
    """
    import shutil

    import msgspec

    from common.errors import UnavailableError
    from common.settings import load_settings
    from workers.doctor.examine import examine
    from workers.doctor.report import lines

    report = examine(load_settings(config), probe=not no_probe)
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        for line in lines(report, shutil.get_terminal_size().columns):
            click.echo(line)
    return UnavailableError.exit_code if report.of("wrong") else 0


@click.command(hidden=True, context_settings=HELP)
@config_option
def keeper(config: Path | None) -> int:
    """The keeper and its clock: a Celery worker on the queue `control`, with beat."""
    from common.broker import CONTROL_QUEUE
    from common.consumer import run_celery

    os.environ["TOKENMILL_CONFIG"] = str(config_path(config))
    from workers.app import app, settings

    try:
        return run_celery(
            app,
            [
                "--beat",
                "--pool=solo",
                f"--queues={CONTROL_QUEUE}",
                f"--hostname=keeper-{os.getpid()}@%h",
                "--without-gossip",
                "--without-mingle",
            ],
        )
    finally:
        _say_goodbye(settings.redis_url)


def _say_goodbye(redis_url: str) -> None:
    """Or `recover` and the next `run` would wait a minute for a keeper that has ended."""
    import contextlib

    import redis

    from common.errors import RedisUnavailable
    from common.ledger import Ledger

    with contextlib.suppress(RedisUnavailable, redis.RedisError):
        ledger = Ledger.connect(redis_url, attempts=1)
        ledger.heartbeat("keeper", None)
        ledger.close()
