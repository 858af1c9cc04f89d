"""A snapshot as a person reads it: a table, and one line for logs and pipes."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_COLOURS = {"open": "green", "closing": "cyan", "capped": "blue", "exhausted": "blue", "paused": "yellow"}


def table(snapshot: Mapping[str, Any]) -> RenderableType:
    """Datasets with their tokens against their caps, then what is wrong, if anything."""
    grid = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    for name in ("dataset", "state"):
        grid.add_column(name, no_wrap=True)
    for name in ("samples", "tokens", "of cap", "mean", "trunc", "rej", "flight", "tok/s", "eta"):
        grid.add_column(name, justify="right", no_wrap=True)
    for dataset in snapshot["datasets"]:
        grid.add_row(
            dataset["name"], Text(dataset["state"], style=_COLOURS.get(dataset["state"], "red")), *_figures(dataset)
        )
    if len(snapshot["datasets"]) > 1:
        grid.add_row(Text("all", style="bold"), "", *_sums(snapshot["totals"]))
    reasons = [f"{d['name']}: {d['reason']}" for d in snapshot["datasets"] if d["reason"]]
    return Group(grid, *(Text(f"! {line}", style="yellow") for line in (*reasons, *snapshot["troubles"])))


def _figures(dataset: Mapping[str, Any]) -> Sequence[str]:
    cap = dataset["cap_tokens"]
    return (
        f"{dataset['done']:,}",
        f"{dataset['spent_tokens']:,}",
        f"{100 * dataset['spent_tokens'] / cap:.1f} %" if cap else "no cap",
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
    """`3 h 07 min`, `12 min`, `40 s`; a dash for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min" if minutes else f"{rest} s"
