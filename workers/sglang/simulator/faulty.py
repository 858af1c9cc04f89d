"""What a struck request gets in place of a good answer. The names are those of faults.OF_REQUESTS."""

import asyncio
import functools
import socket
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
from aiohttp import web

from workers.sglang.simulator import replies
from workers.sglang.simulator.answers import Answer, Ids
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.faults import Fault
from workers.sglang.simulator.replies import Draft
from workers.sglang.simulator.requests import GenerateRequest, Refusal

LEAKED_TOKENS = 5  # INIT_INCREMENTAL_DETOKENIZATION_OFFSET
_PAGE = b"<!DOCTYPE html><html><head><title>Welcome</title></head><body><h1>It works!</h1></body></html>"
_PART = b"1," * (1 << 15)


def break_connection(request: web.BaseRequest, *, reset: bool) -> web.Response:
    """End the connection, with a TCP reset or an orderly end; what is returned goes nowhere."""
    if request.transport is not None:
        raw = request.transport.get_extra_info("socket")
        if reset and raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
    return web.Response(status=500)


async def before(name: str, fault: Fault, request: web.BaseRequest) -> web.StreamResponse | None:
    """The response to a request that is not to run; None if this fault lets it run."""
    response: web.StreamResponse | None = None
    match name:
        case "status":
            response = _status(fault.status)
        case "reset":
            response = break_connection(request, reset=True)
        case "html":
            response = web.Response(body=_PAGE, content_type="text/html")
        case "redirect":
            response = web.Response(status=302, headers={"Location": "/elsewhere"})
        case "endless":
            response = await _endless(request)
        case "gzip_bomb":
            response = await _gzip_bomb(request, fault.megabytes)
    return response


def asked_instead(name: str, asked: GenerateRequest) -> GenerateRequest:
    """The request as the server understands it."""
    if name == "clipped":
        return replace(asked, max_new_tokens=max(asked.max_new_tokens // 2, 1))
    if name == "truncated_prompt":
        return replace(asked, input_ids=asked.input_ids[: max(len(asked.input_ids) // 2, 1)])
    return asked


def answered_instead(name: str, answer: Answer, asked: GenerateRequest, config: SimulatorConfig) -> Answer:
    """The answer as the server gives it: other ids, or an earlier end."""
    tokens = answer.completion_tokens
    half = tokens // 2
    match name:
        case "nan":
            reason = {"type": "stop", "matched": "NaN happened"}
            stream = Altered(answer.stream, functools.partial(_put, half, config.end_token_id))
            return replace(answer, stream=stream, completion_tokens=half + 1, finish_reason=reason)
        case "abort":
            return replace(answer, completion_tokens=half, finish_reason=replies.ABORTED)
        case "prompt_leak":
            return leaking(answer, asked)
        case "lost_id":
            return replace(answer, stream=Altered(answer.stream, functools.partial(_lose, half)))
        case "bad_output_id":
            return replace(answer, stream=Altered(answer.stream, functools.partial(_put, 0, config.vocab_size)))
    return answer


def leaking(answer: Answer, asked: GenerateRequest) -> Answer:
    """The answer with the end of the prompt before its ids."""
    tail = asked.input_ids[-LEAKED_TOKENS:]
    return replace(answer, stream=Altered(answer.stream, lambda ids: [*tail, *ids]))


def lie(name: str, draft: Draft) -> None:
    """Change what is said beside the ids."""
    match name:
        case "wrong_rid":
            draft.rid = draft.rid[::-1] + "0"
        case "weight_version":
            draft.weight_version += "-changed"
        case "no_output_ids":
            draft.output_ids = None


async def deliver(name: str, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
    """Send a finished answer, badly if that is the fault."""
    match name:
        case "late_reset":
            return break_connection(request, reset=True)
        case "cut":
            headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
            response = web.StreamResponse(headers=headers)
            await response.prepare(request)
            await response.write(body[: len(body) // 2])
            break_connection(request, reset=False)
            return response
        case "garbled":
            return web.Response(body=body[: len(body) // 2], content_type="application/json")
        case "wrong_type":
            return web.Response(body=body, content_type="text/html")
    return web.Response(body=body, content_type="application/json")


def _status(status: int) -> web.Response:
    if status == 500:
        return web.Response(status=500, text="Internal Server Error")
    if status in {502, 504}:  # what stands in front of a server says so
        return web.Response(status=status, body=b"<html><body>Bad Gateway</body></html>", content_type="text/html")
    message = "Service Unavailable" if status == 503 else f"The simulator was told to answer {status}."
    body = msgspec.json.encode(Refusal.http(status, message).body)
    return web.Response(status=status, body=body, content_type="application/json")


async def _endless(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.enable_chunked_encoding()
    try:
        await response.prepare(request)
        await response.write(b'{"text":"","output_ids":[')
        while True:
            await response.write(_PART)
            await asyncio.sleep(0)  # a caller that reads as fast as this writes must not stop the others
    except ConnectionError:
        return response  # the caller has had enough


async def _gzip_bomb(request: web.BaseRequest, megabytes: int) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Encoding": "gzip"})
    response.enable_chunked_encoding()
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    blanks = b" " * (1 << 20)
    try:
        await response.prepare(request)
        for _ in range(megabytes):
            await response.write(packer.compress(blanks))
            await asyncio.sleep(0)
        await response.write(packer.flush())
        await response.write_eof()
    except ConnectionError:
        pass  # the caller has had enough
    return response


@dataclass(frozen=True, slots=True)
class Altered:
    """The ids of another stream, and what a fault makes of any number of them."""

    stream: Ids
    alter: Callable[[list[int]], list[int]]

    def json(self, tokens: int) -> bytes:
        return msgspec.json.encode(self.ids(tokens))

    def ids(self, tokens: int) -> list[int]:
        return self.alter(self.stream.ids(tokens))


def _put(place: int, token: int, ids: list[int]) -> list[int]:
    return [*ids[:place], token, *ids[place + 1 :]] if place < len(ids) else ids


def _lose(place: int, ids: list[int]) -> list[int]:
    return ids[:place] + ids[place + 1 :]
