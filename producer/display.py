"""A snapshot as a person reads it on a stream: tables for a terminal, and one line for logs and pipes."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from common.words import counted
from producer.monitor.columns import (
    ANSWERS,
    DATASETS,
    EVENTS,
    PROGRESS,
    SERVERS,
    WORKERS,
    rejects_of,
    stopped_of,
    sums,
    troubles,
)
from producer.monitor.figures import Look, look_of, printable
from producer.monitor.grid import Column, Entry, as_text, grid, lines_of

_EVENTS = 8


class StandardOutput(Console):
    """A console whose command learns that nobody reads any more; rich's own would leave with 1."""

    def on_broken_pipe(self) -> None:
        """Called while the error is handled."""
        raise  # noqa: PLE0704


class Datasets:
    """Datasets with their tokens against their caps and what their answers are like, then what is wrong, if anything.

    In one table where the width allows it, else in two.
    """

    def __init__(self, snapshot: Mapping[str, Any]) -> None:
        self._snapshot = snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        datasets = self._snapshot["datasets"]
        rows = [*datasets, sums(self._snapshot["totals"])] if len(datasets) > 1 else datasets
        look = look_of(console.file)
        tables: Sequence[Sequence[Column]] = [DATASETS]
        if not all(_whole(columns, rows, options.max_width, look) for columns in tables):
            tables = [PROGRESS, ANSWERS] if datasets else [PROGRESS]
        for number, columns in enumerate(tables):
            if number:
                yield Text()
            yield from _table(columns, rows, options.max_width, look)
        for trouble in (*troubles(self._snapshot), *stopped(self._snapshot)):
            yield Text(f"! {printable(trouble)}", style="yellow")


class Page(Datasets):
    """All that `status` says: the datasets, then workers, servers and the last events, each where there is any."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from super().__rich_console__(console, options)
        look, seen = look_of(console.file), self._snapshot
        for columns, entries in (
            (WORKERS, seen["workers"]),
            (SERVERS, seen["servers"]),
            (EVENTS, seen["events"][-_EVENTS:]),
        ):
            if entries:
                yield Text()
                yield from _table(columns, entries, options.max_width, look)


def _whole(columns: Sequence[Column], entries: Sequence[Entry], width: int, look: Look) -> bool:
    """Whether all columns fit."""
    head = lines_of(grid(columns, entries, width, look)[:1])[0]
    return {column.head for column in columns if column.head} <= {text for text, style in head if style == "head"}


def _table(columns: Sequence[Column], entries: Sequence[Entry], width: int, look: Look) -> Iterator[Text]:
    for line in lines_of(grid(columns, entries, width, look, fold=True)):
        yield as_text(line)


def rejects(snapshot: Mapping[str, Any]) -> Sequence[str]:
    """For each dataset that has any: how many of its samples were rejected, and why."""
    return [f"{d['name']}: {d['rejected']:,} rejected ({rejects_of(d)})" for d in snapshot["datasets"] if d["rejected"]]


def stopped(snapshot: Mapping[str, Any]) -> Sequence[str]:
    """For each dataset that has any: how many turns of its conversations are not made, and why."""
    return [
        f"{d['name']}: {counted(sum(d['stopped'].values()), 'turn')} not made ({stopped_of(d)})"
        for d in snapshot["datasets"]
        if d["stopped"]
    ]


def servers(known: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Servers with their states, and why those that cannot be used cannot."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("server", "state", "flight", "answers", "SGLang"):
        grid.add_column(name, justify="right" if name in {"flight", "answers"} else "left", overflow="fold")
    for server in known:
        figures = (f"{server['in_flight']:,}", f"{server['answers']:,}")
        grid.add_row(server["url"], server["state"], *figures, server["version"] or "-")
    reasons = [f"{one['url']}: {one['reason']}" for one in known if one["reason"] and one["state"] in {"down", "unfit"}]
    return Group(grid, *(Text(f"! {printable(line)}", style="yellow") for line in reasons))


def workers(known: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Workers with where they run, what they may have in flight and have, and since when they are there."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("worker", "state", "flight", "limit", "process", "since"):
        grid.add_column(name, justify="right" if name in {"flight", "limit", "process"} else "left", overflow="fold")
    for worker in known:
        figures = (str(worker[key]) if worker[key] is not None else "-" for key in ("in_flight", "limit", "pid"))
        since = f"{datetime.fromtimestamp(worker['since']).astimezone():%Y-%m-%d %H:%M:%S}" if worker["since"] else "-"
        grid.add_row(worker["name"], worker["state"], *figures, since)
    logs = [
        f"{one['name']} is dead{'; its log: ' + one['log'] if one['log'] else ''}"
        for one in known
        if one["state"] == "dead"
    ]
    return Group(grid, *(Text(f"! {printable(line)}", style="yellow", overflow="fold") for line in logs))


def line(snapshot: Mapping[str, Any]) -> str:
    """The totals on one line."""
    totals = snapshot["totals"]
    opened = sum(dataset["state"] in {"open", "closing"} for dataset in snapshot["datasets"])
    unmade = sum(sum(dataset["stopped"].values()) for dataset in snapshot["datasets"])
    return (
        f"{counted(totals['done'], 'sample')}, {totals['spent_tokens']:,} tokens, "
        f"{totals['tokens_per_second']:,.0f} tokens/s, {totals['in_flight']:,} in flight, "
        f"{totals['rejected']:,} rejected, {counted(unmade, 'turn') + ' not made, ' if unmade else ''}"
        f"{counted(opened, 'dataset')} open"
    )
