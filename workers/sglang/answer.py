"""Whether what came back from /generate is an answer, and if not, what follows. No input or output here.

A server may answer 200 and still have given nothing that may be trained on: the partial ids of an aborted request, ids
with the tail of the prompt before them (SGLang 0.5.1 to 0.5.4), a truncated prompt, a stop that stands for NaN logits.
"""

import enum
import re
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

# matched of a request whose logits were NaN: the server puts a stop token in the place of the id it could not sample.
NAN_MATCHED = "NaN happened"
# A detail goes into logs and rejects.jsonl; the server's own messages can repeat the whole prompt.
MOST_DETAIL_CHARACTERS = 300

# What the 400s of an over-long prompt have in common, from 0.5.23 (recorded) and its source.
_OVER_CONTEXT = re.compile(
    r"longer than the model's context length|exceeds the model's (maximum )?context length"
    r"|exceeds the maximum allowed length|exceeds the KV memory budget|longer than the KV cache pool",
    re.IGNORECASE,
)


class Outcome(enum.Enum):
    """What follows from a bad answer for its sample, and for the others."""

    RETRY = "retry"  # another attempt may succeed
    REJECT = "reject"  # final for this sample
    HALT_DATASET = "halt the dataset"  # the same for every sample of the dataset
    HALT_RUN = "halt the run"  # the same for every sample, unless another server does better


class Says(enum.Enum):
    """What a bad answer says of the server that gave it."""

    NOTHING = "nothing"
    BUSY = "busy"  # it has no room: others are taken first for a while
    FAILED = "failed"  # its fault or the sample's; several in a row are its fault, and open its breaker
    GONE = "gone"  # nobody is there: its breaker opens at once
    UNFIT = "unfit"  # it cannot be used for this run: it is left out until it is another one


class Reason(msgspec.Struct, frozen=True):
    """One line of the table.

    `tried` is False where the sample was not tried at all, so that it costs it nothing. `may_still_run` is True where
    the server may be at it still, and would go on to max_new_tokens for nobody. `may_have_died` is True where the
    server may have died, of this request or of another.
    """

    outcome: Outcome
    says: Says = Says.NOTHING
    tried: bool = True
    may_still_run: bool = False
    may_have_died: bool = False


# Every reason there is, and what follows from it.
REASONS = MappingProxyType(
    {
        # A body that came with 200.
        "not_json": Reason(Outcome.RETRY, Says.FAILED),
        "not_an_answer": Reason(Outcome.RETRY, Says.FAILED),
        "answer_too_large": Reason(Outcome.RETRY, Says.FAILED, may_still_run=True),
        "wrong_rid": Reason(Outcome.RETRY, Says.FAILED),
        "aborted": Reason(Outcome.RETRY, Says.BUSY),  # by somebody else, who may be at it for a while
        "unfinished": Reason(Outcome.RETRY, Says.FAILED),
        "nan": Reason(Outcome.RETRY, Says.FAILED),
        "length_mismatch": Reason(Outcome.RETRY, Says.FAILED),
        "longer_than_asked": Reason(Outcome.RETRY, Says.FAILED),
        "token_out_of_range": Reason(Outcome.RETRY, Says.FAILED),
        "stop_mismatch": Reason(Outcome.RETRY, Says.FAILED),
        "prompt_mismatch": Reason(Outcome.REJECT),
        "empty_answer": Reason(Outcome.REJECT),
        "no_output_ids": Reason(Outcome.HALT_RUN, Says.UNFIT),
        "weight_version_changed": Reason(Outcome.HALT_RUN, Says.UNFIT),
        # A refusal. None of the 4xx speaks against the server: a router that counted them took out all of its workers.
        "over_context": Reason(Outcome.REJECT),
        "bad_request": Reason(Outcome.REJECT),
        "bad_parameters": Reason(Outcome.HALT_DATASET),  # the schema gate names a field, which all its samples share
        "duplicate_rid": Reason(Outcome.RETRY),
        "disconnected": Reason(Outcome.RETRY),
        "unauthorized": Reason(Outcome.HALT_RUN, Says.UNFIT),
        "not_sglang": Reason(Outcome.HALT_RUN, Says.UNFIT),
        "request_timeout": Reason(Outcome.RETRY, Says.BUSY, may_still_run=True),
        "rate_limited": Reason(Outcome.RETRY, Says.BUSY, tried=False),
        "queue_full": Reason(Outcome.RETRY, Says.BUSY, tried=False),
        "server_away": Reason(Outcome.RETRY, Says.GONE, tried=False),
        "bad_gateway": Reason(Outcome.RETRY, Says.GONE, may_still_run=True, may_have_died=True),
        # A proxy that waits for less time than an answer takes: the server is well, and the longest answers never come.
        "gateway_timeout": Reason(Outcome.RETRY, Says.FAILED, may_still_run=True),
        "server_error": Reason(Outcome.RETRY, Says.FAILED, may_still_run=True),
        # No whole response.
        "unreachable": Reason(Outcome.RETRY, Says.GONE, tried=False),
        "connection_lost": Reason(Outcome.RETRY, Says.FAILED, may_still_run=True, may_have_died=True),
        "stalled": Reason(Outcome.RETRY, Says.GONE, may_still_run=True, may_have_died=True),
        "timeout": Reason(Outcome.RETRY, Says.FAILED, may_still_run=True),
        "kills_server": Reason(Outcome.REJECT),  # servers died of it, the last of it alone
        "no_fit_server": Reason(Outcome.HALT_RUN, tried=False),  # each was looked at, and none can be used for this run
        "draining": Reason(Outcome.RETRY, tried=False),  # this worker is stopping; nothing is wrong with the sample
    }
)


