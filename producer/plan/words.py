"""A plan as a person reads it: a table, and sentences that say what its figures are worth."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from producer.monitor.figures import Look, duration, short
from producer.monitor.grid import Column, as_text, grid, lines_of
from producer.plan.arithmetic import Limit
from producer.plan.make import FEW_ANSWERS, Asked, Dataset, Plan

_MARKS = {"counted": "", "estimated": "~", "at least": ">"}


def _number(key: str) -> Any:
    return lambda line: "" if line.get(key) is None else f"{line[key]:,.0f}"


def _short(key: str) -> Any:
    return lambda line: short(line[key])


def _time(key: str) -> Any:
    return lambda line: "" if key not in line else hours(line[key])


_COLUMNS = (
    Column("dataset", lambda line: line["name"], left=True, widest=16),
    Column("rows", lambda line: line["rows"], rank=2),
    Column("prompt", _number("prompt")),
    Column("answer", _number("answer")),
    Column("samples", _number("samples")),
    Column("tokens", _short("tokens")),
    Column("alone", _time("hours")),
    Column("done in", _time("done_hours")),
    Column("disk", lambda line: size(line["disk"]), rank=1),
)


def hours(value: float | None) -> str:
    """`56h29m`, `12m30s`; a dash for None."""
    return duration(None if value is None else 3600 * value)


def size(count: float) -> str:
    """Bytes in decimal units: `12 kB`, `3.4 GB`."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            scaled = count / scale
            return f"{scaled:.1f} {unit}" if scaled < 10 else f"{scaled:,.0f} {unit}"
    return f"{count:.0f} B"


def lines(plan: Plan, width: int, look: Look) -> Iterator[str]:
    """The table, one line a dataset and their sum, then the notes, no line longer than `width` characters."""
    entries: list[Mapping[str, Any]] = [_entry(one) for one in plan.datasets]
    if len(entries) > 1:
        entries.append(_sum(plan))
    for line in lines_of(grid(_COLUMNS, entries, width, look, gap=2)):
        yield as_text(line).plain
    yield ""
    for note in plan.notes:
        yield from textwrap.wrap(note, width, subsequent_indent="  ", break_on_hyphens=False)


def _entry(one: Dataset) -> dict[str, Any]:
    planned = one.planned
    return {
        "name": planned.name,
        "rows": f"{_MARKS[one.rows.how]}{one.rows.count:,}",
        "prompt": one.mean_prompt_tokens,
        "answer": one.answers.mean_tokens,
        "samples": planned.samples,
        "tokens": planned.completion_tokens,
        "hours": planned.hours,
        "done_hours": planned.done_hours,
        "disk": planned.disk_bytes,
    }


def _sum(plan: Plan) -> dict[str, Any]:
    totals = plan.totals
    return {
        "name": "all",
        "rows": f"{sum(one.rows.count for one in plan.datasets):,}",
        "samples": totals.samples,
        "tokens": totals.completion_tokens,
        "done_hours": totals.hours,
        "disk": totals.disk_bytes,
    }


def notes(plan: Plan, asked: Sequence[Asked], unasked: Sequence[str], servers: int) -> list[str]:
    """All that is to be said; `unasked` says what could not be asked, and comes first."""
    return [
        *unasked,
        _rate(plan),
        *(_dataset(one, each) for one, each in zip(plan.datasets, asked, strict=True)),
        *_caps(plan),
        *_limit(plan.limit, servers),
    ]


def _rate(plan: Plan) -> str:
    rate = plan.rate
    if rate.tokens_per_second is None:
        return (
            "Times are not known: there are too few records, and no server is at work whose speed could be read; give "
            "--tokens-per-second N (completion tokens of all servers together), or measure it with --pilot 50."
        )
    speed = f"{rate.tokens_per_second:,.0f} tokens/s"
    return {
        "given": f"Times are at {speed}, as given.",
        "records": f"Times are at {speed}, measured from the records in the output folder.",
        "servers": f"Times are at {speed}, what the servers make now; with more in flight it may be more.",
        "pilot": f"Times are at {speed}, those of the pilot; it had few in flight, and a full server takes less time.",
    }[rate.origin] + (
        " `alone` is a dataset with the servers to itself, `done in` beside the others, by its weight."
        if len(plan.datasets) > 1
        else ""
    )


def _dataset(one: Dataset, asked: Asked) -> str:
    parts = [_rows(one, asked), _prompts(one, asked), _answers(one), _end(one)]
    failures = [told.failure for told in asked.pilot if told.failure]
    if failures:
        reasons = ", ".join(f"{failures.count(reason)} {reason}" for reason in dict.fromkeys(failures))
        parts.append(f"the pilot got no answer to {len(failures)} prompts ({reasons})")
    if asked.source.fault:
        parts.append(f"reading it ended early: {asked.source.fault}")
    return f"{one.planned.name}: {'; '.join(part for part in parts if part)}."


