"""The audit of one source: its rows gone through once, then what was found."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from producer.audit import of_answers, of_rows
from producer.audit.finding import Finding
from producer.audit.gather import Gathered, gather
from producer.audit.sample import ROWS
from producer.audit.sources import Source
from producer.audit.tokens import Measured, measure
from producer.datasets.cursor import MAX_ROW_BYTES

if TYPE_CHECKING:
    from common.chat_template import Tokenizer

_ORDER = ("wrong", "warning", "note")
PERCENTILES = ("p5", "p25", "p50", "p75", "p95", "p99", "max")


class Audited(msgspec.Struct, frozen=True):
    """What is to be said of one source; `facts` as --json has them."""

    source: str
    verdict: str
    findings: list[Finding]
    facts: dict[str, Any]
    lengths: dict[str, dict[str, int]]

    @property
    def wrong(self) -> bool:
        """Whether something is wrong with it, beyond a warning."""
        return any(one.level == "wrong" for one in self.findings)


def audit(
    source: str | Path | Source,
    tokenizer: "Tokenizer | None" = None,
    *,
    sample_rows: int = ROWS,
    max_row_bytes: int = MAX_ROW_BYTES,
    processes: int | None = None,
) -> Audited:
    """Audit a file, folder, pattern or URL, by so many processes; None is as many as its size is worth.

    All files of a folder are rows here: sources_of tells what of our own folders is data.

    Raises OSError, DataError if not a single row can be read, and TokenmillError if a process dies.
    """
    found_in = source if isinstance(source, Source) else Source(str(source))
    seen = gather(found_in, sample_rows if tokenizer else 0, max_row_bytes, processes)
    measured = measure(seen.sample.rows(), tokenizer) if tokenizer else None
    found = [*of_answers.findings(seen, measured), *of_rows.findings(seen, measured)]
    found.sort(key=lambda one: _ORDER.index(one.level))
    return Audited(seen.source, verdict(found), found, _facts(seen, measured), _lengths(seen, measured))


def verdict(found: Sequence[Finding]) -> str:
    """The worst finding as one paragraph, or that there is none."""
    alarms = [one for one in found if one.alarm]
    if not alarms:
        return "Nothing looks wrong."
    worst = alarms[0]
    more = f" {len(alarms) - 1} more alarms stand below." if len(alarms) > 2 else ""
    more = " One more alarm stands below." if len(alarms) == 2 else more
    parts = [worst.says, worst.cause, worst.fix and f"What to do: {worst.fix}"]
    return " ".join(part for part in parts if part) + more


def _facts(seen: Gathered, measured: Measured | None) -> dict[str, Any]:
    texts = seen.answers - seen.id_tokens.count
    facts: dict[str, Any] = {
        "rows": seen.rows,
        "bytes": seen.bytes,
        "layouts": dict(seen.layouts.most_common()),
        "broken_rows": seen.broken.rows.total(),
        "answers": seen.answers,
        "answers_without_reasoning": texts - seen.reasoned,
        "reasoning_in_content": seen.in_content,
        "finish_reasons": dict(seen.finish_reasons.most_common()),
        "claimed_completion_tokens": seen.claimed.total if seen.claimed.rows else None,
        "rows_of_ids": seen.id_tokens.count,
        "rows_of_ids_that_claim": seen.ids_claimed,
        "rows_of_ids_not_as_claimed": seen.notes["ids_not_as_counted"],
        "tokens_in_text": None,
    }
    if measured is not None:
        facts["tokens_in_text"] = {
            "rows_sampled": measured.rows,
            "rows_of_ids_sampled": measured.rows_of_ids,
            "rows_refused": measured.refused,
            "rows_left_out_as_too_long": measured.too_long,
            "rows_compared": len(measured.both),
            # So many digits that no other whole number is shown than the table of lengths has.
            "claimed_mean": round(measured.claimed_mean, 4),
            "text_mean": round(measured.text_mean, 4),
        }
    return facts


def _lengths(seen: Gathered, measured: Measured | None) -> dict[str, dict[str, int]]:
    kinds = {
        "answer, ids": seen.id_tokens,
        "answer, tokens claimed": seen.claimed,
        "answer, tokens of the sample": measured.tokens if measured else None,
        "answer, characters": seen.characters,
        "reasoning, characters": seen.reasoning_characters,
    }
    return {
        name: {"mean": round(one.mean), **dict(zip(PERCENTILES, one.percentiles(), strict=True))}
        for name, one in kinds.items()
        if one is not None and one.rows
    }


def id_check(facts: dict[str, Any]) -> str:
    """Whether rows of ids have as many as they claim, for people; "" where there are none."""
    rows, claiming = facts["rows_of_ids"], facts["rows_of_ids_that_claim"]
    if not rows:
        return ""
    if not claiming:
        return f"{rows:,} rows, which claim no number"
    others = f"; {rows - claiming:,} more claim no number" if claiming < rows else ""
    return f"as many as are claimed in {claiming - facts['rows_of_ids_not_as_claimed']:,} of {claiming:,} rows{others}"


def token_check(facts: dict[str, Any]) -> str:
    """What was done to compare tokens, for people."""
    measured = facts["tokens_in_text"]
    if measured is None:
        return "tokens in the text were not checked, for want of a tokenizer (--tokenizer DIR)"
    if not measured["rows_compared"]:
        texts = measured["rows_sampled"] - measured["rows_of_ids_sampled"]
        return f"{texts:,} rows were tokenized; they claim no tokens to compare with"
    return (
        f"of {measured['rows_compared']:,} rows tokenized, usage claims {measured['claimed_mean']:,.0f} tokens a row "
        f"and the text has {measured['text_mean']:,.0f}"
    )
