"""A body of POST /generate, checked as SGLang 0.5.23 checks it, with that server's own words and body shapes.

Refusals come in three shapes of body; which fault gives which was recorded from the real server:
`{"error": {"message": …}}` for a value that cannot be served, `{"error": …}` for `sampling_params` that do not fit
their schema, `{"object": "error", …}` for a body that is not what the route takes, and for a full queue.
"""

import math
import random
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from workers.sglang.simulator.config import SimulatorConfig

DEFAULT_MAX_NEW_TOKENS = 128
FORCING_BIAS = 100.0

Id = TypeVar("Id")


class Refusal(Exception):
    """A request that is answered with an error: its HTTP status and its body."""

    def __init__(self, status: int, body: dict[str, Any], *, text: str | None = None, too_long: bool = False) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body
        self.text = text  # in place of the body
        self.too_long = too_long
        self.by_scheduler = False
        self.stream = False  # was asked for

    @property
    def by_schema(self) -> bool:
        """True if the schema of sampling_params refuses."""
        return isinstance(self.body.get("error"), str)

    @property
    def in_stream(self) -> bool:
        """True if a stream that was asked for has begun when this is found, so that it has to be told inside."""
        return self.stream and (self.text is not None or isinstance(self.body.get("error"), dict))

    @classmethod
    def value(cls, message: str, *, too_long: bool = False) -> "Refusal":
        return cls(400, {"error": {"message": message}}, too_long=too_long)

    @classmethod
    def schema(cls, message: str) -> "Refusal":
        return cls(400, {"error": message})

    @classmethod
    def http(cls, status: int, message: str, kind: str | None = None) -> "Refusal":
        kind = str(status) if kind is None else kind
        return cls(status, {"object": "error", "message": message, "type": kind, "param": None, "code": status})

    @classmethod
    def plain(cls, status: int, text: str) -> "Refusal":
        return cls(status, {}, text=text)

    @classmethod
    def queue_full(cls) -> "Refusal":
        return cls.http(503, "The request queue is full.")

    @classmethod
    def body_error(cls, kind: str, where: str, message: str) -> "Refusal":
        error = f"{{'type': '{kind}', 'loc': ({where}), 'msg': '{message}'}}"
        text = f"1 validation error:\n  {error}\n\n  POST /generate [{error}]"
        return cls.http(400, text, "Bad Request")


class DeadlyRequestError(Exception):
    """A request that kills the real server: one id that the model does not have, or a batch of one empty prompt."""

    stream = False  # was asked for


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`sampling_params` with the fields of 0.5.23, in the order in which it names them. Most change nothing here."""

    max_new_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: int | float | None = None
    top_p: int | float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: int | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None
    beam_width: int | None = None
    watermark: Any = None
    choice: Any = None


class Body(msgspec.Struct, Generic[Id], frozen=True):
    """The fields of a body that the simulator reads; as on the real server, others are let through."""

    input_ids: tuple[Id, ...] | None = None
    sampling_params: SamplingParams | None = None
    rid: str | None = None
    stream: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request that can be served: `max_new_tokens` is clamped to what the context and the KV pool can hold."""

    rid: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    forced_id: int | None = None
    stream: bool = False
    stream_interval: int | None = None


class RequestReader:
    """Reads and checks bodies for a server of one vocabulary, context and KV pool."""

    def __init__(self, config: SimulatorConfig) -> None:
        self._vocab_size = config.vocab_size
        self._truncates = config.allow_auto_truncate
        self._context_length = config.context_length
        self.max_req_len = min(config.context_length, config.max_total_tokens) - 1
        self.max_req_input_len = self.max_req_len - 5
        token = Annotated[int, msgspec.Meta(ge=0, lt=config.vocab_size)]
        self._decoder = msgspec.json.Decoder(Body[token])

    def read(self, raw: bytes) -> GenerateRequest:
        """Raises `Refusal`, and `DeadlyRequestError` for an id that is not below the size of the vocabulary."""
        try:
            body = self._decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._explain(raw, error) from None
        try:
            return self._check(body)
        except Refusal as refusal:
            refusal.stream = body.stream
            raise

    def _check(self, body: Body[int]) -> GenerateRequest:
        input_ids = body.input_ids
        if input_ids is None:
            raise Refusal.value("Either text, input_ids or input_embeds should be provided.")
        if not input_ids:
            raise Refusal.value("input_ids cannot be empty.")
        if self._truncates:
            input_ids = input_ids[: self.max_req_input_len - 1]  # what the check below lets through
        params = body.sampling_params or SamplingParams()
        _check_params(params)
        return GenerateRequest(
            rid=body.rid or new_rid(),
            input_ids=input_ids,
            max_new_tokens=self._max_new_tokens(len(input_ids), params.max_new_tokens),
            ignore_eos=bool(params.ignore_eos),
            stop_token_ids=tuple(params.stop_token_ids or ()),
            forced_id=_forced_id(params.logit_bias) if params.logit_bias else None,
            stream=body.stream,
            stream_interval=params.stream_interval,
        )

    def _max_new_tokens(self, prompt_tokens: int, asked: int | msgspec.UnsetType | None) -> int:
        context = self._context_length
        if prompt_tokens >= context:
            raise Refusal.value(
                f"The input ({prompt_tokens} tokens) is longer than the model's context length ({context} tokens).",
                too_long=True,
            )
        if isinstance(asked, int) and prompt_tokens + asked > context:
            raise Refusal.value(
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested "
                f"a total of {prompt_tokens + asked} tokens: {prompt_tokens} tokens from the input messages and "
                f"{asked} tokens for the completion. Please reduce the number of tokens in the input messages or the "
                "completion to fit within the limit.",
                too_long=True,
            )
        if prompt_tokens >= self.max_req_input_len:
            refusal = Refusal.value(
                f"Input length ({prompt_tokens} tokens) exceeds the maximum allowed length ({self.max_req_input_len} "
                "tokens). Use a shorter input or enable --allow-auto-truncate.",
                too_long=True,
            )
            refusal.by_scheduler = True
            raise refusal
        room = self.max_req_len - prompt_tokens - 1
        if asked is None:  # null means as many as there is room for; left out means 128
            return room
        return min(DEFAULT_MAX_NEW_TOKENS if isinstance(asked, msgspec.UnsetType) else asked, room)

    def _explain(self, raw: bytes, error: Exception) -> Refusal | DeadlyRequestError:
        """What the real server does with a body that does not fit; the plain case does not pay for finding out."""
        try:
            body = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return Refusal.body_error("json_invalid", f"'body', {len(raw)}", "JSON decode error")
        if not isinstance(body, dict):
            message = "Input should be a dictionary or an instance of GenerateReqInput"
            return Refusal.body_error("dataclass_type", "'body',", message)
        failure = (
            _explain_stream(body.get("stream", False))
            or _explain_input_ids(body.get("input_ids") or [], self._vocab_size)
            or _explain_sampling_params(body.get("sampling_params"))
            or Refusal.body_error("value_error", "'body',", str(error).replace("'", "`"))
        )
        failure.stream = body.get("stream") is True
        return failure


