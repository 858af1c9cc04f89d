"""What a struck request gets in place of a good answer. The names are those of faults.OF_REQUESTS."""

import asyncio
import socket
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec
from aiohttp import web

from workers.sglang.simulator import replies
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
        case "hang":
            await asyncio.get_running_loop().create_future()  # until the caller leaves
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


def lie(name: str, draft: Draft, asked: GenerateRequest, config: SimulatorConfig) -> None:
    """Change what is said of a finished request."""
    if (change := _LIES.get(name)) is not None:
        change(draft, asked.input_ids, config)


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


def _ids(draft: Draft) -> list[int]:
    return msgspec.json.decode(draft.output_ids or b"[]", type=list[int])


def _cut_to(draft: Draft, ids: list[int]) -> None:
    draft.output_ids = msgspec.json.encode(ids)
    draft.completion_tokens = len(ids)


def _nan(draft: Draft, _: Sequence[int], config: SimulatorConfig) -> None:
    ids = _ids(draft)
    _cut_to(draft, [*ids[: len(ids) // 2], config.end_token_id])
    draft.finish_reason = {"type": "stop", "matched": "NaN happened"}


def _abort(draft: Draft, _: Sequence[int], __: SimulatorConfig) -> None:
    ids = _ids(draft)
    _cut_to(draft, ids[: len(ids) // 2])
    draft.finish_reason = replies.ABORTED


def _wrong_rid(draft: Draft, _: Sequence[int], __: SimulatorConfig) -> None:
    draft.rid = draft.rid[::-1] + "0"


def _weight_version(draft: Draft, _: Sequence[int], __: SimulatorConfig) -> None:
    draft.weight_version += "-changed"


def _no_output_ids(draft: Draft, _: Sequence[int], __: SimulatorConfig) -> None:
    draft.output_ids = None


def _prompt_leak(draft: Draft, input_ids: Sequence[int], _: SimulatorConfig) -> None:
    draft.output_ids = msgspec.json.encode([*input_ids[-LEAKED_TOKENS:], *_ids(draft)])


def _lost_id(draft: Draft, _: Sequence[int], __: SimulatorConfig) -> None:
    ids = _ids(draft)
    del ids[len(ids) // 2 : len(ids) // 2 + 1]
    draft.output_ids = msgspec.json.encode(ids)


def _bad_output_id(draft: Draft, _: Sequence[int], config: SimulatorConfig) -> None:
    ids = _ids(draft)
    ids[:1] = [config.vocab_size]
    draft.output_ids = msgspec.json.encode(ids)


_LIES: Mapping[str, Callable[[Draft, Sequence[int], SimulatorConfig], Any]] = MappingProxyType(
    {
        "nan": _nan,
        "abort": _abort,
        "wrong_rid": _wrong_rid,
        "weight_version": _weight_version,
        "no_output_ids": _no_output_ids,
        "prompt_leak": _prompt_leak,
        "lost_id": _lost_id,
        "bad_output_id": _bad_output_id,
    }
)
