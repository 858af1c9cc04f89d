"""What no simulator plays: bytes that are no HTTP, answers without end, answers that come byte by byte.

The client ends each with a reason and one printable line, the preflight with a sentence; neither hangs, and neither
takes much memory.
"""

import asyncio
import contextlib
import gzip
import re
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from common.errors import ServerRefused, ServerUnavailable
from workers.sglang.answer import MOST_DETAIL_CHARACTERS, Acceptance, Answer, BadAnswer
from workers.sglang.client import SGLangClient
from workers.sglang.http import AiohttpHttp
from workers.sglang.preflight import ANSWER_SECONDS, read_facts
from workers.sglang.servers import Pauses
from workers.sglang.watch import Patience

KEY = "sesame"
MB = 1 << 20
# What a test may take at most: the limit of an answer to 64 tokens is 1 MB.
MOST_MEMORY = 24 * MB
PAUSES = Pauses(first_seconds=0.001, longest_seconds=0.004, trial_seconds=0.02)
PATIENCE = Patience(
    least_seconds=0.05, quiet_seconds=0.03, look_seconds=0.01, alive_seconds=0.02, assumed_tokens_per_second=1e6
)
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


Handler = Callable[[Asked], Awaitable[None]]


@asynccontextmanager
async def listening(handle: Handler) -> AsyncIterator[str]:
    """The address of a server that reads a request, and leaves all that it says to `handle`; then it hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
            body = await reader.readexactly(int(length[1])) if length else b"{}"
            await handle(Asked(head.split()[1], msgspec.json.decode(body).get("rid", ""), writer))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


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
    await asked.forever(b"HTTP/1.1 100 Continue\r\n\r\n" * 16)


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

REASONS = {
    garbage: "not_an_answer",
    a_head_of_one_endless_line: "not_an_answer",
    a_head_of_endless_lines: "not_an_answer",
    a_head_that_stops: "timeout",
    nothing_at_all: "timeout",
    a_slow_body: "timeout",
    endless_chunks: "answer_too_large",
    a_last_chunk_that_never_comes: "timeout",
    a_chunk_of_no_size: "connection_lost",
    a_gzip_bomb: "not_json",
    a_page: "not_json",
    a_redirect_to_itself: "not_sglang",
    one_continue: "timeout",
    endless_continues: "timeout",
    a_body_that_is_too_short: "connection_lost",
    deep_arrays: "not_an_answer",
    deep_arrays_within_an_answer: "not_json",
    a_long_string: "answer_too_large",
    a_status_that_is_none: "server_error",
}


def client_of(*urls: str) -> SGLangClient:
    return SGLangClient(
        urls,
        acceptance=Acceptance(1024, "default"),
        sampling_params={"max_new_tokens": 64},
        api_key_of=lambda _: KEY,
        max_connections=4,
        pauses=PAUSES,
        patience=PATIENCE,
    )


async def call(*urls: str) -> tuple[Answer | BadAnswer, SGLangClient]:
    """How one sample ends on these servers."""
    client = client_of(*urls)
    try:
        async with asyncio.timeout(30):
            found, _, _ = await client.generate(b"[10,20,30]", prompt_tokens=3)
    except BadAnswer as bad:
        return bad, client
    finally:
        await client.aclose()
    return found, client


@pytest.mark.parametrize("handle", REASONS, ids=lambda handle: handle.__name__)
def test_the_client_ends_with_a_reason(handle: Handler) -> None:
    async def test() -> tuple[Answer | BadAnswer, SGLangClient]:
        async with listening(handle) as url:
            tracemalloc.start()
            try:
                return await call(url)
            finally:
                _, peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
                assert peak < MOST_MEMORY

    bad, client = asyncio.run(test())
    reason = REASONS[handle]
    assert isinstance(bad, BadAnswer)
    assert bad.reason in {reason, *(("kills_server",) if reason == "connection_lost" else ())}
    assert client.failed_attempts.keys() == {reason}
    assert bad.detail.isprintable()
    assert 10 < len(bad.detail) <= MOST_DETAIL_CHARACTERS
    assert KEY not in bad.detail


@pytest.mark.parametrize("handle", REASONS, ids=lambda handle: handle.__name__)
def test_another_server_answers_in_its_place(handle: Handler) -> None:
    async def good(asked: Asked) -> None:
        await asked.say(body(answer(asked)))

    async def test() -> tuple[Answer | BadAnswer, SGLangClient]:
        async with listening(handle) as bad, listening(good) as url:
            return await call(bad, url)

    found, client = asyncio.run(test())
    assert isinstance(found, Answer)
    assert found.output_ids == [5, 2]
    assert client.failed_attempts.keys() <= {REASONS[handle]}


def test_a_good_answer_under_a_wrong_name_is_taken() -> None:
    async def handle(asked: Asked) -> None:
        good = answer(asked)
        await asked.say(
            b"HTTP/1.1 200\r\nContent-Type: text/html; charset=latin-1\r\n\r\n" + good
        )  # ends with the line

    async def test() -> tuple[Answer | BadAnswer, SGLangClient]:
        async with listening(handle) as url:
            return await call(url)

    found, client = asyncio.run(test())
    assert isinstance(found, Answer)
    assert (found.output_ids, found.finish_reason) == ([5, 2], "stop")
    assert client.failed_attempts == {}


def test_a_server_that_hangs_up_after_each_answer_costs_no_attempt() -> None:
    """Although it does not say that it will: an idle connection that is closed is not used again."""

    async def handle(asked: Asked) -> None:
        await asked.say(body(answer(asked)))

    async def test() -> SGLangClient:
        async with listening(handle) as url:
            client = client_of(url)
            for _ in range(50):
                await client.generate(b"[10,20,30]", prompt_tokens=3)
            await client.aclose()
            return client

    assert asyncio.run(test()).failed_attempts == {}


# The preflight


def refusal_of(url: str, error: BaseException | None) -> ServerUnavailable:
    assert isinstance(error, ServerUnavailable)
    text = str(error)
    assert text.isprintable(), text
    assert url in text
    assert KEY not in text
    assert 30 < len(text) < 600
    return error


async def preflight(url: str) -> BaseException | None:
    http = AiohttpHttp(1)
    try:
        await read_facts(url, KEY, http)
    except ServerUnavailable as error:
        return error
    finally:
        await http.aclose()
    return None


SILENT = [handle for handle, reason in REASONS.items() if reason == "timeout"]
SPEAKING = [handle for handle in REASONS if handle not in SILENT]


@pytest.mark.parametrize("handle", SPEAKING, ids=lambda handle: handle.__name__)
def test_the_preflight_ends_with_a_sentence(handle: Handler) -> None:
    async def test() -> None:
        async with listening(handle) as url:
            tracemalloc.start()
            try:
                error = await preflight(url)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            refusal_of(url, error)
            assert peak < MOST_MEMORY

    asyncio.run(test())


def test_the_preflight_waits_for_nobody_longer_than_it_says() -> None:
    """All at once, as each takes the whole time."""

    async def ask(handle: Handler) -> None:
        async with listening(handle) as url:
            error = refusal_of(url, await preflight(url))
            assert not isinstance(error, ServerRefused)
            assert f"did not say within {ANSWER_SECONDS:.0f} s what it is" in str(error)

    async def test() -> None:
        await asyncio.gather(*(ask(handle) for handle in SILENT))

    begun = time.monotonic()
    asyncio.run(test())
    assert time.monotonic() - begun < 2 * ANSWER_SECONDS
