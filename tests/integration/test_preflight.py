"""The preflight on real sockets: what answers in a server's place costs one sentence and little memory."""

import asyncio
import contextlib
import gzip
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from common.errors import ServerRefused, ServerUnavailable
from workers.sglang.http import AiohttpHttp
from workers.sglang.inquiry import MOST_BYTES
from workers.sglang.preflight import ServerFacts, ask_all, read_facts, refuse, warnings_of
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.profiles import PROFILES
from workers.sglang.simulator.server import Simulator

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(handle: Handler) -> AsyncIterator[str]:
    """The address of a server that reads a request's head and leaves the rest to `handle`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            await handle(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def ask(url: str, key: str | None = None) -> ServerFacts:
    http = AiohttpHttp(1)
    try:
        return await read_facts(url, key, http)
    finally:
        await http.aclose()


def said_of(handle: Handler, key: str | None = None) -> ServerUnavailable:
    """Why the server that `handle` plays cannot be used."""

    async def test() -> ServerUnavailable:
        async with listening(handle) as url:
            with pytest.raises(ServerUnavailable) as caught:
                await ask(url, key)
            assert url in str(caught.value)
            return caught.value

    error = asyncio.run(test())
    assert "\n" not in str(error)
    return error


def sending(*parts: bytes) -> Handler:
    async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return handle


def page(body: bytes, headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (headers, len(body), body)


def test_a_body_without_an_end_is_left_and_its_connection_closed() -> None:
    sent = 0

    async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"version": "')
        while True:  # until the connection is gone
            writer.write(b"0" * 65536)
            await writer.drain()
            sent += 65536

    error = said_of(handle)

    assert isinstance(error, ServerRefused)
    assert "/server_info does not end within 4 MiB" in str(error)
    # What the client reads, and what fits into the buffers of both sockets.
    assert MOST_BYTES <= sent < MOST_BYTES + (32 << 20)


def test_a_gzip_bomb_is_not_unpacked() -> None:
    bomb = gzip.compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        error = said_of(sending(page(bomb, b"content-encoding: gzip\r\ncontent-type: application/json\r\n")))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert isinstance(error, ServerRefused)
    assert "/server_info is compressed (gzip), although that was not asked for" in str(error)
    assert peak < 16 << 20


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], "does not answer in HTTP ("),
        ([b"HTTP/1.1 200 OK\r\n", *[b"x: %b\r\n" % (b"y" * 65536)] * 64], "does not answer in HTTP ("),
        ([page(b"<html></html>", b"content-type: text/html\r\n")], "(/server_info is a page of HTML)"),
        ([page(b"\x7fELF", b"content-type: application/json\r\n")], "(/server_info is no JSON object)"),
    ],
)
def test_what_is_no_sglang_is_refused(parts: list[bytes], words: str) -> None:
    error = said_of(sending(*parts), "sesame")

    assert isinstance(error, ServerRefused)
    assert words in str(error)
    assert "sesame" not in str(error)


@pytest.mark.parametrize(
    ("part", "words"), [(b"", "Server disconnected"), (page(b"{}")[:-1], "Response payload is not completed")]
)
def test_a_connection_that_breaks_may_be_tried_again(part: bytes, words: str) -> None:
    error = said_of(sending(part))

    assert type(error) is ServerUnavailable
    assert f"cannot be reached ({words}" in str(error)


def test_a_redirect_is_not_followed_with_the_key() -> None:
    followed: list[str] = []

    async def elsewhere(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        followed.append("here")
        writer.write(page(b"{}"))

    async def test() -> str:
        async with listening(elsewhere) as other:
            head = f"HTTP/1.1 307 Temporary Redirect\r\nlocation: {other}/server_info\r\ncontent-length: 0\r\n\r\n"
            async with listening(sending(head.encode())) as url:
                with pytest.raises(ServerRefused) as caught:
                    await ask(url, "sesame")
                return str(caught.value)

    assert "/server_info is a redirect, 307, to another address" in asyncio.run(test())
    assert followed == []


def test_nobody_there_is_told_in_the_words_of_the_system() -> None:
    async def test() -> str:
        async with listening(sending()) as url:
            pass
        with pytest.raises(ServerUnavailable) as caught:
            await ask(url)
        assert type(caught.value) is ServerUnavailable
        return str(caught.value)

    assert "cannot be reached (Connection refused); start the server there" in asyncio.run(test())


@pytest.mark.parametrize("profile", PROFILES)
def test_the_facts_of_a_simulated_server_of_each_release(profile: str) -> None:
    async def test() -> tuple[list[ServerFacts], list[ServerUnavailable]]:
        config = SimulatorConfig(
            profile=profile, api_key="sesame", context_length=5000, max_total_tokens=3000, max_running_requests=7
        )
        async with Simulator(config) as server:
            return await ask_all([server.url], lambda _: "sesame")

    (facts,), failures = asyncio.run(test())

    assert failures == []
    assert (facts.version, facts.model_path, facts.weight_version) == (profile, "simulated", "default")
    assert (facts.context_length, facts.max_total_num_tokens, facts.max_running_requests) == (5000, 3000, 7)
    assert (facts.vocab_size, facts.router, facts.takes_aborts) == (None, False, True)
    assert facts.stream_mode == ("delta" if profile == "0.5.2" else "cumulative")
    if profile == "0.5.2":
        with pytest.raises(ServerRefused):
            refuse(facts)
    else:
        refuse(facts)
    faults = {"0.5.2": 2, "0.5.9": 2, "0.5.13": 1, "0.5.19": 1}
    assert len(warnings_of(facts)) == faults.get(profile, 0)


def test_a_simulated_router_is_known_for_one() -> None:
    async def test() -> ServerFacts:
        async with Simulator(SimulatorConfig(router=True)) as server:
            return await ask(server.url)

    facts = asyncio.run(test())

    assert (facts.version, facts.router, facts.takes_aborts) == ("0.5.23", True, False)
    refuse(facts)
    (sentence,) = warnings_of(facts)
    assert "this is a router: it cannot abort" in sentence
