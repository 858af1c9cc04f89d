"""Findings on the rows: broken lines, duplicates, damaged texts, the order of roles, ids that were decoded."""

from collections.abc import Iterator

from producer.audit.digests import Digests, pairs_of
from producer.audit.finding import Finding, each, level_of, share
from producer.audit.gather import Gathered
from producer.audit.tokens import Measured
from producer.datasets.reasons import REASONS


def findings(seen: Gathered, measured: Measured | None) -> Iterator[Finding]:
    """All of these."""
    yield from _broken(seen)
    yield from _batch(seen)
    yield from _duplicates(seen)
    of = max(1, seen.rows)
    yield from each(seen.damages, _DAMAGES | {"replacement": _OWN_REPLACEMENT} if seen.ours else _DAMAGES, of)
    yield from each(seen.damages, {f"prompt:{name}": _in_prompt(*one) for name, one in _DAMAGES.items()}, of)
    yield from _roles(seen)
    yield from _prompts(seen)
    if measured is not None:
        yield from _decoded(measured)


def _broken(seen: Gathered) -> Iterator[Finding]:
    if not seen.rows:
        yield Finding("wrong", "no_rows", "There is not a single row.", fix="see that the file is the right one.")
    if seen.fault:
        yield Finding(
            "wrong",
            "cut_off",
            f"After {seen.rows:,} rows it could not be read on: {seen.fault}.",
            "The copy was not finished, or the disk was full." if seen.is_damaged else "",
            "put a whole copy in its place." if seen.is_damaged else "see what is wrong with the disk, or the file.",
        )
    for reason, count in seen.broken.rows.most_common():
        yield Finding(
            level_of(count, seen.rows, wrong=0.01),
            reason,
            f"{count:,} of {seen.rows:,} rows ({share(count, seen.rows)}) cannot be read: {REASONS[reason]}.",
            _NOT_JSON[count > seen.rows / 2] if reason == "not_json" else "",
            "look at these rows, and write them anew or leave them out.",
            seen.broken.told(reason),
        )


def _batch(seen: Gathered) -> Iterator[Finding]:
    requests, answers = seen.unpaired.requests, seen.unpaired.answers
    if requests:
        yield Finding(
            "warning",
            "unanswered",
            f"{requests:,} requests of the batch's input have no line in its output.",
            "The batch expired or was cancelled, or the output is not of this input.",
            "ask for them again.",
        )
    if answers:
        yield Finding(
            "warning",
            "no_request",
            f"{answers:,} of {seen.rows:,} rows ({share(answers, seen.rows)}) answer no request of the batch's input.",
            "The output is not of this input, or requests were taken out of it.",
            "put the input beside it that was sent.",
        )


def _duplicates(seen: Gathered) -> Iterator[Finding]:
    pairs, of_pairs = _again(Digests(pairs_of(seen.prompts, seen.replies)))  # one after the other, to save memory
    prompts, of_prompts = _again(Digests(seen.prompts))
    replies, of_replies = _again(seen.of_replies)
    if pairs:
        yield Finding(
            level_of(pairs, seen.rows, wrong=0.2, warning=0.001),
            "duplicates",
            f"{pairs:,} rows ({share(pairs, seen.rows)}) have prompt and answer of an earlier row.",
            "Files were joined twice, or a job that was started again wrote what it had written.",
            "keep one of each (`tokenmill export --dedupe` does).",
            of_pairs,
        )
    if prompts > pairs:
        yield Finding(
            "note",
            "same_prompts",
            f"{prompts:,} rows ({share(prompts, seen.rows)}) have the prompt of an earlier row.",
            "Several answers were asked for each prompt, or the prompts were not freed of duplicates.",
            "",
            of_prompts,
        )
    others = replies - pairs
    if others > 0:
        yield Finding(
            level_of(others, seen.rows, wrong=0.5, warning=0.02),
            "same_answers",
            f"{others:,} rows ({share(others, seen.rows)}) have the answer of another row, to another prompt.",
            "A refusal or an error text was saved as an answer, the model repeats itself at temperature 0, or answers "
            "were joined to the wrong prompts.",
            "look at the examples.",
            of_replies,
        )


