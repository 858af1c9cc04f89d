"""Findings on the answers: reasoning, tokens, how they end."""

from collections.abc import Iterator

from producer.audit.digests import lengths_of
from producer.audit.finding import Finding, Level, each, share
from producer.audit.gather import Gathered
from producer.audit.tokens import Measured

_EMPTY_SHARE = 0.05  # of the answers, without reasoning where there should be some
# Tokens are counted with those of marks and ends, which servers do differently.
_MORE, _LESS, _SLACK = 1.15, 0.85, 8
_IDS = "ask /generate for ids, which hold all that the model wrote (`tokenmill run` does)"


def findings(seen: Gathered, measured: Measured | None) -> Iterator[Finding]:
    """All of these."""
    lost = _is_lost(seen, measured)
    yield from _reasoning(seen, measured, lost=lost)
    yield from _tokens(seen, measured, lost=lost)
    yield from _ends(seen, measured)
    yield from each(seen.notes, _NOTES, max(1, seen.rows))
    yield from _missing(seen)


def _is_lost(seen: Gathered, measured: Measured | None) -> bool:
    """Whether answers claim tokens that their text does not have."""
    if measured is not None and len(measured.both) >= 5:
        return measured.claimed_mean > _MORE * measured.text_mean + _SLACK
    return seen.notes["more_tokens_than_bytes"] > 0.02 * max(1, seen.claimed.count)


def _claim(seen: Gathered, measured: Measured | None) -> str:
    """`usage claims 1,402 tokens a row and the text has 298`."""
    if measured is not None and measured.both:
        return f"usage claims {measured.claimed_mean:,.0f} tokens a row and the text has {measured.text_mean:,.0f}"
    characters = f"{seen.characters.mean:,.0f} characters"
    return f"usage claims {seen.claimed.mean:,.0f} tokens a row and the text has {characters}"


def _reasoning(seen: Gathered, measured: Measured | None, *, lost: bool) -> Iterator[Finding]:
    texts = seen.answers - seen.id_tokens.count
    empty = texts - seen.reasoned - seen.notes["empty"]
    if not texts or empty <= 0:
        return
    says = f"{share(empty, texts)} of the answers have no reasoning"
    examples = seen.notes.told("no_reasoning")
    counted = seen.notes["reasoning_counted"]
    if (lost and seen.reasoned < texts / 2) or counted > _EMPTY_SHARE * texts:
        told = f" while {_claim(seen, measured)}" if seen.claimed.rows else ""
        told += f"; {counted:,} of these rows count reasoning_tokens in their usage" if counted else ""
        yield Finding(
            "wrong",
            "reasoning_lost",
            f"{says}{told}.",
            "The model thought, and its thinking was not saved: the server ran without a reasoning parser and the "
            "client read a field that stayed empty, or it ran with one, which moves the thinking out of content, and "
            "the client read only content.",
            f"{_IDS}; or start the server with --reasoning-parser and save reasoning_content beside content. What was "
            "not saved cannot be brought back: these rows have to be made again.",
            examples,
        )
    elif seen.empty_fields > _EMPTY_SHARE * texts:
        told = f", and {_claim(seen, measured)}" if seen.claimed.rows else ""
        yield Finding(
            "wrong" if empty > texts / 2 and seen.claimed.rows else "warning",
            "no_reasoning",
            f"{says}, though {share(seen.empty_fields, texts)} have a field for it, which is empty{told}.",
            "The model did not think: the chat template was not told to (enable_thinking for Qwen3, thinking for Kimi "
            "and DeepSeek; a wrong key passes without a word), or the prompt closes the think block."
            if seen.claimed.rows
            else "The model did not think, since the chat template was not told to; or it did, and the server ran "
            "without a reasoning parser, so that the field stayed empty. The rows claim no tokens that would tell.",
            "look at the end of a rendered prompt (`tokenmill enqueue --dry-run` shows it), set chat_template_kwargs, "
            "and make the rows again; `tokenmill doctor` says whether a model thinks.",
            examples,
        )
    elif seen.reasoned:
        yield Finding("note", "some_without_reasoning", f"{says}; the others have some.", examples=examples)
    else:
        yield Finding("note", "plain_answers", "No answer has reasoning, or a field for it.")


