"""The exchanges that were recorded from a real SGLang 0.5.23, replayed against the simulated server.

Each must get the same status, the same fields of the same kinds, the same finish reason, and as many ids; what the
simulator does not cover is listed below, one by one.
"""

import asyncio
import contextlib
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.conftest import PATIENCE_SECONDS, SHARED
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.presets import PRESETS
from workers.sglang.simulator.server import Simulator

FILE = SHARED / "data" / "sglang_captures" / "sglang_0.5.23.jsonl"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason=f"the recorded exchanges are not at {FILE}")

# With this seed the answer to 10, 20, 30, 40, 50 has its first 864 in the fourth place, as the real model's has it.
SETTINGS: dict[str, Any] = {
    **PRESETS["tiny"],
    "model_path": "model-qwen2",
    "first_id": 860,
    "last_id": 870,
    "seed": 22,
    "mean_tokens": 1e6,
    "cv": 0.0,
    "speed": 50.0,
}
Exchange = dict[str, Any]

# Bodies of which the simulator gives a part.
IN_PART = ("/server_info", "/get_server_info", "/model_info", "/get_model_info", "/v1/loads")

# What the simulator does not cover, and every recorded request that needs it; 242 of 269 are replayed.
NOT_COVERED: dict[str, list[str]] = {
    "batches": [
        "batch",
        "batch_sp_list",
        "batch_stream",
        "empty_in_batch",
        "empty_in_batch",
        "batch_sti_stream",
        "batch_rid_str",
        "batch_one_bad",
        "batch_rid_dup",
        "batch_rid_len",
    ],
    "logprobs": ["logprob", "logprob_out_only", "return_ids", "retr_nonstream"],
    "a route": ["/v1/loads?format=prometheus", "/openapi.json", "tokenize", "detokenize", "v1comp", "v1_chat"],
    "n": ["n2", "n2rid"],
    "stop strings": ["stop_str", "stopstr_sti"],
    "a recorder that waits": ["health_after_kill", "health_after_kill"],
    "text": ["text_sti"],
}


def exchanges() -> list[Exchange]:
    if not FILE.exists():
        return []
    with FILE.open() as lines:
        return [json.loads(line) for line in lines]


def asked(exchange: Exchange) -> dict[str, Any]:
    """The request's body, if it is a JSON object."""
    with contextlib.suppress(ValueError, TypeError):
        body = json.loads(exchange["request"])
        if isinstance(body, dict):
            return body
    return {}


def missing(exchange: Exchange) -> str | None:
    """What the simulator would have to have for this one."""
    body = asked(exchange)
    ids, params = body.get("input_ids"), body.get("sampling_params") or {}
    wanted = {
        "a route": exchange["path"] in {"/openapi.json", "/tokenize", "/detokenize"}
        or exchange["path"].startswith(("/v1/c", "/v1/loads?format")),
        "batches": isinstance(ids, list) and ids != [[]] and any(isinstance(one, list) for one in ids),
        "n": isinstance(params, dict) and params.get("n", 1) != 1,
        "text": "text" in body and ids is None,
        "stop strings": isinstance(params, dict) and "stop" in params,
        "logprobs": bool(body.get("return_logprob")),
        "prompt ids in the answer": any(key.startswith("return_") and "ids" in key for key in body),
        "a recorder that waits": str(exchange.get("exc", "")).startswith("TimeoutError")
        and exchange["path"] == "/health",
    }
    return next((what for what, is_so in wanted.items() if is_so), None)


def circumstances(exchange: Exchange) -> str:
    """What must be so for this to happen."""
    name, status, body = exchange["name"], exchange.get("status"), exchange.get("body") or ""
    if "Refused" in str(exchange.get("exc")):
        return "dead"
    if name.startswith("sched_kill"):
        return "killed"
    for prefix in ("hang", "during_hang", "noauth", "pool"):
        if name.startswith(prefix):
            return prefix
    if name in {"health_during_term", "gen_during_term"}:
        return "draining" if status else "gone"
    for text, found in (
        ("Abort in waiting queue", "aborted in the queue"),
        ('"message":"Aborted"', "aborted"),
        ("queue is full", "queue full"),
        ("Duplicate request ID detected", "duplicate"),
    ):
        if text in body:
            return found
    without_text = '"output_ids"' in body and '"text"' not in body
    kind = "deltas" if body.startswith("data: ") else "no tokenizer"
    return kind if without_text else "plain"


