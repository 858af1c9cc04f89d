"""Checks of what was tried on a server."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from common.answer_layout import layout_of
from common.answers import parse
from common.chat_template import Tokenizer
from common.messages import BadPrompt
from workers.doctor.found import Found
from workers.doctor.live import Live, Prompted, agreement
from workers.doctor.report import Said, State
from workers.sglang.answer import REASONS, Answer, Outcome
from workers.sglang.preflight import ServerFacts
from workers.sglang.probe import Reply

LiveCheck = Callable[[ServerFacts, Live, Found], Iterator[Said]]
# What a server does to every answer, if it does it to two: no job can be made with it.
_DECISIVE = frozenset(
    {
        "no_output_ids",
        "length_mismatch",
        "longer_than_asked",
        "token_out_of_range",
        "stop_mismatch",
        "prompt_mismatch",
        "nan",
        "weight_version_changed",
        "unauthorized",
        "not_sglang",
    }
)


def _tokenizer(server: ServerFacts, live: Live, found: Found) -> Iterator[Said]:
    """Whether the server reads a text as the tokenizer does: then they have one vocabulary."""
    if found.tokenizer is None:
        return
    if live.read is None:
        why = "with --skip-tokenizer-init it reads no text" if server.skip_tokenizer_init else "it reads no text"
        yield Said("ok", f"not compared: {why}, so see yourself that [tokenizer] path is its model's folder")
    elif (agrees := agreement(live.read, found.tokenizer)) == "same":
        exact = "the same ids" if live.read.ids is not None else "as many ids"
        yield Said("ok", f"a text of many scripts gives {exact} on both sides ({live.read.count})")
    elif agrees == "cut":
        yield Said(
            "warning",
            f"it has the vocabulary of the tokenizer in {found.settings.tokenizer.path}, but cuts a text into other "
            f"ids ({live.read.count} of them): prompts are not cut as its own users' are",
            "see that tokenizer.json and config.json there are the model's own, and try the server's version of "
            "transformers",
        )
    else:
        yield Said(
            "wrong",
            f"it reads a text otherwise than the tokenizer in {found.settings.tokenizer.path}, whose ids would be "
            "other words to its model, or kill it",
            f"set [tokenizer] path to the folder of its model, {server.tokenizer_path or server.model_path}",
        )


def _answers(_: ServerFacts, live: Live, found: Found) -> Iterator[Said]:
    """Whether what it answers is a good answer by the rules of a job."""
    if live.skipped:
        state: State = "ok" if found.at_start else "warning"
        yield Said(state, f"not tried: {live.skipped}", "repeat `tokenmill doctor` when it has time")
        return
    replies = [*live.greedy, *(one.reply for one in live.answers)]
    failed = [reply for reply in replies if reply.answer is None]
    if strange := _out_of_range(replies, found.tokenizer):
        yield Said("wrong", strange, "set [tokenizer] path to the folder of the server's model")
    elif failed:
        yield _failure(failed, replies, at_start=found.at_start)
    elif replies:
        tokens = sum(reply.answer.completion_tokens for reply in replies if reply.answer)
        seconds = max(reply.seconds for reply in replies)
        yield Said(
            "ok", f"{len(replies)} are good, {tokens:,} ids, each as many as it counts; the longest {seconds:.1f} s"
        )
    if live.unasked and not failed:
        yield Said("ok", f"no question was asked: {live.unasked}")


def _failure(failed: Sequence[Reply], replies: Sequence[Reply], *, at_start: bool) -> Said:
    first = failed[0]
    of = f"{len(failed)} of {len(replies)} short answers" if len(replies) > 1 else "a short answer"
    says = f"{of} {'was' if len(failed) == 1 else 'were'} not good ({first.reason}): {first.detail}"
    do = "read the server's log, and upgrade or restart it"
    if first.reason == "late":
        do = "see that it is not paused or hung (`tokenmill servers list`, its log), then repeat `tokenmill doctor`"
    # Of what may pass a job says so, and waits.
    wrong = len(failed) == len(replies) and (not at_start or all(_stays(reply.reason) for reply in failed))
    return Said("wrong" if wrong else "warning", says, do)


def _stays(reason: str) -> bool:
    """Whether what is wrong with an answer is wrong with all that are to come."""
    return reason in _DECISIVE or (reason in REASONS and REASONS[reason].outcome is not Outcome.RETRY)


def _out_of_range(replies: Sequence[Reply], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return ""
    for reply in replies:
        largest = max(reply.answer.output_ids) if reply.answer else 0
        if largest >= tokenizer.vocab_size:
            return f"it answers with the id {largest:,}, and the tokenizer's vocabulary has {tokenizer.vocab_size:,}"
    return ""


def _greedy(_: ServerFacts, live: Live, __: Found) -> Iterator[Said]:
    answers = [reply.answer for reply in live.greedy if reply.answer is not None]
    if len(answers) < 2:
        return
    first, second = (answer.output_ids for answer in answers)
    if first == second:
        yield Said("ok", f"one prompt twice at temperature 0 gives the same {len(first)} ids")
    else:
        at = next((at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), len(first))
        yield Said(
            "warning",
            f"one prompt twice at temperature 0 gives other ids from place {at} on; batches that differ round "
            "otherwise, and so does a damaged model",
            "where that is not expected, try a server without quantization and speculation",
        )


def _ids(_: ServerFacts, live: Live, found: Found) -> Iterator[Said]:
    """Decoded and encoded again: what a pipeline that keeps text alone would make of the answers."""
    good = _good(live)
    if not good or found.tokenizer is None:
        return
    back = sum(_comes_back(answer.output_ids, found.tokenizer) for _, answer in good)
    verified = live.read is not None and agreement(live.read, found.tokenizer) != "other"
    says = f"{back} of {len(good)} answers come back from their text with the same ids"
    if back == len(good) or verified:
        yield Said("ok", f"{says}; the ids themselves are kept, never made from text")
    else:
        yield Said("warning", says, "see that [tokenizer] path is the folder of the server's model")


def _comes_back(output_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    try:
        return tokenizer.encode([tokenizer.decode(output_ids)])[0] == list(output_ids)
    except BadPrompt:
        return False


def _think(_: ServerFacts, live: Live, found: Found) -> Iterator[Said]:
    tokenizer, good = found.tokenizer, _good(live)
    if tokenizer is None or not good:
        return
    opened = layout_of(tokenizer).opened is not None
    read = [parse(answer.output_ids, tokenizer, input_ids=prompt.input_ids) for prompt, answer in good]
    ended = [one for one, (_, answer) in zip(read, good, strict=True) if answer.finish_reason == "stop"]
    closed = sum(one.reasoning is not None and "no_think_end" not in one.damages for one in ended)
    if not opened and not any(one.reasoning is not None for one in read):
        yield Said("ok", "no answer has a think block")
    elif not ended:
        yield Said("ok", f"none of {len(read)} answers ended within so few tokens, so none had to close its thoughts")
    elif closed < len(ended):
        yield Said(
            "warning",
            f"{len(ended) - closed} of {len(ended)} answers ended without </think>",
            "see that the chat template is the model's own; the gate no_think_end watches the job's answers",
        )
    elif not any((one.reasoning or "").strip() for one in read):
        yield Said(
            "warning",
            f"the think blocks of all {len(ended)} answers that ended are empty: the model does not think",
            "see that it is the reasoning model, and that its chat template was told to think; the gate empty_think "
            "watches the job's answers",
        )
    else:
        who = "the prompt opens the think block" if opened else "the model opens the think block itself"
        yield Said("ok", f"{who}, and all {len(ended)} answers that ended closed it")


def _end(_: ServerFacts, live: Live, found: Found) -> Iterator[Said]:
    good = _good(live)
    if not good or found.tokenizer is None:
        return
    ends = found.tokenizer.special_ids.end
    ended = [answer for _, answer in good if answer.finish_reason == "stop"]
    others = sorted({answer.output_ids[-1] for answer in ended if answer.output_ids[-1] not in ends})
    if others:
        yield Said(
            "warning",
            f"it ends answers with {', '.join(map(str, others))}, which the tokenizer's files do not name as an end",
            "see that config.json and generation_config.json beside the tokenizer are those of the server's model",
        )
    elif not ended:
        yield Said("ok", f"none of {len(good)} answers ended within so few tokens")
    else:
        cut = f"; {len(good) - len(ended)} were cut off" if len(ended) < len(good) else ""
        yield Said("ok", f"{len(ended)} of {len(good)} answers ended, each with its end token{cut}")


def _good(live: Live) -> list[tuple[Prompted, Answer]]:
    return [(one, one.reply.answer) for one in live.answers if one.reply.answer is not None]


LIVE_CHECKS: Mapping[str, LiveCheck] = MappingProxyType(
    {
        "tokenizer": _tokenizer,
        "probe_answers": _answers,
        "probe_greedy": _greedy,
        "probe_ids": _ids,
        "probe_think": _think,
        "probe_end": _end,
    }
)
