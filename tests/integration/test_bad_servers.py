"""What no simulator plays: bytes that are no HTTP, answers without end, answers that come byte by byte.

The client ends each with a reason and one printable line, the preflight with a sentence; neither hangs, and neither
takes much memory.
"""

import asyncio
import re
import tracemalloc

import pytest
from msgspec import structs

from common.errors import ServerRefused, ServerUnavailable
from tests.conftest import PATIENCE_SECONDS
from tests.integration import raw_servers as raw
from tests.integration.raw_servers import MB, Asked, Handler, answer, body, listening, well
from tests.integration.worker_steps import until
from workers.sglang.answer import MOST_DETAIL_CHARACTERS, Acceptance, Answer, BadAnswer
from workers.sglang.client import SGLangClient
from workers.sglang.http import AiohttpHttp
from workers.sglang.preflight import ANSWER_SECONDS, read_facts
from workers.sglang.server import Pauses
from workers.sglang.watch import Patience

KEY = "sesame"
# What a test may take at most: the limit of an answer to 64 tokens is 1 MB.
MOST_MEMORY = 24 * MB
PAUSES = Pauses(first_seconds=0.001, longest_seconds=0.004, trial_seconds=0.02)
# For those that say nothing, whether their state is asked for or not; whoever speaks is waited for as in life.
IMPATIENCE = Patience(
    least_seconds=0.05, quiet_seconds=1000.0, look_seconds=0.01, alive_seconds=0.02, assumed_tokens_per_second=1e6
)
IMPATIENCE_WITH_SILENCE = structs.replace(IMPATIENCE, quiet_seconds=0.03)
REASONS: dict[Handler, str] = {
    raw.garbage: "not_an_answer",
    raw.a_head_of_one_endless_line: "not_an_answer",
    raw.a_head_of_endless_lines: "not_an_answer",
    raw.a_head_that_stops: "timeout",
    raw.nothing_at_all: "timeout",
    raw.a_slow_body: "timeout",
    raw.endless_chunks: "answer_too_large",
    raw.a_last_chunk_that_never_comes: "timeout",
    raw.a_chunk_of_no_size: "not_an_answer",
    raw.a_gzip_bomb: "not_json",
    raw.a_page: "not_json",
    raw.a_redirect_to_itself: "not_sglang",
    raw.one_continue: "timeout",
    raw.endless_continues: "timeout",
    raw.a_body_that_is_too_short: "connection_lost",
    raw.deep_arrays: "not_an_answer",
    raw.deep_arrays_within_an_answer: "not_json",
    raw.a_long_string: "answer_too_large",
    raw.a_status_that_is_none: "server_error",
}

SILENT = [handle for handle, reason in REASONS.items() if reason == "timeout"]
SPEAKING = [handle for handle in REASONS if handle not in SILENT]


def client_of(*urls: str, patience: Patience) -> SGLangClient:
    return SGLangClient(
        urls,
        acceptance=Acceptance(1024, "default"),
        sampling_params={"max_new_tokens": 64},
        api_key_of=lambda _: KEY,
        max_connections=4,
        pauses=PAUSES,
        patience=patience,
    )


async def call(handle: Handler | None, *urls: str) -> tuple[Answer | BadAnswer, SGLangClient]:
    """How one sample ends on these servers, of which one does as `handle`."""
    client = client_of(*urls, patience=IMPATIENCE if handle in SILENT else Patience())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            found, _, _ = await client.generate(b"[10,20,30]", prompt_tokens=3)
    except BadAnswer as bad:
        return bad, client
    finally:
        await client.aclose()
    return found, client


