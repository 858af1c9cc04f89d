"""Servers whose every byte is the test's own: no HTTP, answers without end, answers that come byte by byte."""

import asyncio
import contextlib
import gzip
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

MB = 1 << 20
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@dataclass
class Asked:
    """One request as it came, and where to answer."""

    path: str
    rid: str
    writer: asyncio.StreamWriter

    async def say(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def forever(self, part: bytes, seconds: float = 0.0) -> None:
        """Say it again and again, until the caller has gone."""
        while True:
            await self.say(part)
            await asyncio.sleep(seconds)


Handler = Callable[[Asked], Coroutine[Any, Any, None]]


@asynccontextmanager
async def listening(handle: Handler, *, elsewhere: Handler | None = None) -> AsyncIterator[str]:
    """The address of a server that reads a request, and leaves all that it says to `handle`; then it hangs up.

    `elsewhere` answers on the other routes than /generate.
    """

    serving: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            await answer_one(reader, writer)
        finally:
            writer.transport.abort()
            serving.remove(task)

    async def answer_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Cancelled at the end of the test: asyncio's own callback for handlers cannot bear a cancelled one.
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
            body = await reader.readexactly(int(length[1])) if length else b"{}"
            asked = Asked(head.split()[1], msgspec.json.decode(body).get("rid", ""), writer)
            await (elsewhere if elsewhere and asked.path != "/generate" else handle)(asked)
            writer.write_eof()
            await reader.read()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for task in list(serving):
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)


def body(content: bytes, headers: bytes = b"") -> bytes:
    return HEAD + headers + b"content-length: %d\r\n\r\n" % len(content) + content


def answer(asked: Asked, **changes: Any) -> bytes:
    meta = {
        "id": asked.rid,
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "weight_version": "default",
    }
    return msgspec.json.encode({"text": "", "output_ids": [5, 2], "meta_info": meta} | changes)


# What is played


async def well(asked: Asked) -> None:
    """To a probe, an abort, a look at its load."""
    await asked.say(body(b"{}"))


async def garbage(asked: Asked) -> None:
    await asked.say(b"SSH-2.0-OpenSSH_9.6\x1b[31m\x07\r\n" * 3)


async def a_head_of_one_endless_line(asked: Asked) -> None:
    await asked.say(HEAD + b"x: ")
    await asked.forever(b"y" * 65536)


async def a_head_of_endless_lines(asked: Asked) -> None:
    await asked.say(HEAD)
    await asked.forever(b"x: y\r\n" * 4096)


async def a_head_that_stops(asked: Asked) -> None:
    await asked.say(HEAD)
    await asyncio.Event().wait()


async def nothing_at_all(asked: Asked) -> None:
    await asyncio.Event().wait()


async def a_slow_body(asked: Asked) -> None:
    await asked.say(HEAD + b"content-length: 100000\r\n\r\n{")
    await asked.forever(b" ", 0.005)


async def endless_chunks(asked: Asked) -> None:
    await asked.say(HEAD + b'transfer-encoding: chunked\r\n\r\n1\r\n"\r\n')
    await asked.forever(b"10000\r\n" + b"x" * 65536 + b"\r\n")


async def a_last_chunk_that_never_comes(asked: Asked) -> None:
    good = answer(asked)
    await asked.say(HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(good), good))
    await asyncio.Event().wait()


async def a_chunk_of_no_size(asked: Asked) -> None:
    await asked.say(HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n")


async def a_gzip_bomb(asked: Asked) -> None:
    await asked.say(body(BOMB, b"content-encoding: gzip\r\n"))


async def a_page(asked: Asked) -> None:
    page = b"<!DOCTYPE html>\n<html>\x1b[2J<body>It works!</body></html>\n"
    await asked.say(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: %d\r\n\r\n" % len(page) + page)


async def a_redirect_to_itself(asked: Asked) -> None:
    await asked.say(
        b"HTTP/1.1 307 Temporary Redirect\r\nlocation: %b\r\ncontent-length: 0\r\n\r\n" % asked.path.encode()
    )


async def one_continue(asked: Asked) -> None:
    await asked.say(b"HTTP/1.1 100 Continue\r\n\r\n")
    await asyncio.Event().wait()


async def endless_continues(asked: Asked) -> None:
    await asked.forever(b"HTTP/1.1 100 Continue\r\n\r\n" * 16, 0.001)


async def a_body_that_is_too_short(asked: Asked) -> None:
    await asked.say(body(answer(asked))[:-10])


async def deep_arrays(asked: Asked) -> None:
    await asked.say(body(b"[" * 500_000))


async def deep_arrays_within_an_answer(asked: Asked) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    await asked.say(body(b'{"loads":%b,"version":%b,%b' % (deep, deep, answer(asked)[1:])))


async def a_long_string(asked: Asked) -> None:
    await asked.say(HEAD + b"content-length: %d\r\n\r\n" % (100 * MB + 13) + b'{"version": "')
    for _ in range(1600):
        await asked.say(b"x" * 65536)
    await asked.say(b'"}')


async def a_status_that_is_none(asked: Asked) -> None:
    await asked.say(b"HTTP/1.1 999 \x1b[31mBeyond\r\ncontent-length: 3\r\n\r\n\x00\x07\xff")


BOMB = gzip.compress(bytes(200 * MB))