def _tokens(seen: Gathered, measured: Measured | None, *, lost: bool) -> Iterator[Finding]:
    if not seen.claimed.rows:
        return
    bytes_short = seen.notes["more_tokens_than_bytes"]
    examples = seen.notes.told("more_tokens_than_bytes")
    texts = seen.answers - seen.id_tokens.count
    if lost and seen.reasoned >= texts / 2:
        yield Finding(
            "wrong",
            "tokens_lost",
            f"{_claim(seen, measured).capitalize()}.",
            "Part of what the model wrote was not saved: tool calls, other choices, or the end of the text; or the "
            "tokenizer is not that of the model.",
            f"compare one row with the raw answer of the server; {_IDS}.",
            examples,
        )
    elif bytes_short and not lost:
        yield Finding(
            "warning",
            "more_tokens_than_bytes",
            f"{bytes_short:,} rows ({share(bytes_short, seen.claimed.count)}) claim more tokens than they have bytes.",
            "Part of what the model wrote was not saved there.",
            "look at these rows beside the raw answers of the server.",
            examples,
        )
    if measured is not None and len(measured.both) >= 5 and measured.claimed_mean < _LESS * measured.text_mean - _SLACK:
        yield Finding(
            "warning",
            "tokens_beyond_claim",
            f"{_claim(seen, measured).capitalize()}: more than it claims.",
            "The tokenizer is not that of the model, usage counts only a part (the answer without its reasoning), or "
            "text was added after it was generated.",
            "name the model's own folder with --tokenizer, and compare one row with the raw answer of the server.",
        )


def _ends(seen: Gathered, measured: Measured | None) -> Iterator[Finding]:
    ended = seen.finish_reasons.total()
    cut = sum(seen.finish_reasons[name] for name in ("length", "max_tokens", "max_output_tokens"))
    pile = _pile(seen, measured)
    if pile is not None:
        length, count, of, unit = pile
        exactly = f"{count:,} of {of:,} answers ({share(count, of)}), no two alike, are exactly {length:,} {unit} long."
        yield Finding(
            "wrong",
            "one_length",
            exactly,
            f"They were cut there: max_tokens, or a limit of the client, was {length:,}"
            + (", which is the default of SGLang's /generate." if length == 128 else ".")
            + ("" if cut else " No finish_reason says so, since it was not saved, or the text was cut afterwards."),
            "set max_new_tokens to what the model needs (10,240 and more for one that reasons); make these rows again.",
        )
    if cut:
        level: Level = "wrong" if cut >= 0.2 * ended else "warning" if cut >= 0.02 * ended else "note"
        low = seen.cut_claimed.percentiles((0.5,))
        at = f"; half of these have {low[0]:,} tokens or fewer" if low else ""
        yield Finding(
            level,
            "truncated",
            f"{cut:,} of {ended:,} answers ({share(cut, ended)}) ended by length{at}.",
            "max_tokens was too small for them, or the context was full.",
            "raise max_new_tokens, or leave these rows out: they teach a model to stop anywhere.",
        )
    failed = seen.finish_reasons["abort"] + seen.finish_reasons["error"] + seen.finish_reasons["content_filter"]
    if failed:
        yield Finding(
            "warning",
            "aborted",
            f"{failed:,} answers were aborted by the server or its filter.",
            "The server dropped them, and what it had is no whole answer.",
            "leave these rows out, and make them again.",
        )


def _pile(seen: Gathered, measured: Measured | None) -> tuple[int, int, int, str] | None:
    """A length that too many answers have: it, how many do, of how many, and in what it is measured.

    Of equal answers one counts, since they are of one length without being cut.
    """
    first = seen.of_replies.first()
    candidates = [(lengths_of(seen.tokens, first), "tokens")]
    if measured is not None:
        candidates.append((measured.distinct, "tokens (of the sample)"))
    candidates.append((lengths_of(seen.sizes, first), "characters"))
    for lengths, unit in candidates:
        if lengths.rows and (found := lengths.pile(least=32, share=0.03, rows=10)):
            return (*found, lengths.count, unit)
    return None


