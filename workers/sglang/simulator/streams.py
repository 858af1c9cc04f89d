"""Streamed answers: server-sent events, as the releases of SGLang write them.

A stream answers 200 at once, whatever becomes of it: `data: <json>` and a blank line for each event, `data: [DONE]` at
the end. It gives an event for each decode step, or for each `stream_interval` ids after the first; steps that follow
each other faster than a timer can fire, or than the caller reads, share one. `finish_reason` is null until the last
event, `completion_tokens` counts all ids so far in every one.

- The ids of an event are all so far (0.5.9 and later), or only the new ones (0.5.2; with `stream_output` all of them).
  Where ids are deltas, 0.5.2 and 0.5.9 send only the newest of several events that wait: ids are lost, and nothing but
  `completion_tokens` shows it.
- A request that cannot be served is an event `{"error": {...}}`, or a last event whose `finish_reason` is an abort with
  a `status_code`: a full queue (503) and a prompt that only the scheduler finds too long (400). What the schema of the
  body refuses is a plain 400. In 0.5.2 a full queue breaks the stream.
- An abort in the queue is an irregular last event: without ids in 0.5.2, with the last id alone in 0.5.9 to 0.5.19, and
  in 0.5.23 with all of them, or with the last one a second time where ids are deltas.
- Nothing follows the last event but [DONE]; a server that dies, or a caller that is cut off, gets neither.

All faults of requests strike streams, too. `cut` and `garbled` end one half-way, in the middle of an event or between
two of them; `late_reset` comes in place of the last event; what comes before a request runs comes in place of a stream.
"""

import contextlib
from typing import Any, Literal

import msgspec
from aiohttp import web

from workers.sglang.simulator import faulty
from workers.sglang.simulator.answers import Answer
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.profiles import PROFILES
from workers.sglang.simulator.replies import Draft, Writer
from workers.sglang.simulator.requests import GenerateRequest, Refusal

DONE = b"[DONE]"


class BrokenOffError(ConnectionError):
    """The stream was ended by a fault before its last event."""


async def begin(request: web.BaseRequest, content_type: str = "text/event-stream; charset=utf-8") -> web.StreamResponse:
    """Send the head of a stream."""
    response = web.StreamResponse(headers={"Content-Type": content_type})
    await response.prepare(request)
    return response


async def refuse(request: web.BaseRequest, refusal: Refusal, config: SimulatorConfig) -> web.StreamResponse:
    """Answer a request for a stream that is refused before it runs."""
    profile = PROFILES[config.profile]
    response = await begin(request)
    if refusal.text is not None:  # an exception that nobody catches: the stream has begun, so it breaks
        faulty.break_connection(request, reset=False)
        return response
    error: dict[str, Any] = {"message": refusal.body["error"]["message"]}
    if profile.has_error_types:
        error |= {"type": "invalid_request_error", "code": refusal.status, "retryable": False}
    with contextlib.suppress(ConnectionError):  # the caller may have left
        await _send(response, msgspec.json.encode({"error": error}))
        await _send(response, DONE)
        await response.write_eof()
    return response


class AnswerStream:
    """One answer on its way to its caller. Raises `ConnectionError` when he has left, or a fault cuts him off."""

    def __init__(
        self, request: web.BaseRequest, asked: GenerateRequest, answer: Answer, config: SimulatorConfig, writer: Writer
    ) -> None:
        self._request = request
        self._answer = answer
        self._writer = writer
        self._profile = PROFILES[config.profile]
        self._interval = max(asked.stream_interval or config.stream_interval, 1)
        always = self._profile.always_streams_deltas and not config.skip_tokenizer_init
        self._deltas = config.stream_output or always
        self._text_deltas = self._deltas and self._profile.streams_text_deltas
        self._loses = self._deltas and self._profile.loses_deltas and not config.instant
        self._fault = ""
        self._sent_tokens = 0
        self._has_begun = False
        self.response: web.StreamResponse = web.Response(status=500)

    async def begin(self, fault: str = "") -> None:
        self._fault = fault
        kind = "text/html" if fault == "wrong_type" else "text/event-stream"
        self.response = await begin(self._request, f"{kind}; charset=utf-8")

    def is_due(self, tokens: int) -> bool:
        """True if an answer that goes on and has so many tokens is worth an event."""
        return tokens > 0 and (self._sent_tokens == 0 or tokens - self._sent_tokens >= self._interval)

    async def go_on(self, draft: Draft) -> None:
        """An event of an answer that goes on."""
        await self._event(draft, self._writer.progress(self._part(draft), first=not self._has_begun, **self._text()))

    async def end(self, draft: Draft) -> web.StreamResponse:
        """The last event of an answer that has come to its end, or was aborted while it ran."""
        if self._fault == "late_reset":
            faulty.break_connection(self._request, reset=True)
            raise BrokenOffError
        return await self._last(draft, self._writer.reply(self._part(draft), **self._text()))

    async def abort_waiting(self, draft: Draft) -> web.StreamResponse:
        """The last event of an answer that was aborted in the queue, or refused there."""
        if "status_code" in draft.finish_reason and not self._profile.has_abort_events:
            faulty.break_connection(self._request, reset=False)
            raise BrokenOffError
        return await self._last(draft, self._writer.aborted_waiting(draft, deltas=self._deltas))

    async def _last(self, draft: Draft, body: bytes) -> web.StreamResponse:
        await self._event(draft, body)
        await _send(self.response, DONE)
        await self.response.write_eof()
        return self.response

    async def _event(self, draft: Draft, body: bytes) -> None:
        if self._fault in {"cut", "garbled"} and 2 * draft.completion_tokens >= self._answer.completion_tokens:
            if self._fault == "garbled":
                await self.response.write_eof()
            else:
                await self.response.write(b"data: " + body[: len(body) // 2])
                faulty.break_connection(self._request, reset=False)
            raise BrokenOffError
        self._has_begun = True
        self._sent_tokens = draft.completion_tokens
        await _send(self.response, body)

    def _part(self, draft: Draft) -> Draft:
        """A draft with the ids that this event has."""
        if not self._deltas or draft.output_ids is None:
            return draft
        tokens, start = draft.completion_tokens, self._sent_tokens
        if self._loses:
            start = max(start, tokens - self._interval)
        before = len(self._answer.stream.ids(start)) if start else 0
        draft.output_ids = msgspec.json.encode(self._answer.stream.ids(tokens)[before:])
        return draft

    def _text(self) -> dict[Literal["with_text"], bool]:
        return {"with_text": not (self._text_deltas and self._has_begun)}


async def _send(response: web.StreamResponse, data: bytes) -> None:
    await response.write(b"data: " + data + b"\n\n")