class Server:
    """A simulated server and a session; `say` is one exchange."""

    def __init__(self, server: Simulator, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    async def say(self, exchange: Exchange) -> tuple[int, Any]:
        sent = exchange["request"]
        headers = {} if exchange["name"] == "no_ctype" or sent is None else {"Content-Type": "application/json"}
        raw = sent.encode() if isinstance(sent, str) else sent
        url = self.server.url + exchange["path"]
        async with self.session.request(exchange["method"], url, data=raw, headers=headers) as response:
            body = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(body) if is_json else body.decode()

    async def fill(self, count: int) -> list["asyncio.Task[Any]"]:
        """Requests that run or wait until they are aborted."""
        body = {"sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
        tasks = []
        for number in range(count):
            fields = body | {"rid": f"filler-{number}", "input_ids": [7, number]}
            exchange: Exchange = {"name": "", "method": "POST", "path": "/generate", "request": json.dumps(fields)}
            tasks.append(asyncio.create_task(self.say(exchange)))
            await self.until(lambda n=number: self.count() == n + 1)
        return tasks

    def count(self) -> int:
        load = self.server.load()
        return load.running + load.waiting

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():  # noqa: ASYNC110  # the server has no event for it
                await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Server]:
    config = SimulatorConfig(**(SETTINGS | settings))
    async with Simulator(config) as server, aiohttp.ClientSession() as session:
        yield Server(server, session)


STARTED_WITH: dict[str, dict[str, Any]] = {
    "noauth": {"api_key": "secret"},
    "pool": {"max_total_tokens": 600, "skip_tokenizer_init": True},
    "no tokenizer": {"skip_tokenizer_init": True},
    "queue full": {"max_running_requests": 1, "max_queued_requests": 1},
    "aborted in the queue": {"max_running_requests": 1},
    "draining": {"skip_tokenizer_init": True},
    "deltas": {"skip_tokenizer_init": True, "stream_output": True, "stream_interval": 3},
}


INTERRUPTED = {"queue full", "duplicate", "aborted", "aborted in the queue", "killed"}


async def replay(kind: str, exchange: Exchange) -> tuple[int | None, Any]:
    """What the simulator answers in these circumstances; a status of None if the connection breaks."""
    # Steps that are long enough for events of their own, and answers that do not end before what is to interrupt them.
    speed = {"speed": 2.0} if asked(exchange).get("stream") or kind in INTERRUPTED else {}
    async with serving(**speed, **STARTED_WITH.get(kind, {})) as server:
        try:
            return await in_circumstances(kind, exchange, server)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            return None, None


async def in_circumstances(kind: str, exchange: Exchange, server: Server) -> tuple[int | None, Any]:
    process = server.server.process
    if kind in {"dead", "gone"}:
        server.server.die("the test wants it")
        await server.server.dead.wait()
    elif kind == "draining":
        process.draining = True
    elif kind == "queue full":
        await server.fill(2)
    elif kind == "duplicate":
        await server.fill(1)
        exchange = exchange | {"request": json.dumps(asked(exchange) | {"rid": "filler-0"})}
    elif kind in {"aborted", "aborted in the queue", "killed"}:
        return await interrupted(kind, exchange, server)
    elif kind in {"hang", "during_hang"}:
        return await hung(exchange, server)
    return await server.say(exchange)


async def interrupted(kind: str, exchange: Exchange, server: Server) -> tuple[int | None, Any]:
    """A request that is aborted, or whose server dies, while it runs or waits."""
    waiting = kind == "aborted in the queue"
    if waiting:
        await server.fill(1)
    call = asyncio.create_task(server.say(exchange))
    await server.until(lambda: server.server.load().waiting == 1 if waiting else server.server.load().used_tokens > 10)
    if kind == "killed":
        server.server.die("the test wants it")
    else:
        server.server.process.abort(asked(exchange).get("rid") or "")
    return await call


async def hung(exchange: Exchange, server: Server) -> tuple[int | None, Any]:
    """With a scheduler that hangs, and later goes on."""
    await server.session.post(server.server.url + "/_sim/faults", json={"frozen": {}})
    call = asyncio.create_task(server.say(exchange))
    wait_in_vain = exchange.get("status") is None or exchange["name"] == "during_hang"
    done, _ = await asyncio.wait([call], timeout=0.5 if wait_in_vain else PATIENCE_SECONDS)
    assert bool(done) != wait_in_vain
    if exchange.get("status") is None:
        call.cancel()
        return None, None  # the recorder gave up, too
    await server.session.delete(server.server.url + "/_sim/faults")
    return await call


def differences(real: Any, found: Any, *, in_part: bool, cut: bool, at: str = "") -> list[str]:
    """Where two bodies differ in their fields, their kinds, or in what must be equal."""
    if at.endswith(("finish_reason", "completion_tokens")):
        return [] if real == found or (cut and at.endswith("_tokens")) else [f"{at}: {real} and {found}"]
    if isinstance(real, dict) and isinstance(found, dict):
        keys = found.keys() - real.keys() if in_part else found.keys() ^ real.keys()
        wrong = [f"{at}: {sorted(keys)}"] if keys else []
        for key in found.keys() & real.keys():
            wrong += differences(real[key], found[key], in_part=in_part, cut=cut, at=f"{at}.{key}")
        return wrong
    if isinstance(real, list) and isinstance(found, list):
        if at.endswith("output_ids"):
            return [] if cut or len(real) == len(found) else [f"{at}: {len(real)} and {len(found)} ids"]
        return differences(real[0], found[0], in_part=in_part, cut=cut, at=f"{at}[]") if real and found else []
    if (real is None or found is None) and (in_part or at.endswith("cached_tokens_details")):
        return []  # null, or what it is on that machine
    return [] if kind_of(real) == kind_of(found) else [f"{at}: {real!r} and {found!r}"]


def differences_of_streams(real: str, found: str) -> list[str]:
    """Where two streams differ in their first, second and last events, in the number of all ids, or at the end."""
    aborted, deltas = '"abort"' in real, '"output_ids"' in real and '"text"' not in real
    theirs, ours = ([json.loads(event) for event in events(stream)] for stream in (real, found))
    wrong = differences(theirs[-1], ours[-1], in_part=False, cut=deltas or aborted, at="last")
    # How many ids an event has is a matter of the moment.
    for place in (0, 1):
        if min(len(theirs), len(ours)) > place + 1:
            theirs[place]["meta_info"]["completion_tokens"] = ours[place]["meta_info"]["completion_tokens"]
            wrong += differences(theirs[place], ours[place], in_part=False, cut=True, at=f"event {place}")
    for stream in (theirs, ours):
        if deltas and not aborted:
            ids = [token for event in stream for token in event["output_ids"]]
            assert len(ids) == stream[-1]["meta_info"]["completion_tokens"]
    return wrong


def events(stream: str) -> list[str]:
    """The data of all events but [DONE], which is the last."""
    *data, done, nothing = stream.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [event.removeprefix("data: ") for event in data]


def kind_of(value: Any) -> str:
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def metrics(text: str) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+ \S+)$", text, re.MULTILINE))