def _again(digests: Digests) -> tuple[int, tuple[str, ...]]:
    """How many rows have the text of an earlier one, and examples."""
    found = (f"rows {one:,} and {two:,}, {rows:,} times in all" for one, two, rows in digests.examples())
    return digests.repeated(), tuple(found)


_TEMPLATE = (
    "The text was decoded with skip_special_tokens=False and not cut at the end token, or the prompt was pasted "
)
# As in of_answers.
_NOT_JSON = (
    "Most likely a writer died within a line, or several wrote to one file at once.",
    "Most likely it is no file of rows: a text, or a kind of file that is not known.",
)
_DAMAGES = {
    "control_tokens": (
        "control tokens such as <|im_end|> as text in the answer",
        _TEMPLATE + "in as text. A tokenizer makes control ids of them, which end the turn where there is no end.",
        "cut them out, or leave these rows out; ids have no such trouble.",
        0.05,
        0.0005,
    ),
    "think_doubled": (
        "a think block within a think block, or one in the content beside the reasoning",
        "Reasoning was pasted before a content that held it, or a template that writes <think> was given it again.",
        "keep the reasoning once: in its field, with the content behind </think>.",
        0.05,
        0.0,
    ),
    "think_unclosed": (
        "a <think> that is never closed",
        "The answer was cut off while the model was thinking, and finish_reason does not say so.",
        "leave these rows out, and raise max_new_tokens.",
        0.1,
        0.0,
    ),
    "think_end_alone": (
        "</think> without <think>",
        "The chat template opens the think block in the prompt, and the server ran without a reasoning parser.",
        "split the content at </think>: what stands before it is reasoning, and tokenmill reads it so.",
        2.0,
        1.0,
    ),
    "tool_calls_as_text": (
        "tool calls as text in the content",
        "The server ran without a tool call parser.",
        "read them from the text, or ask /generate for ids.",
        2.0,
        1.0,
    ),
    "replacement": (
        "U+FFFD in the answer",
        "A stream was decoded token by token, so that characters of several tokens were lost.",
        "decode whole answers, not pieces; these rows cannot be repaired.",
        0.02,
        0.001,
    ),
    "mojibake": (
        "mojibake in the answer, such as \u00c3\u00a9 for \u00e9",
        "UTF-8 was read as latin-1 or cp1252 on its way.",
        "set the client's encoding to UTF-8; text.encode('cp1252').decode('utf-8') repairs most of it.",
        0.02,
        0.001,
    ),
    "nul": (
        "NUL characters in the answer",
        "Padding, or a power cut while the file was written.",
        "leave these rows out.",
        0.02,
        0.0,
    ),
}


_RANDOM = "random ids, as `tokenmill demo` and `tokenmill simulate` have them, are full of it"
# What is of ids was never a stream of text.
_OWN_REPLACEMENT = (
    "U+FFFD in the answer",
    f"The ids that the model wrote are no whole characters there: {_RANDOM}, and an answer that was cut may end so.",
    "if the server was not simulated, see that the tokenizer is that of the model; leave these rows out.",
    0.02,
    0.001,
)


def _in_prompt(says: str, cause: str, fix: str, wrong: float, warning: float) -> tuple[str, str, str, float, float]:
    """The same in earlier turns, which someone else wrote: it is told, and no alarm unless there is much of it."""
    del wrong
    told = says.replace(" in the answer", "").replace(" in the content", "")
    return f"{told}, in earlier turns", cause, fix, 2.0, max(0.05, warning)


