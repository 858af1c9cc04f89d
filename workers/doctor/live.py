"""Trying a server: a few short requests, none of them to one that is full, and none with an id that it may not know."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from common.chat_template import Tokenizer
from common.messages import BadPrompt
from common.template_kwargs import TEMPLATE_ERRORS
from workers.sglang.http import AiohttpHttp, Http
from workers.sglang.preflight import ServerFacts
from workers.sglang.probe import ODD_TEXT, SURE_IDS, Prober, Reply, TextRead

# Any id that an answer may hold, where the vocabulary is not known yet.
ANY_VOCABULARY = 1 << 31
GREEDY_TOKENS = 16
# At the start of a job: what has not answered by then is let go, and the job starts all the same.
BRIEF_SECONDS = 3.0
# Where a person waits for the report.
FIRST_SECONDS, ANSWER_SECONDS = 20.0, 120.0
ANSWER_TOKENS = 1024
QUESTIONS = ("1 + 1 = ?", "Name a colour, in one word.", "Why is the sky blue? Answer in one sentence.")
_READ_SECONDS = 5.0


Agreement = Literal["same", "cut", "other"]


class Prompted(msgspec.Struct, frozen=True):
    """A question as the chat template has it, and what came."""

    input_ids: list[int]
    reply: Reply


class Live(msgspec.Struct, frozen=True):
    """What was tried on one server. `skipped` says why no answers were asked for; `greedy` are two of one prompt."""

    read: TextRead | None = None
    greedy: tuple[Reply, ...] = ()
    answers: tuple[Prompted, ...] = ()
    skipped: str = ""
    unasked: str = ""  # why no questions were asked, though it answers


async def brief(facts: ServerFacts, api_key: str | None, http: Http) -> Live:
    """The least that tells: how it reads a text, and one short greedy answer twice, at the same time."""
    prober = Prober(facts, api_key, http)
    if waiting := await prober.waiting():
        return Live(await prober.tokenized(ODD_TEXT, _READ_SECONDS), skipped=_full(waiting))
    read, first, second = await asyncio.gather(
        prober.tokenized(ODD_TEXT, BRIEF_SECONDS), _greedy(prober, BRIEF_SECONDS), _greedy(prober, BRIEF_SECONDS)
    )
    return Live(read, (first, second))


async def full(
    facts: ServerFacts, api_key: str | None, http: Http, tokenizer: Tokenizer | None, sampling_params: Mapping[str, Any]
) -> Live:
    """The same with patience, then questions from end to end with `sampling_params`, where that is safe."""
    prober = Prober(facts, api_key, http)
    read = await prober.tokenized(ODD_TEXT, _READ_SECONDS)
    if waiting := await prober.waiting():
        return Live(read, skipped=_full(waiting))
    # One after the other: with others in its batch a server may round otherwise.
    first = await _greedy(prober, FIRST_SECONDS)
    if first.answer is None:
        return Live(read, (first,))
    greedy = (first, await _greedy(prober, FIRST_SECONDS))
    if read is None and not facts.skip_tokenizer_init:
        read = await prober.read(ODD_TEXT, FIRST_SECONDS)
    unasked = "the tokenizer does not load" if tokenizer is None else _unsafe(facts, read, tokenizer)
    if tokenizer is None or unasked:
        return Live(read, greedy, unasked=unasked)
    params = {**sampling_params, "max_new_tokens": _room(facts, int(sampling_params["max_new_tokens"]))}
    prompts = prompts_of(tokenizer)
    replies = await asyncio.gather(
        *(prober.answer(ids, params, tokenizer.vocab_size, ANSWER_SECONDS) for ids in prompts)
    )
    return Live(read, greedy, tuple(map(Prompted, prompts, replies)))


async def try_all(
    servers: Sequence[ServerFacts], keys: Sequence[str | None], http: Http | None, how: Any
) -> dict[str, Live]:
    """`how` of each server, all at once; by url."""
    network = http or AiohttpHttp(8 * len(servers))
    try:
        found = await asyncio.gather(*(how(server, key, network) for server, key in zip(servers, keys, strict=True)))
    finally:
        if http is None:
            await network.aclose()
    return {server.url: live for server, live in zip(servers, found, strict=True)}


def agreement(read: TextRead, tokenizer: Tokenizer) -> Agreement:
    """How a server's reading of the odd text compares with the tokenizer's.

    `cut`: into other ids, which stand for the same text: the vocabulary is one, and no id is unknown to the other side.
    """
    (ours,) = tokenizer.encode([ODD_TEXT])
    if read.ids is None:  # their number is all that there is
        return "same" if 0 <= read.count - len(ours) <= (2 if read.added else 0) else "other"
    ids = read.ids
    if read.added:
        ids = next((kept for kept in (ids, ids[1:], ids[:-1], ids[1:-1]) if kept == ours), ids)
    if ids == ours:
        return "same"
    known = all(0 <= one < tokenizer.vocab_size for one in ids)
    return "cut" if known and tokenizer.decode(ids) == tokenizer.decode(ours) else "other"


def prompts_of(tokenizer: Tokenizer) -> list[list[int]]:
    """The questions as `input_ids`."""
    try:
        return tokenizer.encode([tokenizer.render([{"role": "user", "content": one}], None) for one in QUESTIONS])
    except (BadPrompt, *TEMPLATE_ERRORS):  # it may want other conversations
        return []


def _unsafe(facts: ServerFacts, read: TextRead | None, tokenizer: Tokenizer) -> str:
    """Why the tokenizer's ids may be none of the server's; empty if they are."""
    if read is not None:
        return "its tokenizer is another one" if agreement(read, tokenizer) == "other" else ""
    largest = max((max(ids) for ids in prompts_of(tokenizer)), default=0)
    if facts.vocab_size is not None and facts.vocab_size > largest:
        return ""
    return "it neither reads text nor says how many ids it knows, and one that it does not know would kill it"


def _room(facts: ServerFacts, asked: int) -> int:
    room = [limit // 2 for limit in (facts.context_length, facts.max_total_num_tokens) if limit]
    return max(1, min([asked, ANSWER_TOKENS, *room]))


async def _greedy(prober: Prober, patience_seconds: float) -> Reply:
    params = {"max_new_tokens": GREEDY_TOKENS, "temperature": 0}
    return await prober.answer(SURE_IDS, params, ANY_VOCABULARY, patience_seconds)


def _full(waiting: int) -> str:
    return f"{waiting:,} requests wait there already"