def _rows(one: Dataset, asked: Asked) -> str:
    how = {
        "counted": "rows, counted",
        "estimated": "rows, estimated by bytes (~)",
        "at least": "rows at least (>), as far as was read",
    }[one.rows.how]
    turns = ""
    if asked.dataset.turns == "all":
        turns = f", {asked.source.samples_a_row:.1f} answers a row at most (a conversation may stop before its end)"
    dedupe = ", duplicates not looked for" if asked.dataset.dedupe else ""
    done = f", {one.answered:,} answered" if one.answered else ""
    refused = f", {one.rejected:,} rejected" if one.rejected else ""
    stopped = f", {one.stopped:,} stopped" if one.stopped else ""
    return f"{one.rows.count:,} {how}{turns}{done}{refused}{stopped}{dedupe}"


def _prompts(one: Dataset, asked: Asked) -> str:
    if not one.looked_at:
        return "" if one.rows.count else "the source is empty"
    where = "" if asked.source.spread else " of its beginning, as it cannot be entered further on"
    bad = f", {one.rejected_of_looked_at:,} of them rejected" if one.rejected_of_looked_at else ""
    return f"prompts from {one.looked_at:,} rows{where}{bad}"


def _answers(one: Dataset) -> str:
    answers = one.answers
    cut = f", {answers.truncated:,} truncated" if answers.truncated else ""
    match answers.origin:
        case "records":
            few = " (few, and the short ones end first)" if answers.answers < FEW_ANSWERS else ""
            return f"answers from {answers.answers:,} records{few}{cut}"
        case "pilot":
            return f"answers from a pilot of {answers.answers:,}{cut}"
        case "mean_tokens":
            return "answers by its mean_tokens"
        case "guess":
            return "answers guessed, half of max_new_tokens: --pilot 50 would tell"


def _end(one: Dataset) -> str:
    if one.cap_tokens is None:
        return ""
    prompts = " with prompts" if one.count == "total" else ""
    if one.planned.ends == "cap":
        return f"its cap of {one.cap_tokens:,} tokens{prompts} takes {one.planned.samples:,} samples"
    return (
        f"its source ends at {one.planned.spent_tokens:,} tokens{prompts}, before its cap of {one.cap_tokens:,}"
        if one.rows.how != "at least"
        else f"as far as was read it has {one.planned.spent_tokens:,} tokens{prompts} of its cap of {one.cap_tokens:,}"
    )


def _caps(plan: Plan) -> Iterator[str]:
    totals = plan.totals
    saved = totals.uncapped_tokens - totals.completion_tokens
    if saved > 0 and totals.hours is not None and totals.saved_hours is not None:
        whole = hours(totals.hours + totals.saved_hours)
        yield f"The caps save {short(saved)} tokens, {hours(totals.saved_hours)} of {whole}."
    elif saved > 0:
        yield f"The caps save {short(saved)} tokens of {short(totals.uncapped_tokens)}."
    for one in plan.datasets:
        if one.cap_tokens is None and one.planned.hours and one.planned.completion_tokens > 1_000_000:
            each = one.planned.hours * 1e6 / one.planned.completion_tokens
            yield (
                f"{one.planned.name} has no cap: each million tokens that one (--cap N to try) takes off its "
                f"{short(one.planned.completion_tokens)} saves {hours(each)}."
            )


def _limit(limit: Limit, servers: int) -> Iterator[str]:
    if not servers or not limit.mean_tokens:  # nothing is left to be sent
        return
    one = servers == 1
    who = "The server" if one else f"The {servers} servers"
    kv = f"{limit.kv:,} requests of {limit.mean_tokens:,.0f} tokens (prompt and answer) in KV" if limit.kv else ""
    running = f"{limit.running:,} requests at once at most" if limit.running else ""
    said = [f"{'holds' if one else 'hold'} {kv}"] if kv else []
    said += [f"{'runs' if one else 'run'} {running}"] if running else []
    unsaid = [] if kv else ["how many requests the KV cache holds"]
    unsaid += [] if running else ["how many run at once"]
    if not said:
        yield f"{who} did not say {', nor '.join(unsaid)}."
        return
    verdict = {
        "kv": "KV is the limit: shorter answers, or more memory for KV, would let more run.",
        "running": "the running limit, which is compute, is what binds; KV has room.",
        "concurrency": f"the configuration is the limit: [worker] concurrency of all workers is {limit.asked:,}.",
        "unknown": f"[worker] concurrency of all workers is {limit.asked:,}. {who} did not say {' or '.join(unsaid)}.",
    }[limit.by]
    yield f"{who} {' and '.join(said)}; {verdict}"
