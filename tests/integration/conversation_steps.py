"""Steps of the tests of conversations: a feed with turns = "all", a server that follows a script, and its records."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoTokenizer

from common.broker import make_celery
from common.ledger import ENDED_STATES, Ledger
from common.records import Record
from common.segments import records
from producer.feed import Feeder
from tests.integration.feed_steps import TOKENIZER, VOCAB_SIZE, Feed, Row
from tests.integration.worker_steps import Worker, until, working
from workers.sglang.simulator.server import Simulator

URL = "http://one:30000"
THINK_END, END = 4093, 4090
Servers = Simulator | tuple[list[str], httpx.AsyncBaseTransport]


@cache
def library() -> Any:
    """The tokenizer by itself, without anything of ours around it."""
    return AutoTokenizer.from_pretrained(TOKENIZER, local_files_only=True)


def rendered(*messages: Mapping[str, Any], tools: Any = None, **kwargs: Any) -> list[int]:
    """The ids that the library's own template gives."""
    ids: list[int] = library().apply_chat_template(
        list(messages), tools=tools, tokenize=True, add_generation_prompt=True, return_dict=False, **kwargs
    )
    return ids


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def talk(name: str, turns: int) -> Row:
    """A row of so many user turns, each answered by somebody else."""
    said = [one for turn in range(turns) for one in (user(f"{name} {turn}"), assistant(f"theirs {turn}"))]
    return {"id": name, "messages": said}


def said(content: str, reasoning: str = "well") -> list[int]:
    """The output_ids of an answer."""
    ids: list[int] = library().encode(f"{reasoning}</think>{content}", add_special_tokens=False)
    return [*ids, END]


def answer_of(record: Record) -> str:
    """What the answer says behind its reasoning."""
    return str(library().decode(record.output_ids)).partition("</think>")[2].removesuffix("<|im_end|>")


def script(answer: Callable[[str], Any]) -> tuple[list[str], httpx.AsyncBaseTransport]:
    """A server that answers the text of the prompt's last turn: with ids, a length to be cut at, or a response."""

    async def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/generate":
            return httpx.Response(200)
        sent = json.loads(request.content)
        prompt = str(library().decode(sent["input_ids"]))
        given = answer(prompt.rpartition("<|im_end|>")[0].rpartition("\n")[2])
        given = await given if asyncio.iscoroutine(given) else given
        if isinstance(given, httpx.Response):
            return given
        most = sent["sampling_params"]["max_new_tokens"]
        finish = {"type": "length", "length": most} if len(given) == most else {"type": "stop", "matched": given[-1]}
        meta = {
            "id": sent["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(sent["input_ids"]),
            "completion_tokens": len(given),
            "cached_tokens": 1,
            "weight_version": "default",
        }
        return httpx.Response(200, json={"text": "", "output_ids": given, "meta_info": meta})

    return [URL], httpx.MockTransport(handle)


class Talks(Feed):
    """Dataset A with turns = "all", fed and answered until it ends."""

    def __init__(self, folder: Path, redis_url: str, ledger: Ledger) -> None:
        super().__init__(folder, redis_url, ledger)
        self.redis_url = redis_url
        self.configure(more='turns = "all"')

    async def answer(
        self, servers: Servers, *, stop: Callable[[], object] = lambda: False, room: int = 10**6, owner: str = "w1@host"
    ) -> None:
        """Feed and answer until the dataset has ended, or until `stop`; what the keeper does is done here."""
        app = make_celery("test", self.settings)
        with closing(app), closing(Ledger.connect(self.redis_url)) as own:
            feeder = Feeder(self.settings, app, own)
            async with working(self.redis_url, self.output, servers, owner=owner, vocab_size=VOCAB_SIZE) as worker:
                await until("the dataset ends", lambda: self._step(feeder, worker, stop, room), 40)

    def _step(self, feeder: Feeder, worker: Worker, stop: Callable[[], object], room: int) -> object:
        if stop():
            return True
        feeder.feed("A")
        for index in self.ledger.resend("A", 1, self.ledger.unsent("A", 100)):
            worker.ring("A", [index])
        return self.ledger.admit("A", room=room, window=1000, tokens_per_second=0) in ENDED_STATES

    def records(self) -> dict[int, Record]:
        """Those that count, by index."""
        return {record.index: record for record in records(self.output, "A")}

    def turns(self) -> dict[str, list[Record]]:
        """The records of each row by its id, in the order of their turns."""
        found: dict[str, list[Record]] = {}
        for _, record in sorted(self.records().items()):
            found.setdefault(record.meta["id"], []).append(record)
        return found


def assert_own_history(name: str, records: Sequence[Record], turns: int) -> None:
    """Each prompt of this row made by `talk` is the template's rendering of this model's own earlier answers."""
    history: list[dict[str, Any]] = []
    for turn, record in enumerate(records):
        history.append(user(f"{name} {turn}"))
        assert record.input_ids == rendered(*history)
        assert (record.turn, record.turns) == (turn, turns)
        assert record.parent == (records[turn - 1].index if turn else None)
        history.append(assistant(answer_of(record)))
