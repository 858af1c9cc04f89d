"""`control` and the processes it starts, and `flower`."""

import os
import time
from pathlib import Path

import click

from common.options import HELP, config_option


@click.command(context_settings=HELP)
@config_option
def control(config: Path | None) -> int:
    """The control process: the keeper with its clock, and the feeds. One is enough; a second one does no harm."""
    import signal

    from common.ledger import Ledger
    from common.parent import end_with_parent
    from common.settings import config_path, load_settings
    from producer.children import Child, stop_all

    settings = load_settings(config)
    Ledger.connect(settings.redis_url).close()
    path = config_path(config)
    children = [Child("keeper", ["keeper"], path, None), Child("feeder", ["feeder"], path, None)]
    stop = False

    def on_signal(*_: object) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    end_with_parent()
    for child in children:
        child.start()
    while not stop:
        time.sleep(0.2)
        for child in children:
            child.look_after()
    stop_all(children, 15)
    return 0


@click.command(hidden=True, context_settings=HELP)
@config_option
def feeder(config: Path | None) -> int:
    """The feeds: a Celery worker on the queue `produce`, one process a feed."""
    from common.broker import PRODUCE_QUEUE
    from common.consumer import run_celery
    from common.settings import config_path

    os.environ["TOKENMILL_CONFIG"] = str(config_path(config))
    from producer.app import app, settings

    return run_celery(
        app,
        [
            "--quiet",
            "worker",
            # One feed needs no process beside this one, which costs 95 MB and a second at each end.
            "--pool=solo" if settings.control.feeders == 1 else "--pool=prefork",
            f"--queues={PRODUCE_QUEUE}",
            f"--concurrency={settings.control.feeders}",
            f"--hostname=feeder-{os.getpid()}@%h",
            "--without-gossip",
            "--without-mingle",
        ],
    )


@click.command(context_settings=HELP)
@click.option(
    "--address", default="127.0.0.1", show_default=True, help="Where to listen; elsewhere a password is needed."
)
@click.option("--port", type=click.IntRange(0, 65535), default=5555, show_default=True, help="The port to listen on.")
@config_option
def flower(address: str, port: int, config: Path | None) -> None:
    """Flower, the web page on tasks and workers; on this machine alone unless told otherwise.

    Listening elsewhere needs TOKENMILL_FLOWER_BASIC_AUTH=user:password: whoever sees Flower can stop workers.
    """
    import sys

    from common.errors import UsageError
    from common.ledger import Ledger
    from common.settings import config_path, load_settings

    path = config_path(config)
    settings = load_settings(path)
    password = os.environ.get("TOKENMILL_FLOWER_BASIC_AUTH", "")
    if address not in {"127.0.0.1", "::1", "localhost"} and not password:
        raise UsageError(
            f"Flower on {address} needs a password: set TOKENMILL_FLOWER_BASIC_AUTH=user:password, or keep to 127.0.0.1"
        )
    Ledger.connect(settings.redis_url).close()
    environment = os.environ | {"TOKENMILL_CONFIG": str(path)}
    if password:
        environment["FLOWER_BASIC_AUTH"] = password
    click.echo(f"Flower on http://{address}:{port}", err=True)
    arguments = ["-A", "producer.app", "--quiet", "flower", f"--address={address}", f"--port={port}"]
    os.execve(  # noqa: S606
        sys.executable, [sys.executable, "-m", "celery", *arguments], environment
    )
