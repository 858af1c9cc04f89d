"""What a prober asks of a server, and what it makes of answers that are none; the server is played."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.unit.preflight_steps import URL, answering, facts_of, sglang
from workers.sglang.probe import SURE_IDS, Prober, Reply, TextRead

TEXT = "Größe 12"
PARAMS = {"max_new_tokens": 4, "temperature": 0}


class Played:
    """A server that answers with `answers` by path, and keeps what it was asked."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.prober = Prober(facts_of(sglang()), "sesame", answering(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/")
        body = json.loads(request.content) if request.content else {}
        self.asked.append((path, body))
        assert request.headers["authorization"] == "Bearer sesame"
        assert str(request.url).startswith(URL)
        found = self.answers.get(path)
        if isinstance(found, Exception):
            raise found
        if callable(found):
            found = found(body)
        return httpx.Response(404, json={"detail": "Not Found"}) if found is None else httpx.Response(200, json=found)


def test_a_text_goes_to_tokenize_as_it_is() -> None:
    played = Played(tokenize={"tokens": [5, 6, 7], "count": 3, "max_model_len": 2048})

    assert asyncio.run(played.prober.tokenized(TEXT, 5)) == TextRead(3, [5, 6, 7])
    assert played.asked == [("tokenize", {"prompt": TEXT, "add_special_tokens": False})]


@pytest.mark.parametrize("answer", [None, {"tokens": "none"}, {"tokens": [1.5]}, [1], httpx.ReadError("gone")])
def test_a_server_that_tokenizes_nothing_is_no_error(answer: Any) -> None:
    assert asyncio.run(Played(tokenize=answer).prober.tokenized(TEXT, 5)) is None


def test_a_release_without_tokenize_reads_the_text_as_a_prompt() -> None:
    played = Played(generate={"text": "", "output_ids": [9], "meta_info": {"prompt_tokens": 3}})

    assert asyncio.run(played.prober.read(TEXT, 5)) == TextRead(3, None, added=True)
    [(path, body)] = played.asked
    assert (path, body["text"], body["sampling_params"]["max_new_tokens"]) == ("generate", TEXT, 1)
    assert "input_ids" not in body


def test_a_newer_one_says_the_ids_too() -> None:
    played = Played(generate={"meta_info": {"prompt_tokens": 3}, "prompt_token_ids": [1, 5, 6]})

    assert asyncio.run(played.prober.read(TEXT, 5)) == TextRead(3, [1, 5, 6], added=True)


@pytest.mark.parametrize("answer", [None, {"meta_info": None}, {"meta_info": {}}, "text", httpx.ReadError("gone")])
def test_a_server_that_reads_no_text_is_no_error(answer: Any) -> None:
    assert asyncio.run(Played(generate=answer).prober.read(TEXT, 5)) is None


def good(body: dict[str, Any], **meta: Any) -> dict[str, Any]:
    info = {
        "id": body["rid"],
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": 4,
        "weight_version": "default",
    }
    return {"output_ids": [7, 8, 9, 10], "meta_info": info | meta}


def answered(**answers: Any) -> Reply:
    return asyncio.run(Played(**answers).prober.answer(SURE_IDS, PARAMS, 4096, 5))


def test_a_good_answer_is_accepted() -> None:
    reply = answered(generate=good)

    assert reply.answer is not None
    assert (reply.answer.output_ids, reply.reason) == ([7, 8, 9, 10], "")


@pytest.mark.parametrize(
    ("generate", "reason"),
    [
        (lambda body: good(body, completion_tokens=5), "length_mismatch"),
        (lambda body: good(body, prompt_tokens=8), "prompt_mismatch"),
        (lambda body: good(body, weight_version="other"), "weight_version_changed"),
        (lambda body: good(body) | {"output_ids": [7, 8, 9, 4096]}, "token_out_of_range"),
        (None, "not_sglang"),
        (httpx.ReadError("gone"), "connection_lost"),
    ],
)
def test_what_is_no_good_answer_has_its_reason(generate: Any, reason: str) -> None:
    reply = answered(generate=generate)

    assert (reply.answer, reply.reason) == (None, reason)
    assert reply.detail


def test_the_ids_that_are_sent_are_known_to_every_model() -> None:
    assert min(SURE_IDS) >= 100
    assert max(SURE_IDS) < 256
