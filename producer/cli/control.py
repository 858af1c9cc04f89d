"""`control` and the processes it starts, and `flower`."""

import os
import time
from pathlib import Path

import click

from common.options import HELP, config_option, config_path


@click.command(context_settings=HELP)
@config_option
def control(config: Path | None) -> int:
    """The control process: the keeper with its clock, and the feeds. One is enough; a second one does no harm."""
    import signal

    from common.ledger import Ledger
    from common.logs import log_to_stderr
    from common.parent import end_with_parent
    from common.settings import load_settings
    from producer.children import Child, stop_all
    from producer.metrics import metrics_served

    log_to_stderr()
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
    with metrics_served(settings):
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

    os.environ["TOKENMILL_CONFIG"] = str(config_path(config))
    from producer.app import app, settings

    return run_celery(
        app,
        [
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
@click.option("--operate", is_flag=True, help="Allow what changes workers (grow, shrink, shut down); needs a password.")
@click.option(
    "--state",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where Flower keeps what it has seen; by default <output>/.flower/state.",
)
@config_option
def flower(address: str, port: int, operate: bool, state: Path | None, config: Path | None) -> None:
    """Flower, the web page on tasks and workers; on this machine alone, and to look at, unless told otherwise.

    Its list of tasks shows dataset and rows, tokens, how the answers ended, and which server gave them. Listening
    elsewhere, or --operate, needs TOKENMILL_FLOWER_BASIC_AUTH=user:password in the environment.
    """
    import sys

    from common.durable import make_folder
    from common.errors import UsageError
    from common.ledger import Ledger
    from common.settings import load_settings
    from producer import flowerconfig

    path = config_path(config)
    settings = load_settings(path)
    password = os.environ.get("TOKENMILL_FLOWER_BASIC_AUTH", "")
    if not password and (operate or address not in {"127.0.0.1", "::1", "localhost"}):
        asked = "--operate" if operate else f"Flower on {address}"
        otherwise = "leave --operate out" if operate else "keep to 127.0.0.1"
        raise UsageError(f"{asked} needs a password: set TOKENMILL_FLOWER_BASIC_AUTH=user:password, or {otherwise}")
    Ledger.connect(settings.redis_url).close()
    kept = state or settings.output / ".flower" / "state"
    make_folder(kept.parent)
    environment = os.environ | {"TOKENMILL_CONFIG": str(path)}
    if password:
        environment["FLOWER_BASIC_AUTH"] = password  # not an argument: every process list would show it
    click.echo(f"Flower on http://{address}:{port}{'' if operate else ', to look at alone'}", err=True)
    arguments = ["-A", "producer.app", "--quiet", "flower", f"--conf={flowerconfig.__file__}"]
    arguments += [f"--address={address}", f"--port={port}", f"--read_only={not operate}"]
    arguments += ["--persistent=True", f"--db={kept.absolute()}", "--state_save_interval=30000"]
    os.execve(  # noqa: S606
        sys.executable, [sys.executable, "-m", "celery", *arguments], environment
    )
