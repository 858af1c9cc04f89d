"""The client against a server: what the rest of the tests take for granted of both."""

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx
import pytest

from tests.contract.wire import KEY, PATIENCE_SECONDS
from workers.sglang.answer import Acceptance, Answer, BadAnswer, Outcome
from workers.sglang.client import Sampling, SGLangClient
from workers.sglang.preflight import ServerFacts

IDS = [10, 20, 30, 40, 50]
GREEDY = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
Result = TypeVar("Result")


def run(work: Callable[[SGLangClient], Coroutine[Any, Any, Result]], facts: ServerFacts, *urls: str) -> Result:
    async def whole() -> Result:
        client = SGLangClient(
            urls or (facts.url,),
            acceptance=Acceptance(2**31, facts.weight_version),
            sampling_params=GREEDY,
            api_key_of=lambda _url: KEY,
            max_connections=16,
        )
        try:
            return await work(client)
        finally:
            await client.aclose()

    return asyncio.run(whole())


async def ask(client: SGLangClient, ids: list[int] = IDS, **params: Any) -> Answer:
    sampling = Sampling.of(GREEDY | params)
    answer, url, seconds = await client.generate(json.dumps(ids).encode(), prompt_tokens=len(ids), sampling=sampling)
    assert url in {server.url for server in client.servers()}
    assert seconds > 0
    return answer


def test_the_facts_that_a_run_needs_are_there(facts: ServerFacts) -> None:
    assert facts.version
    assert facts.model_path
    assert facts.weight_version
    assert facts.context_length
    assert facts.max_total_num_tokens
    assert facts.max_running_requests
    assert not facts.allow_auto_truncate


def test_a_greedy_answer_is_accepted_and_the_same_twice(facts: ServerFacts) -> None:
    first, second = run(_twice, facts)
    assert first.output_ids == second.output_ids
    assert (first.finish_reason, first.completion_tokens, first.prompt_tokens) == ("length", 8, 5)
    assert first.flags == ("truncated",)
    assert first.weight_version == facts.weight_version


async def _twice(client: SGLangClient) -> tuple[Answer, Answer]:
    return await ask(client), await ask(client)


def test_the_stop_token_is_the_last_id(facts: ServerFacts) -> None:
    forced: dict[str, Any] = {"ignore_eos": False, "stop_token_ids": [2], "logit_bias": {"2": 100.0}}
    answer = run(lambda client: ask(client, **forced), facts)
    assert (answer.output_ids, answer.finish_reason, answer.flags) == ([2], "stop", ())


def test_many_calls_at_once_come_back_to_their_own_prompts(facts: ServerFacts) -> None:
    async def many(client: SGLangClient) -> list[Answer]:
        return await asyncio.gather(*(ask(client, IDS + [60] * n) for n in range(16)))

    assert [answer.prompt_tokens for answer in run(many, facts)] == [5 + n for n in range(16)]


def test_a_prompt_over_the_context_is_rejected(facts: ServerFacts) -> None:
    assert facts.context_length
    too_long = [5] * (facts.context_length + 10)
    with pytest.raises(BadAnswer) as caught:
        run(lambda client: ask(client, too_long), facts)
    assert (caught.value.reason, caught.value.outcome) == ("over_context", Outcome.REJECT)


def test_a_parameter_that_the_server_does_not_know_halts(facts: ServerFacts) -> None:
    with pytest.raises(BadAnswer) as caught:
        run(lambda client: ask(client, no_such_parameter=1), facts)
    assert (caught.value.reason, caught.value.outcome) == ("bad_parameters", Outcome.HALT_DATASET)


def test_a_changed_weight_version_halts(facts: ServerFacts) -> None:
    async def with_another(client: SGLangClient) -> Answer:
        client._acceptance = Acceptance(2**31, "no such version")
        return await ask(client)

    with pytest.raises(BadAnswer) as caught:
        run(with_another, facts)
    assert (caught.value.reason, caught.value.outcome) == ("weight_version_changed", Outcome.HALT_RUN)


def test_a_dead_server_beside_it_costs_nothing(facts: ServerFacts) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{free.getsockname()[1]}"

    async def both(client: SGLangClient) -> list[str]:
        answers = [await ask(client) for _ in range(4)]
        assert len({tuple(answer.output_ids) for answer in answers}) == 1
        return [server.state for server in client.servers()]

    assert run(both, facts, dead, facts.url) == ["down", "up"]


def test_a_drain_stops_the_server_too(facts: ServerFacts) -> None:
    async def running(other: httpx.AsyncClient, count: int) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            found = None
            while found != count:
                loads = (await other.get(f"{facts.url}/v1/loads")).json()["loads"]
                found = sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    async def drain(client: SGLangClient) -> None:
        calls = [asyncio.create_task(ask(client, [10, 20, n], max_new_tokens=1000)) for n in range(4)]
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as other:
            await running(other, 4)
            await client.abort_all()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert [getattr(outcome, "reason", outcome) for outcome in outcomes] == ["draining"] * 4
            await running(other, 0)

    run(drain, facts)
