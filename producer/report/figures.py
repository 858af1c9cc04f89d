"""The report's figures, as SVG: for a page, and for a paper's appendix. No figure needs colour alone to be read."""

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, NullFormatter

from producer.report.gather import Came, Gathered

# Okabe and Ito's eight, which the colour-blind tell apart; with the dashes of _DASHES 32 lines differ.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8c8c8c")
_DASHES = ("-", "--", "-.", ":")
_STYLE: Any = {  # its keys are too many for a type
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "tokenmill",  # or ids differ each time
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}
# What made it, and when: addresses of vocabularies, which look like links.
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_WIDTH = 7.2  # inches: a page's text
_POINTS = 600  # of a line: a figure of 88,000 steps would take 5 MB
_BINS = 60


def tokens_over_time(run: Gathered) -> str:
    """Tokens against the cap, by hours since the first answer; datasets without a cap in millions of tokens."""

    def draw(axes: Axes) -> None:
        start = run.times()[0]
        capped = any(one.cap_tokens for one in run.datasets)
        for number, came in enumerate(one for one in run.datasets if one.samples):
            hours, tokens = (came.at - start) / 3600, np.cumsum(came.spent())
            keep = np.unique(np.linspace(0, len(hours) - 1, min(_POINTS, len(hours))).astype(int))
            scale = (came.cap_tokens or tokens[-1]) if capped else 1e6
            label = came.name if came.cap_tokens or not capped else f"{came.name} (no cap; of its {tokens[-1]:,})"
            axes.step(hours[keep], tokens[keep] / scale, where="post", label=label, **_line(number))
        if capped:
            axes.axhline(1.0, color="#444444", linewidth=0.8)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
        axes.set_xlabel("hours since the first answer")
        axes.set_ylabel("tokens, of the cap" if capped else "million tokens")
        axes.set_ylim(bottom=0)
        _legend(axes)

    return _svg(draw, 3.2)


def throughput(run: Gathered) -> str:
    """Completion tokens a second over the time of the run, datasets one on the other."""

    def draw(axes: Axes) -> None:
        times = run.times()
        edges = np.linspace(times[0], max(times[-1], times[0] + 1), _BINS + 1)
        seconds = edges[1] - edges[0]
        hours = (edges - times[0]) / 3600
        below = np.zeros(_BINS)
        for number, came in enumerate(one for one in run.datasets if one.samples):
            sums, _ = np.histogram(came.at, edges, weights=came.completion_tokens)
            top = below + sums / seconds
            axes.stairs(top, hours, baseline=below, fill=True, color=_COLOURS[number % 8], alpha=0.85, label=came.name)
            below = top
        axes.set_xlabel("hours since the first answer")
        axes.set_ylabel("completion tokens / s")
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlim(0, hours[-1])
        _legend(axes)

    return _svg(draw, 2.6)


def lengths(came: Came, max_new_tokens: int | None) -> str:
    """How long the answers are, on a logarithmic axis, with their mean and the longest that was allowed."""

    def draw(axes: Axes) -> None:
        answers = np.maximum(came.completion_tokens, 1)
        edges = np.unique(np.geomspace(answers.min(), answers.max() + 1, 49))
        axes.hist(answers, edges.tolist(), color="#0072B2", alpha=0.85)
        axes.axvline(answers.mean(), color="#D55E00", linestyle="--", label=f"mean {answers.mean():,.0f}")
        if max_new_tokens:
            axes.axvline(max_new_tokens, color="#444444", linestyle=":", label=f"max_new_tokens {max_new_tokens:,}")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("completion tokens of an answer")
        axes.set_ylabel("answers")
        _legend(axes)

    return _svg(draw, 2.1, width=_WIDTH / 2)


def _line(number: int) -> dict[str, Any]:
    return {"color": _COLOURS[number % 8], "linestyle": _DASHES[number // 8 % 4], "linewidth": 1.4}


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        # Above the axes, where it hides nothing.
        axes.legend(handles, labels, fontsize=8, ncols=min(len(labels), 4), loc="lower left", bbox_to_anchor=(0, 1))


def _svg(draw: Callable[[Axes], None], height: float, width: float = _WIDTH) -> str:
    """An <svg> element, the same bytes each time."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.subplots())
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    return _METADATA.sub("", text[text.index("<svg") :])


def draw_all(run: Gathered, max_new_tokens: int | None) -> tuple[Sequence[str], dict[str, str]]:
    """The figures of the whole run, and the one of each dataset that has answers, by name."""
    if not len(run.times()):
        return [], {}
    each = {
        one.name: lengths(one, (one.asked.max_new_tokens if one.asked else None) or max_new_tokens)
        for one in run.datasets
        if one.samples
    }
    return [tokens_over_time(run), throughput(run)], each