_ROLES = {
    "starts_with_assistant": "the assistant begins",
    "no_user": "no user turn",
    "user_twice": "two user turns in a row",
    "assistant_twice": "two assistant turns in a row",
    "late_system": "a system turn in the middle",
    "tool_without_call": "a tool's result with no call before it",
    "empty_turn": "a turn with nothing in it",
    "no_answer": "no answer, though others of their layout in the file have one",
}
_BAD_ORDER = (
    "It was written so, turns were lost, or a tree of messages was flattened. Most templates render it without a word, "
    "and not as the model knows it."
)
_CAUSES = {
    "starts_with_assistant": "A greeting, or the turn before it was lost. Some templates refuse it.",
    "no_user": "The question is a system turn, or was lost. Some templates refuse it.",
    "tool_without_call": "The call was lost, or stands in the text of a turn.",
    "empty_turn": "A text was lost, or was never there.",
    "no_answer": "They are prompts among answers, or their last turn was lost.",
}


def _roles(seen: Gathered) -> Iterator[Finding]:
    for name, says in _ROLES.items():
        count = seen.roles[name]
        if not count:
            continue
        level = level_of(count, seen.rows, wrong=0.3, warning=0.01)
        text = f"{count:,} of {seen.rows:,} rows ({share(count, seen.rows)}): {says}."
        cause, examples = _CAUSES.get(name, _BAD_ORDER), seen.roles.told(name)
        yield Finding(level, name, text, cause, "look at these rows; leave them out, or repair them.", examples)


def _prompts(seen: Gathered) -> Iterator[Finding]:
    count = seen.prompt_rows.total()
    if not count:
        return
    if count == seen.layouts.total():
        says = "No row ends with an answer: these are prompts, or conversations that end with a user or a tool."
    else:
        by = ", ".join(f"{layout} {rows:,}" for layout, rows in seen.prompt_rows.most_common())
        says = (
            f"{count:,} of {seen.rows:,} rows ({share(count, seen.rows)}) are prompts: they have no answer, nor has "
            f"any row of their layout in their file ({by})."
        )
    yield Finding("note", "prompts", says)


def _decoded(measured: Measured) -> Iterator[Finding]:
    counts, of = measured.counts, measured.rows
    yield from each(counts, _IDS, max(1, of), "rows of the sample")
    closed = counts["think_end"] + counts["think_end_again"]
    open_ = counts["no_think_end"]
    if closed and open_ > 0.02 * of:
        yield Finding(
            level_of(open_, of, wrong=0.5, warning=0.02),
            "no_think_end",
            f"{open_:,} of {of:,} rows of ids in the sample ({share(open_, of)}) have no </think>; the others do.",
            "They were cut off while the model was thinking, or it did not think there.",
            "leave out what was cut off; see that all prompts were made with the same chat_template_kwargs.",
            counts.told("no_think_end"),
        )


_IDS = {
    "out_of_range": (
        "ids beyond the vocabulary",
        "The tokenizer is not that of the model.",
        "name the model's own folder with --tokenizer; if it is, do not train on these.",
        0.001,
        0.0,
    ),
    "unclosed": (
        "a think block that the prompt opens and the answer never closes",
        "They were cut off while the model was thinking.",
        "leave these rows out, and raise max_new_tokens.",
        0.2,
        0.01,
    ),
    "no_end": (
        "no end token at the end",
        "The end token was cut off, or the answer was, and finish_reason does not say so.",
        "a model that learns from them does not learn to stop: keep the end token that the server wrote.",
        0.2,
        0.01,
    ),
    "end_within": (
        "an end token before the end",
        "Several turns are learnt as one answer, or the answer went on behind its end (ignore_eos).",
        "cut answers at their first end token; for conversations this is as it must be.",
        2.0,
        0.5,
    ),
    "think_end_again": (
        "</think> more than once",
        "A template wrote a think block around reasoning that had one, or several turns are learnt.",
        "look at these rows with the tokenizer.",
        0.5,
        0.05,
    ),
    "replacement": (
        "ids that decode to U+FFFD",
        f"The model wrote no whole character, which is rare, or the tokenizer is another model's; {_RANDOM}.",
        "if the server was not simulated, see that the tokenizer is that of the model, and look at these rows.",
        0.2,
        0.02,
    ),
}