def compared(exchange: Exchange, status: int | None, body: Any) -> list[str]:
    if status != exchange.get("status"):
        return [f"status {exchange.get('status')} and {status}"]
    raw = exchange.get("body")
    if status is None or raw is None:
        return []
    path = exchange["path"].partition("?")[0]
    if path == "/metrics":
        known = metrics("".join(one.get("body") or "" for one in exchanges() if one["path"] == path))
        return sorted(metrics(body) - known)
    if raw.startswith("data: "):
        return differences_of_streams(raw, body)
    if not isinstance(body, str) or raw[:1] in {"{", "["}:
        real = json.loads(raw)
        cut = '"abort"' in raw
        return differences(real, body, in_part=path in IN_PART, cut=cut)
    return [] if raw == body else [f"{raw!r} and {body!r}"]


def test_what_is_not_covered_is_what_is_listed() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for exchange in exchanges():
        if (what := missing(exchange)) is not None:
            found[what].append(exchange["name"])
    assert found == NOT_COVERED


KINDS = sorted({circumstances(exchange) for exchange in exchanges()})


@pytest.mark.parametrize("kind", KINDS)
def test_each_recorded_request_is_answered_as_it_was(kind: str) -> None:
    replayed = [one for one in exchanges() if missing(one) is None and circumstances(one) == kind]

    async def test() -> dict[str, list[str]]:
        wrong = {}
        for number, exchange in enumerate(replayed):
            found = compared(exchange, *await replay(kind, exchange))
            if found:
                wrong[f"{number} {exchange['name']}"] = found
        return wrong

    assert replayed
    assert asyncio.run(test()) == {}
