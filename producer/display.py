"""A snapshot as a person reads it: a table, and one line for logs and pipes."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

_COLOURS = {"open": "green", "closing": "cyan", "capped": "blue", "exhausted": "blue", "paused": "yellow"}
_FIGURES = ("samples", "tokens", "of cap", "mean", "trunc", "rej", "flight", "tok/s", "eta")
# What a narrow terminal goes without, first to last, so that what it shows is whole.
_EXPENDABLE = ("mean", "flight", "trunc", "tok/s")
# A dataset's name may have 64 characters; a long one is folded, since a figure cannot be.
_NAME_CHARACTERS = 20


def table(snapshot: Mapping[str, Any]) -> RenderableType:
    """Datasets with their tokens against their caps, the load of each server, then what is wrong, if anything."""
    loads = [Text(_load(server)) for server in snapshot["servers"] if server["state"] in {"up", "half_open"}]
    reasons = [f"{d['name']}: {d['reason']}" for d in snapshot["datasets"] if d["reason"]]
    return Group(
        _Datasets(snapshot), *loads, *(Text(f"! {line}", style="yellow") for line in (*reasons, *snapshot["troubles"]))
    )


def rejects(snapshot: Mapping[str, Any]) -> Sequence[str]:
    """For each dataset that has any: how many of its samples were rejected, and why."""
    counted = ((dataset["name"], dataset["rejected"], dataset["rejects"]) for dataset in snapshot["datasets"])
    return [
        f"{name}: {total:,} rejected ({', '.join(f'{n:,} {reason}' for reason, n in sorted(reasons.items()))})"
        for name, total, reasons in counted
        if total
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
    return Group(grid, *(Text(f"! {line}", style="yellow") for line in reasons))


def _load(server: Mapping[str, Any]) -> str:
    """`http://gpu1:30000: 52 of at most 54 in flight (steady: 4 waiting, 3 wanted), 50 running, 97% of its KV`."""
    limit = "" if server["limit"] is None else f" of at most {server['limit']:,}"
    why = f" ({server['why']})" if server["why"] else ""
    running = "" if server["running"] is None else f", {server['running']:,} running"
    kv = "" if server["kv_usage"] is None else f", {server['kv_usage']:.0%} of its KV"
    return f"{server['url']}: {server['in_flight']:,}{limit} in flight{why}{running}{kv}"


class _Datasets:
    """The datasets' rows, with as many columns as there is room for."""

    def __init__(self, snapshot: Mapping[str, Any]) -> None:
        self._snapshot = snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for gap, left_out in ((2, 0), *((1, n) for n in range(len(_EXPENDABLE) + 1))):
            grid = self._grid(gap, set(_EXPENDABLE[:left_out]))
            if console.measure(grid, options=options.update(max_width=1000)).maximum <= options.max_width:
                break
        yield grid

    def _grid(self, gap: int, left_out: set[str]) -> Table:
        grid = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold", expand=False)
        grid.add_column("dataset", max_width=_NAME_CHARACTERS, overflow="fold")
        grid.add_column("state", no_wrap=True)
        shown = [at for at, name in enumerate(_FIGURES) if name not in left_out]
        for at in shown:
            grid.add_column(_FIGURES[at], justify="right", no_wrap=True)
        for dataset in self._snapshot["datasets"]:
            state = Text(dataset["state"], style=_COLOURS.get(dataset["state"], "red"))
            figures = _figures(dataset)
            grid.add_row(dataset["name"], state, *(figures[at] for at in shown))
        if len(self._snapshot["datasets"]) > 1:
            sums = _sums(self._snapshot["totals"])
            grid.add_row(Text("all", style="bold"), "", *(sums[at] for at in shown))
        return grid


def _figures(dataset: Mapping[str, Any]) -> Sequence[str]:
    cap = dataset["cap_tokens"]
    return (
        f"{dataset['done']:,}",
        f"{dataset['spent_tokens']:,}",
        f"{100 * dataset['spent_tokens'] / cap:.1f}%" if cap else "no cap",
        f"{dataset['mean_tokens']:,.0f}",
        f"{dataset['truncated']:,}",
        f"{dataset['rejected']:,}",
        f"{dataset['in_flight']:,}",
        f"{dataset['tokens_per_second']:,.0f}",
        duration(dataset["eta_seconds"]),
    )


def _sums(totals: Mapping[str, Any]) -> Sequence[str]:
    return (
        f"{totals['done']:,}",
        f"{totals['spent_tokens']:,}",
        "",
        "",
        f"{totals['truncated']:,}",
        f"{totals['rejected']:,}",
        f"{totals['in_flight']:,}",
        f"{totals['tokens_per_second']:,.0f}",
        duration(totals["eta_seconds"]),
    )


def line(snapshot: Mapping[str, Any]) -> str:
    """The totals on one line."""
    totals = snapshot["totals"]
    open_datasets = sum(dataset["state"] in {"open", "closing"} for dataset in snapshot["datasets"])
    return (
        f"{totals['done']:,} samples, {totals['spent_tokens']:,} tokens, {totals['tokens_per_second']:,.0f} tokens/s, "
        f"{totals['in_flight']:,} in flight, {totals['rejected']:,} rejected, {open_datasets} datasets open"
    )


def duration(seconds: float | None) -> str:
    """`3h07m`, `12m30s`, `40s`; a dash for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