def new_rid() -> str:
    """What a request that brings no rid is called."""
    return f"{random.getrandbits(128):032x}"


def _forced_id(logit_bias: dict[str, float]) -> int | None:
    """The id with a bias that no logit of a model outweighs."""
    token, bias = max(logit_bias.items(), key=lambda one: one[1])
    return int(token) if bias >= FORCING_BIAS else None


def _check_params(params: SamplingParams) -> None:
    asked = params.max_new_tokens
    if isinstance(asked, int) and asked < 0:
        raise Refusal.value(f"max_new_tokens must be at least 0, got {asked}.")
    if params.temperature is not None and not (params.temperature >= 0 and math.isfinite(params.temperature)):
        raise Refusal.value(f"temperature must be a non-negative finite number, got {params.temperature}.")
    if params.top_p is not None and not 0 < params.top_p <= 1:
        raise Refusal.value(f"top_p must be in (0, 1], got {params.top_p}.")
    if params.n is not None and params.n != 1:
        raise Refusal.value("The simulator gives one answer a call: leave out n, or set it to 1.")


def _explain_stream(stream: Any) -> Refusal | None:
    if isinstance(stream, bool):
        return None
    if stream is None:
        return Refusal.body_error("bool_type", "'body', 'stream'", "Input should be a valid boolean")
    found = f'string "{stream}"' if isinstance(stream, str) else f"{type(stream).__name__} `{stream}`"
    return Refusal.schema(f"invalid type: {found}, expected a boolean")


def _explain_input_ids(ids: Any, vocab_size: int) -> Refusal | DeadlyRequestError | None:
    where = "'body', 'input_ids'"
    if not isinstance(ids, list):
        return Refusal.body_error("value_error", where, f"Value error, must be list or null; got {_kind(ids)}")
    for token in [token for token in ids if _kind(token) != "int"][:1]:
        if isinstance(token, bool):
            return Refusal.schema(f"invalid type: boolean `{str(token).lower()}`, expected a sequence")
        if ids == [[]]:
            return DeadlyRequestError()
        if isinstance(token, list):
            return Refusal.value("The simulator takes one prompt a call: send input_ids as one list of ids.")
        message = f"Value error, elements must be int or list; got {_kind(token)}"
        return Refusal.body_error("value_error", where, message)
    return None if all(0 <= token < vocab_size for token in ids) else DeadlyRequestError()


def _explain_sampling_params(params: Any) -> Refusal | None:
    if params is None:
        return None
    if isinstance(params, list):
        return Refusal.value("The simulator takes one prompt a call: send sampling_params as one object.")
    fields = [field.name for field in msgspec.structs.fields(SamplingParams)]
    if isinstance(params, dict):
        for name in params:
            if name not in fields:
                expected = ", ".join(f"`{field}`" for field in fields)
                return Refusal.schema(f"unknown field `{name}`, expected one of {expected}")
    try:
        msgspec.convert(params, SamplingParams)
    except msgspec.ValidationError as error:
        return Refusal.schema(f"invalid type: {error}")
    return None


def _kind(value: Any) -> str:
    if isinstance(value, int) and not -(1 << 63) <= value < (1 << 64):
        return "float"  # so the real server's JSON parser reads an integer of more than 64 bits
    return type(value).__name__