@pytest.mark.parametrize("handle", REASONS, ids=lambda handle: handle.__name__)
def test_the_client_ends_with_a_reason(handle: Handler) -> None:
    async def test() -> tuple[Answer | BadAnswer, SGLangClient]:
        async with listening(handle, elsewhere=well) as url:
            tracemalloc.start()
            try:
                return await call(handle, url)
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
        async with listening(handle, elsewhere=well) as bad, listening(good) as url:
            return await call(handle, bad, url)

    found, client = asyncio.run(test())
    assert isinstance(found, Answer)
    assert found.output_ids == [5, 2]
    assert client.failed_attempts.keys() <= {REASONS[handle]}


@pytest.mark.parametrize("elsewhere", SPEAKING, ids=lambda handle: handle.__name__)
def test_calls_are_looked_after_whatever_else_the_server_says(elsewhere: Handler) -> None:
    """Asked for its load, its state and its health, in the middle of a call that it does not answer."""

    async def test() -> SGLangClient:
        async with listening(raw.nothing_at_all, elsewhere=elsewhere) as url:
            client = client_of(url, patience=IMPATIENCE_WITH_SILENCE)
            call = asyncio.create_task(client.generate(b"[10,20,30]", prompt_tokens=3))
            try:
                await until("it is given up", lambda: client.failed_attempts.total() > 0)
                await client.abort_all()
                with pytest.raises(BadAnswer):
                    await call
            finally:
                await client.aclose()
            return client

    assert asyncio.run(test()).failed_attempts.keys() <= {"timeout", "stalled"}


def test_a_server_that_is_silent_on_all_its_routes_is_waited_for() -> None:
    """Its samples lose no more tries once it is down; all servers at once, as an abort takes up to 5 s."""

    async def ask(handle: Handler) -> None:
        async with listening(handle) as url:
            client = client_of(url, patience=IMPATIENCE_WITH_SILENCE)
            call = asyncio.create_task(client.generate(b"[10,20,30]", prompt_tokens=3))
            await until("it is down", lambda: client.servers()[0].state == "down")
            assert not call.done()
            [state] = client.servers()
            assert state.reason is not None
            assert re.fullmatch(rf"{url} (gave no answer within|has answered nothing for) .*", state.reason)
            assert sum(client.failed_attempts.values()) <= 3
            await client.abort_all()
            with pytest.raises(BadAnswer, match="draining"):
                await call
            await client.aclose()

    async def test() -> None:
        await asyncio.wait_for(asyncio.gather(*(ask(handle) for handle in SILENT)), PATIENCE_SECONDS)

    asyncio.run(test())


def test_a_good_answer_under_a_wrong_name_is_taken() -> None:
    async def handle(asked: Asked) -> None:
        good = answer(asked)
        await asked.say(
            b"HTTP/1.1 200\r\nContent-Type: text/html; charset=latin-1\r\n\r\n" + good
        )  # ends with the line

    async def test() -> tuple[Answer | BadAnswer, SGLangClient]:
        async with listening(handle) as url:
            return await call(None, url)

    found, client = asyncio.run(test())
    assert isinstance(found, Answer)
    assert (found.output_ids, found.finish_reason) == ([5, 2], "stop")
    assert client.failed_attempts == {}


def test_a_server_that_hangs_up_after_each_answer_costs_no_sample() -> None:
    """It does not say that it will, so that the next call may be on its way when it does."""

    async def handle(asked: Asked) -> None:
        await asked.say(body(answer(asked)))

    async def test() -> SGLangClient:
        async with listening(handle, elsewhere=well) as url:
            client = client_of(url, patience=Patience())

            async def calls() -> None:
                for _ in range(50):
                    await client.generate(b"[10,20,30]", prompt_tokens=3)

            await asyncio.gather(*(calls() for _ in range(4)))
            await client.aclose()
            return client

    assert asyncio.run(test()).failed_attempts.keys() <= {"connection_lost"}


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
        # Twice as long, and what a busy machine adds to that.
        async with asyncio.timeout(2 * ANSWER_SECONDS + PATIENCE_SECONDS):
            await asyncio.gather(*(ask(handle) for handle in SILENT))

    asyncio.run(test())
