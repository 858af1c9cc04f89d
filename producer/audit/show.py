"""An audit for people: as text, and as one HTML page that needs no network."""

import textwrap
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from producer.audit.audit import PERCENTILES, Audited, id_check, token_check
from producer.audit.finding import share

_WIDTH = 100
_MARKS = {"wrong": "WRONG", "warning": "warning", "note": "note"}


def lines(one: Audited) -> Iterator[str]:
    """The audit of one source as text, some 100 characters wide."""
    yield f"{one.source}: {summary(one.facts)}"
    yield from _wrapped(one.verdict, "  ")
    yield ""
    for name, value in facts(one.facts):
        yield f"  {name:<26} {value}"
    if one.lengths:
        yield ""
        yield f"  {'length of':<30}" + "".join(f"{name:>9}" for name in ("mean", *PERCENTILES))
        for name, numbers in one.lengths.items():
            yield f"  {name:<30}" + "".join(f"{number:>9,}" for number in numbers.values())
    for found in one.findings:
        yield ""
        yield from _wrapped(f"{_MARKS[found.level]}  {found.name}: {found.says}", "  ")
        for text in (found.cause, found.fix and f"What to do: {found.fix}"):
            if text:
                yield from _wrapped(text, "    ")
        for example in found.examples:
            yield from _wrapped(example, "    - ", "      ")


def summary(facts: dict[str, Any]) -> str:
    """`1,000 rows, 12.3 MB, layout openai`."""
    layouts = facts["layouts"]
    named = ", ".join(f"{name} ({rows:,})" if len(layouts) > 1 else name for name, rows in layouts.items())
    kind = f"layout{'s' if len(layouts) > 1 else ''} {named}" if layouts else "no layout that is known"
    return f"{facts['rows']:,} rows, {facts['bytes'] / 1e6:,.1f} MB, {kind}"


def facts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The numbers by name, for a table of two columns."""
    rows, answers, without = facts["rows"], facts["answers"], facts["answers_without_reasoning"]
    table = [("rows that cannot be read", _of(facts["broken_rows"], rows)), ("answers", f"{answers:,}")]
    if without or facts["reasoning_in_content"]:
        table.append(("answers without reasoning", _of(without, answers)))
        table.append(("... with it in the content", _of(facts["reasoning_in_content"], answers)))
    ended = facts["finish_reasons"]
    table.append(("finish reasons", ", ".join(f"{name} {n:,}" for name, n in ended.items()) or "none stated"))
    claimed = facts["claimed_completion_tokens"]
    table.append(("completion tokens claimed", "none" if claimed is None else f"{claimed:,}"))
    if told := id_check(facts):
        table.append(("ids", told))
    if not told or answers > facts["rows_of_ids"]:
        table.append(("tokens in the text", token_check(facts) if answers else "there is no answer"))
    return table


def page(audits: Sequence[Audited]) -> str:
    """The HTML page. Everything that comes from files is escaped."""
    import jinja2  # noqa: PLC0415  not for the text, which is soon done

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string((files(__package__) / "page.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        audits=audits,
        summary=summary,
        facts=facts,
        columns=("mean", *PERCENTILES),
        marks=_MARKS,
        title="tokenmill: audit",
    )


def _of(count: int, of: int) -> str:
    return f"{count:,} ({share(count, of)})" if count else "0"


def _wrapped(text: str, indent: str, rest: str | None = None) -> list[str]:
    behind = indent if rest is None else rest
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=behind, break_long_words=False, break_on_hyphens=False
    )
