"""The whole job on one machine: Redis if it is embedded, control, workers; until every dataset has ended."""

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from rich.console import Console

from common.broker import forget_messages, make_celery
from common.durable import make_folder
from common.errors import UsageError
from common.ledger import ENDED_STATES, Ledger
from common.sections import DatasetSettings
from common.settings import Settings
from common.words import counted
from producer.children import Child, Stoppable, stop_all
from producer.datasets.sample import first_look
from producer.datasets.standard_input import source_of
from producer.detached import living_here
from producer.embedded import EmbeddedRedis, owned
from producer.enqueue import ask_for_a_tick, register
from producer.in_force import notes
from producer.interrupts import raising
from producer.metrics import metrics_served
from producer.monitor.progress import Progress
from producer.recover import Recovered, live_processes
from producer.restore import rebuild
from producer.sources import follow_sources
from producer.status import snapshot

log = logging.getLogger(__name__)
_TICK_SECONDS = 0.5
# Control and workers are heard of within so long, also on a machine that is busy.
_START_SECONDS = 30
# What a worker needs beyond its drain to abort, commit and close.
_STOP_SECONDS = 20.0
# How long processes that were told twice to stop have for that.
_HURRY_SECONDS = 10.0


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or TERM. The first: drain. The second: abort what is in flight. The third: kill."""


def run(
    settings: Settings,
    config: Path,
    datasets: Sequence[DatasetSettings],
    facts: Mapping[str, Any],
    console: Console,
) -> tuple[dict[str, Any], bool]:
    """Run until all `datasets` have ended; answers the last snapshot, and whether it was interrupted.

    Everything was checked before: nothing is written for a job that cannot run.
    """
    make_folder(settings.output)
    with raising(Interrupted, signal.SIGINT, signal.SIGTERM), _server(settings) as server:
        ledger = Ledger.connect(settings.redis_url)
        if server is None:
            _refuse_a_second_run(ledger, settings)
        else:
            forget_messages(ledger.redis)  # of an earlier run, whose processes have ended with it
        for line in begin(settings, ledger, datasets, facts):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        ask_for_a_tick(make_celery("tokenmill", settings))
        ledger.expect_processes(_START_SECONDS)
        children = _children(settings, config)
        interrupted = False
        last: dict[str, Any] = {}
        try:
            for child in children:
                child.start()

            def restore(lost: set[str]) -> None:
                restore_books(settings, ledger, [one for one in datasets if one.name in lost], facts, console)

            names = {dataset.name for dataset in datasets}
            with metrics_served(settings):
                last = watch(ledger, names, lambda: _look_after(server, children), restore, console)
        except Interrupted:
            interrupted = True
            console.print(
                f"stopping: waiting up to {settings.worker.drain_seconds:.0f} s for answers in flight "
                "(Ctrl-C again leaves at once)"
            )
        finally:
            # Workers that were added: their Redis ends with this process.
            ending: list[Stoppable] = [*(living_here(settings.output) if server else ()), *children]
            _stop(ending, settings.worker.drain_seconds + _STOP_SECONDS)
        last = _last_figures(ledger, last)
        ledger.close()
        return last, interrupted


def _last_figures(ledger: Ledger, before: dict[str, Any]) -> dict[str, Any]:
    try:
        ledger.expect_processes(0)
        return snapshot(ledger, at_end=True)
    except redis.RedisError as error:
        log.warning("Redis did not answer for the last figures: %s", error)
        return before


def begin(
    settings: Settings, ledger: Ledger, datasets: Sequence[DatasetSettings], facts: Mapping[str, Any]
) -> Iterator[str]:
    """Register `datasets`; tells in lines what is not as it was, or as the configuration says, and how each goes on."""
    yield from follow_sources(settings, ledger, datasets)
    yield from notes(settings, datasets)
    states, recovered = register(settings, ledger, datasets, facts)
    for one in datasets:
        layouts, unusable = first_look(source_of(settings.output, one), one)
        yield f"{one.name}: {_said(one.name, states[one.name], recovered)}, {layouts}"
        if unusable:
            yield f"! {one.name}: {unusable}"


def _stop(children: Sequence[Stoppable], seconds: float) -> None:
    """TERM to all, and once more when interrupted: a worker then gives back at once what is in flight."""
    for patience in (seconds, _HURRY_SECONDS):
        try:
            stop_all(children, patience)
        except Interrupted:
            continue
        return
    stop_all(children, 0)


@contextmanager
def _server(settings: Settings) -> Iterator[EmbeddedRedis | None]:
    if settings.embedded:
        with owned(settings) as server:
            yield server
    else:
        yield None


def _refuse_a_second_run(ledger: Ledger, settings: Settings) -> None:
    """On a shared Redis the keeper's heartbeat tells of another control process."""
    if "keeper" in live_processes(ledger):
        raise UsageError(
            f"a control process is at work on {settings.redis.rpartition('@')[2]}; "
            "use `tokenmill enqueue` to add datasets to it, or wait a minute if it was killed"
        )


