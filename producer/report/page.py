"""The report as one HTML page that needs no network."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from typing import Any

import jinja2
import msgspec
import numpy as np

from producer.monitor.figures import duration
from producer.report.figures import draw_all
from producer.report.gather import Came, Gathered

_COLUMNS = [
    *("dataset", "cap", "tokens", "of cap", "samples", "rejected"),
    *("mean", "p50", "p95", "max", "truncated", "prompt tokens"),
]
_CAPTIONS = (
    "Tokens against the cap over time. A line ends where its dataset did.",
    "Completion tokens a second of the answers as they were accepted, each in the moment that it ended.",
)


def render(run: Gathered) -> str:
    """The page. Everything that comes from files is escaped."""
    sampling = run.run.get("sampling_params") or {}
    whole, each = draw_all(run, sampling.get("max_new_tokens"))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((files(__package__) / "page.html.jinja").read_text(encoding="utf-8"))
    rows = [_row(one) for one in run.datasets]
    if len(rows) > 1:
        rows.append(_row(_sum(run.datasets)))
    return template.render(
        title=f"tokenmill: {run.output.resolve().name}",
        summary=_summary(run),
        notes=[*_notes(run)],
        columns=_COLUMNS,
        rows=rows,
        figures=[*zip(whole, _CAPTIONS, strict=False)],
        each=each,
        tables=[*_tables(run)],
    )


def _row(came: Came) -> list[str]:
    cap, spent, samples = came.cap_tokens, came.spent_tokens, came.samples
    return [
        came.name,
        f"{cap:,}" if cap else "",
        f"{spent:,}" + (" (with prompts)" if came.counts_prompts else ""),
        f"{spent / cap:.2%}" if cap else "",
        f"{samples:,}",
        f"{came.rejects.total():,}",
        f"{came.completion_tokens.mean():,.0f}" if samples else "",
        *(f"{came.percentile(share):,}" if samples else "" for share in (0.5, 0.95, 1.0)),
        f"{came.flags['truncated'] / samples:.2%}" if samples else "",
        f"{int(came.prompt_tokens.sum()):,}",
    ]


def _sum(datasets: Sequence[Came]) -> Came:
    total = Came("all", None)
    total.at = np.concatenate([one.at for one in datasets])
    total.prompt_tokens = np.concatenate([one.prompt_tokens for one in datasets])
    total.completion_tokens = np.concatenate([one.completion_tokens for one in datasets])
    total.counts = np.concatenate([one.counts for one in datasets])
    for one in datasets:
        total.flags.update(one.flags)
        total.rejects.update(one.rejects)
    return total


def _summary(run: Gathered) -> str:
    times = run.times()
    if not len(times):
        return "No answer has been written yet."
    tokens = sum(int(one.completion_tokens.sum()) for one in run.datasets)
    first, last = (datetime.fromtimestamp(at).astimezone() for at in (times[0], times[-1]))
    speed = f", {tokens / run.work_seconds:,.0f} tokens a second" if run.work_seconds else ""
    return (
        f"{len(times):,} answers with {tokens:,} completion tokens, from {first:%Y-%m-%d %H:%M:%S} to "
        f"{last:%Y-%m-%d %H:%M:%S %Z}: {duration(run.work_seconds)} of work{speed}."
    )


def _notes(run: Gathered) -> Iterator[str]:
    for one in run.datasets:
        if one.faults:
            yield f"{one.name}: {one.faults:,} lines of its files cannot be read and count here for nothing (`verify`)."
        if one.asked is None:
            yield f"{one.name} is not registered in this folder: its cap is not known."


def _tables(run: Gathered) -> Iterator[tuple[str, list[list[str]]]]:
    """Headings, each with rows of cells."""
    for heading, name in (
        ("How the answers ended", "finish_reasons"),
        ("Flags", "flags"),
        ("Rejected, by reason", "rejects"),
        ("Answers by server", "servers"),
    ):
        rows = [
            [one.name, ", ".join(f"{key} {n:,} ({n / max(1, counts.total()):.1%})" for key, n in counts.most_common())]
            if name in {"finish_reasons", "servers"}
            else [one.name, ", ".join(f"{key} {n:,}" for key, n in counts.most_common())]
            for one in run.datasets
            if (counts := getattr(one, name))
        ]
        if rows:
            yield heading, rows
    servers = run.run.get("servers") or []
    if servers:
        shown = ("url", "version", "model_path", "weight_version", "context_length", "kv_cache_dtype")
        yield "Servers", [[_text(server.get(key)) for key in shown] for server in servers]
    made = {key: value for key, value in run.run.items() if key != "servers"}
    if made:
        yield "What the data was made with", [[key, _text(value)] for key, value in made.items()]
    asked = [
        [one.name, _text(one.asked.model_dump(mode="json", exclude_defaults=True))] for one in run.datasets if one.asked
    ]
    if asked:
        yield "The datasets as they were asked for", asked


def _text(value: Any) -> str:
    if value is None:
        return ""
    return msgspec.json.encode(value).decode() if isinstance(value, Mapping | list) else str(value)