def _missing(seen: Gathered) -> Iterator[Finding]:
    missing, numbers = seen.numbers.missing, seen.numbers
    if not missing:
        return
    whole = missing + numbers.count
    limit = next(
        (one for one in (30, 60, 90, 120, 180, 300, 600, 1800) if 0.9 * one < seen.longest_seconds <= one), None
    )
    told = f" The slowest answer took {seen.longest_seconds:,.1f} s, just under {limit} s." if limit else ""
    yield Finding(
        # Many that are not there, and nothing that speaks of a timeout: someone has made a selection.
        "wrong" if missing > 0.02 * whole and limit else "warning" if missing <= 0.15 * whole else "note",
        "rows_missing",
        f"{missing:,} of {whole:,} numbers ({share(missing, whole)}) between the lowest and the highest are not there."
        + told,
        "Requests failed and were dropped; with a timeout these are the long answers, so that what is left is biased "
        "towards short ones."
        if limit
        else "Rows were left out, or their requests failed and were dropped.",
        "find out which rows are missing and whether they are the long ones; raise the client's timeout, and make "
        "them again."
        if limit
        else "see whether they were left out on purpose; if not, make them again.",
    )


# What it says behind "N rows (x %)"; cause; fix; the share from which it is wrong, and above which it is an alarm.
_NOTES = {
    "timed_out": (
        "a timeout in the place of an answer",
        "The client gave up on the answers that take long: what is left is biased towards short ones.",
        "raise the client's timeout (tokenmill has none while a server works on the answer); make these rows again.",
        0.01,
        0.0,
    ),
    "failed": (
        "an error in the place of an answer",
        "The request failed, and nobody tried it again.",
        "make these rows again.",
        0.05,
        0.0,
    ),
    "prompt_unread": (
        "a prompt beside the answer that cannot be read",
        "Roles that nobody knows, or contents that are no text.",
        "look at these rows, and write their messages as OpenAI's.",
        0.2,
        0.0,
    ),
    "empty": (
        "an answer with nothing in it",
        "The client read a field that the server does not fill, or the model ended at once.",
        "look at a raw answer of the server; leave these rows out.",
        0.05,
        0.002,
    ),
    "think_only": (
        "reasoning, and no answer behind it",
        "They were cut off while the model was thinking, or the client lost content.",
        "raise max_new_tokens, and make these rows again.",
        0.2,
        0.01,
    ),
    "ids_not_as_counted": (
        "another number of output ids than completion_tokens says",
        "Ids were lost or added after they were generated, or the text was tokenized again.",
        "do not train on these; take the ids of the server as they are.",
        0.01,
        0.0,
    ),
    "prompt_ids_not_as_counted": (
        "another number of input_ids than prompt_tokens says",
        "The server saw another prompt than the one in the row.",
        "do not train on these; keep the ids that were sent.",
        0.01,
        0.0,
    ),
    "mask_length": (
        "a loss mask of another length than the ids",
        "The row was cut, and its mask was not.",
        "make the mask anew, or leave these rows out.",
        0.01,
        0.0,
    ),
    "mask_learns_nothing": (
        "a loss mask that learns nothing",
        "The answer was cut off by a maximum length, or the marks that the mask was made by were not found.",
        "leave these rows out; if there are many, see by what the mask was made.",
        0.05,
        0.005,
    ),
    "mask_learns_prompt": (
        "a loss mask that begins with the first id, so that the prompt is learnt",
        "The mask was not made by the boundary between prompt and answer.",
        "make the mask anew.",
        0.05,
        0.0,
    ),
    "not_ids": (
        "ids below 0, or of more than 32 bits",
        "Labels stand in the place of ids.",
        "take input_ids, not labels.",
        0.001,
        0.0,
    ),
    "cut": (
        "cut or split by `tokenmill export` (--max-length, --cap), as their flags say: not counted as cut-off answers",
        "",
        "",
        2.0,
        1.0,
    ),
    "media": (
        "an image, audio, video or file in the conversation",
        "Only text can be sent: `tokenmill run` rejects these rows as not_text, unless drop_media = true.",
        "",
        2.0,
        1.0,
    ),
    "void": ("marks of tokenmill that take a record back", "", "read segments by `tokenmill export`.", 2.0, 1.0),
    "reject": ("rejects of tokenmill, which have no answer", "", "`tokenmill rejects` says why.", 2.0, 1.0),
}