def _children(settings: Settings, config: Path) -> list[Child]:
    logs = settings.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    workers = [
        Child(f"worker w{n}", ["worker", "--name", f"w{n}"], config, logs / f"w{n}.log")
        for n in range(1, settings.run.workers + 1)
    ]
    # Workers first: they stop before control, whose keeper would send what they give back.
    return [*workers, Child("control", ["control"], config, logs / "control.log")]


def _look_after(server: EmbeddedRedis | None, children: Sequence[Child]) -> None:
    if server is not None and server.restart_if_dead():
        log.warning("the embedded Redis had ended and was started again with what its file holds")
    for child in children:
        child.look_after()


def restore_books(
    settings: Settings, ledger: Ledger, lost: Sequence[DatasetSettings], facts: Mapping[str, Any], console: Console
) -> None:
    """Build the books of datasets anew that the ledger has forgotten: someone emptied Redis while the job runs."""
    recovered = rebuild(settings, ledger, lost, facts)
    for done in recovered:
        console.print(f"{done.name}: {_said(done.name, '', recovered)}", highlight=False)
    ask_for_a_tick(make_celery("tokenmill", settings))


def watch(
    ledger: Ledger,
    names: set[str],
    look_after: Callable[[], None],
    restore: Callable[[set[str]], None],
    console: Console,
) -> dict[str, Any]:
    """Show progress until the datasets of `names` have ended; `restore` gets those that Redis has forgotten."""
    progress = Progress(console)
    with progress.shown():
        while True:
            look_after()
            try:
                seen = snapshot(ledger)
                if lost := names - {dataset["name"] for dataset in seen["datasets"]}:
                    restore(lost)
                    continue
            except redis.RedisError as error:
                log.warning("Redis does not answer: %s", error)
                time.sleep(_TICK_SECONDS)
                continue
            progress.show(seen)
            if all(_has_ended(d) for d in seen["datasets"] if d["name"] in names):
                return seen
            time.sleep(_TICK_SECONDS)


def _has_ended(dataset: Mapping[str, Any]) -> bool:
    """What a cancelled one has in flight is awaited: it counts."""
    state, in_flight = dataset["state"], dataset["in_flight"]
    return state in ENDED_STATES and not (state == "cancelled" and in_flight)


def _said(name: str, state: str, recovered: Sequence[Recovered]) -> str:
    for done in recovered:
        if done.name == name:
            return f"the ledger was built anew from {counted(done.records, 'record')} on disk"
    return {"new": "new", "known": "goes on", "reopened": "goes on, open again"}[state]


def exit_code(last: Mapping[str, Any], interrupted: bool, allowed_failures: float) -> int:
    """0, 3 (`failures` has any), or 130 (interrupted, resumable)."""
    if interrupted:
        return 130
    return 3 if failures(last, allowed_failures) else 0


def failures(last: Mapping[str, Any], allowed_failures: float) -> list[str]:
    """A sentence for each dataset that is halted or failed, or had samples rejected beyond the allowed share."""
    found = []
    for dataset in last["datasets"]:
        name, state = dataset["name"], dataset["state"]
        rejected = dataset["rejected"] - dataset["rejects"].get("duplicate", 0)  # those were asked for
        rows = dataset["done"] + rejected
        if state in {"halted", "failed"}:
            found.append(f"{name} is {state}")
        if rejected > allowed_failures * rows:
            found.append(
                f"{name}: {rejected:,} of {rows:,} samples were rejected ({rejected / rows:.2%}), more than [run] "
                f"allowed_failures = {allowed_failures:g} allows; `tokenmill rejects {name}` says why"
            )
    return found


def stderr_console() -> Console:
    """Progress and messages; data alone goes to standard output."""
    return Console(file=sys.stderr)