class BadAnswer(Exception):
    """No answer that can be used; `reason` is a key of REASONS, `detail` one printable line for a person."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = _one_line(detail)
        super().__init__(f"{reason}: {self.detail}")
        self.rule = REASONS[reason]
        self.outcome = self.rule.outcome


class Answer(msgspec.Struct, frozen=True, gc=False):
    """An accepted answer; `output_ids` ends with the stop token where there was one."""

    output_ids: list[int]
    finish_reason: str  # "stop" or "length"
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str | None
    num_retractions: int
    flags: tuple[str, ...] = ()  # "truncated": ended by length; "clipped": by a smaller length than was asked for


class _FinishReason(msgspec.Struct, gc=False):
    type: str
    matched: Any = None
    length: int | None = None
    message: str | None = None


class _MetaInfo(msgspec.Struct, gc=False):
    id: str
    finish_reason: _FinishReason | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    weight_version: str | None = None
    num_retractions: int | None = None
    total_retractions: int | None = None  # what 0.5.8 to 0.5.11 call num_retractions


class _Body(msgspec.Struct, gc=False):
    meta_info: _MetaInfo
    output_ids: list[int] | None = None


_ANY_IDS = msgspec.json.Decoder(_Body)


class Acceptance:
    """The conditions of a good answer; one object serves a whole run."""

    def __init__(self, vocab_size: int, weight_version: str | None) -> None:
        """`vocab_size`: ids the model knows, 0 to vocab_size - 1; `weight_version` as the run began (None: unchecked).

        The range is part of the decoder's type, where it costs nothing; over a list of 256 ids it takes 13 us.
        """
        self.vocab_size = vocab_size
        self.weight_version = weight_version
        known_id = Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]
        body = msgspec.defstruct(
            "_KnownIdsBody",
            [("meta_info", _MetaInfo), ("output_ids", list[known_id])],
            gc=False,
        )
        self._known_ids: msgspec.json.Decoder[Any] = msgspec.json.Decoder(body)

    def check(self, body: bytes, *, rid: str, prompt_tokens: int, max_new_tokens: int) -> Answer:
        """The answer in the body of a 200; raises BadAnswer if any condition fails (DESIGN section 6)."""
        parsed, ids_known = self._parse(body)
        meta = parsed.meta_info
        if meta.id != rid:
            raise BadAnswer("wrong_rid", f"the answer to request {rid} carries the id {meta.id}")
        finish = _finished(meta)
        if self.weight_version is not None and meta.weight_version != self.weight_version:
            raise BadAnswer(
                "weight_version_changed",
                f"the run began with weight version {self.weight_version!r} and the server now has "
                f"{meta.weight_version!r}; start a new run for the new weights",
            )
        if meta.prompt_tokens != prompt_tokens:
            raise BadAnswer(
                "prompt_mismatch", f"{prompt_tokens} prompt tokens were sent and the server read {meta.prompt_tokens}"
            )
        output_ids = self._output_ids(parsed, finish, max_new_tokens)
        if not ids_known:
            raise BadAnswer("token_out_of_range", f"an output id is not in the vocabulary of {self.vocab_size}")
        flags: tuple[str, ...] = ()
        if finish.type == "length":
            asked = finish.length == max_new_tokens and len(output_ids) == max_new_tokens
            flags = ("truncated",) if asked else ("truncated", "clipped")
        return Answer(
            output_ids=output_ids,
            finish_reason=finish.type,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(output_ids),
            cached_tokens=meta.cached_tokens or 0,
            weight_version=meta.weight_version,
            num_retractions=meta.num_retractions or meta.total_retractions or 0,
            flags=flags,
        )

    def _parse(self, body: bytes) -> tuple[_Body, bool]:
        """The body, and whether all its ids are in the vocabulary."""
        try:
            try:
                return self._known_ids.decode(body), True
            except msgspec.ValidationError:  # some field is not what it must be; if it was an id, this succeeds
                return _ANY_IDS.decode(body), False
        except msgspec.ValidationError as error:
            raise BadAnswer("not_an_answer", f"the body of a 200 has another shape: {error}") from None
        except (msgspec.DecodeError, RecursionError):
            raise BadAnswer("not_json", f"the body of a 200 is not JSON: {_text(body)}") from None

    @staticmethod
    def _output_ids(parsed: _Body, finish: _FinishReason, max_new_tokens: int) -> list[int]:
        ids, completion_tokens = parsed.output_ids, parsed.meta_info.completion_tokens
        if ids is None:
            raise BadAnswer(
                "no_output_ids",
                "the server returns text without output_ids; use SGLang 0.5.5 or later, or --skip-tokenizer-init",
            )
        if len(ids) != completion_tokens:
            raise BadAnswer("length_mismatch", f"{len(ids)} output ids came with completion_tokens {completion_tokens}")
        if len(ids) > max_new_tokens:
            raise BadAnswer("longer_than_asked", f"{len(ids)} output ids came where {max_new_tokens} were asked for")
        if not ids:
            raise BadAnswer("empty_answer", "the server finished the request without a single id")
        if isinstance(finish.matched, int) and finish.matched != ids[-1]:
            raise BadAnswer("stop_mismatch", f"the last id is {ids[-1]} and the matched stop token {finish.matched}")
        return ids


def _finished(meta: _MetaInfo) -> _FinishReason:
    """The finish reason of a request that came to its own end."""
    finish = meta.finish_reason
    if finish is None:
        raise BadAnswer("unfinished", "the answer has no finish_reason")
    if finish.type == "abort":
        raise BadAnswer("aborted", f"the server aborted the request: {finish.message or 'no message'}")
    if finish.type not in {"stop", "length"}:
        raise BadAnswer("unfinished", f"the finish_reason is {finish.type}, not stop or length")
    if finish.matched == NAN_MATCHED:
        raise BadAnswer("nan", "the model's logits were NaN, and the server put a stop token in the place of an id")
    return finish


def refusal(status: int, body: bytes) -> BadAnswer:
    """What a response other than 200 means.

    SGLang's errors have three shapes: {"error": {"message": …}}, {"error": "…"} from the schema gate and the key check,
    and {"object": "error", "message": …}. What stands in front of a server answers in plain text or HTML.
    """
    decoded, text = _message(body)
    return BadAnswer(_reason(status, decoded, text), f"the server answered {status}: {text or 'no text'}")


def _reason(status: int, decoded: object, text: str) -> str:
    if status in _REASON_OF_STATUS:
        return _REASON_OF_STATUS[status]
    if status == 503:
        if "queue is full" in text:
            return "queue_full"
        # A proxy without a server behind it, or SGLang's router without workers.
        return "server_away" if decoded is None or "available workers" in text.lower() else "server_error"
    if status >= 500:
        return "server_error"
    if status < 400:  # a redirect, or a 2xx without an answer; /generate gives neither
        return "not_sglang"
    return _reason_of_400(decoded, text)


_REASON_OF_STATUS = MappingProxyType(
    {
        401: "unauthorized",
        403: "unauthorized",
        404: "not_sglang",
        405: "not_sglang",
        407: "unauthorized",
        408: "request_timeout",
        429: "rate_limited",
        501: "not_sglang",
        502: "bad_gateway",
        504: "gateway_timeout",
    }
)


def _reason_of_400(decoded: object, text: str) -> str:
    if _OVER_CONTEXT.search(text):
        return "over_context"
    if "duplicate request id" in text.lower():
        return "duplicate_rid"
    if "disconnected" in text.lower():
        return "disconnected"
    return "bad_parameters" if isinstance(decoded, dict) and isinstance(decoded.get("error"), str) else "bad_request"


def _message(body: bytes) -> tuple[object, str]:
    """The decoded body (None if it is not JSON), and its message in whichever of the shapes it stands."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None, _text(body)
    if isinstance(decoded, dict):
        for found in (decoded.get("error"), decoded.get("message"), decoded.get("detail")):
            if isinstance(found, dict) and "message" in found:
                return decoded, str(found["message"])
            if isinstance(found, str):
                return decoded, found
    return decoded, _text(body)


def _text(body: bytes) -> str:
    return body[:4096].decode("utf-8", errors="replace")


def _one_line(text: str) -> str:
    line = "".join(character if character.isprintable() else " " for character in " ".join(text.split()))
    return line if len(line) <= MOST_DETAIL_CHARACTERS else line[: MOST_DETAIL_CHARACTERS - 1] + "…"
