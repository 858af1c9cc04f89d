"""Gates with real parts: a worker, a simulated model with a fault, and the keeper, which stops the dataset."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from common.broker import make_celery
from common.chat_template import Tokenizer
from common.events import last_events, operator
from common.gate_settings import gate_in
from common.ledger import DatasetState, Ledger
from common.payload import Packer
from common.reading import READING, keep_reading, pack
from common.sections import DatasetSettings, TokenizerSettings
from common.segments import records
from common.settings import Settings
from producer.recover import recover_dataset
from producer.report.gather import gather
from producer.status import snapshot
from producer.steer import resume
from producer.verify import verify
from tests.conftest import PATIENCE_SECONDS
from tests.integration.worker_steps import Worker, assert_books_agree, until, working
from workers.keeper import Keeper
from workers.marking import Markers
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.faults import Fault
from workers.sglang.simulator.server import Simulator

TOKENIZER = Path(__file__).parents[2] / "examples" / "tokenizer"
# The ids of that tokenizer; <|im_end|> and </think>.
IDS: dict[str, Any] = {"vocab_size": 4096, "last_id": 4087, "end_token_id": 4090, "think_end_token_id": 4093}
SLOTS = 12
Answered = TypeVar("Answered")
MAX_NEW_TOKENS = 2048


@dataclass(frozen=True)
class Model:
    """One of three: how long its answers are."""

    mean_tokens: float
    cv: float


MODELS = {"short": Model(120, 0.5), "middle": Model(300, 1.0), "long": Model(600, 1.2)}


def run(test: Callable[[], Awaitable[Answered]]) -> Answered:
    return asyncio.run(asyncio.wait_for(test(), PATIENCE_SECONDS))


class Job:
    """One dataset of a job, and all that works on it."""

    def __init__(self, settings: Settings, ledger: Ledger, keeper: Keeper, tokenizer: Tokenizer) -> None:
        self.settings, self.ledger, self.keeper = settings, ledger, keeper
        self._facts = {"vocab_size": 4096, **tokenizer.fingerprint()}
        keep_reading(settings.output, {**self._facts, READING: pack(tokenizer)})
        self._tokenizer = tokenizer

    def prompts(self, **kwargs: Any) -> list[list[int]]:
        """As the template makes them with these kwargs."""
        asked = ([{"role": "user", "content": f"What is {number} + 1?"}] for number in range(800))
        return self._tokenizer.encode([self._tokenizer.render(one, None, kwargs) for one in asked])

    def fill(self, max_new_tokens: int = MAX_NEW_TOKENS, thinking: bool = True, **own: Any) -> None:
        """Register dataset A, and queue all of its rows."""
        self._max_new_tokens = max_new_tokens
        self.ledger.set_model(self._facts)
        self.dataset = DatasetSettings(name="A", path=Path("a.jsonl"), **own)
        self.ledger.register(self.dataset)
        packer = Packer()
        rows = [(index, packer.pack(ids, {})) for index, ids in enumerate(self.prompts(thinking=thinking))]
        self.ledger.feed("A", before="", after="1", ended=True, rejected=[], samples=rows)
        self.ledger.admit("A", room=10**6, window=64, tokens_per_second=0)
        self._next = 0

    @contextlib.asynccontextmanager
    async def at_work(self, server: Simulator) -> AsyncIterator[Worker]:
        markers = Markers(self.settings, self._facts)
        sampling = {"max_new_tokens": self._max_new_tokens, "temperature": 1.0}
        output = self.settings.output
        async with working(
            self.settings.redis_url,
            output,
            server,
            limit=SLOTS,
            vocab_size=4096,
            sampling=sampling,
            marker_of=markers.of,
            load_seconds=0.02,
        ) as worker:
            worker.client.start(worker.generation.slots_changed)
            yield worker

    async def answer(self, worker: Worker, samples: int) -> None:
        """Have so many samples more begun, or as many as are until a gate closes; the keeper looks meanwhile."""
        end = self._next + samples
        while self._next < end and self.state().state == "open":
            worker.ring("A", range(self._next, self._next + 4))
            self._next += 4
            await until("a slot is free", lambda: self._next - self.state().done < SLOTS)
            await asyncio.get_running_loop().run_in_executor(None, self.keeper.tick)
        await until("nothing is in flight", lambda: self.state().in_flight == 0)

    def told(self) -> list[tuple[str, str]]:
        """What was told of the dataset, and by whom."""
        return [(event.what, event.who) for event in last_events(self.settings.output, 20) if event.dataset == "A"]

    def state(self) -> DatasetState:
        return self.ledger.snapshot("A")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerSettings(path=TOKENIZER))


@pytest.fixture
def job(valkey: str, ledger: Ledger, tmp_path: Path, tokenizer: Tokenizer) -> Iterator[Job]:
    settings = Settings(output=tmp_path, redis=valkey, tokenizer=TokenizerSettings(path=TOKENIZER))
    with make_celery("tokenmill", settings) as app:
        keeper = Keeper(settings, app, ledger)
        yield Job(settings, ledger, keeper, tokenizer)
        keeper.close()


def server(model: str = "middle", *, thinks: bool = True, speed: float = 400.0) -> Simulator:
    chosen, ids = MODELS[model], IDS if thinks else {**IDS, "think_end_token_id": None}
    return Simulator(SimulatorConfig(speed=speed, mean_tokens=chosen.mean_tokens, cv=chosen.cv, **ids))


@pytest.mark.parametrize("model", MODELS)
def test_no_gate_closes_on_a_clean_run(job: Job, model: str) -> None:
    async def test() -> None:
        # Where a busy machine stands still for a tenth of a second, the clocks of what is in flight are behind by that.
        async with server(model, speed=200.0) as simulated, job.at_work(simulated) as worker:
            await job.answer(worker, 400)

    job.fill()
    run(test)
    assert (job.state().state, job.state().reason, job.state().done) == ("open", "", 400)
    assert job.state().recent == 400
    assert_books_agree(job.ledger, job.settings.output, "A")


@pytest.mark.parametrize(
    ("fault", "gate"),
    [
        ("no_think_end", "no_think_end"),  # the reasoning is not to be told from the answer
        ("no_thinking", "empty_think"),  # a model that does not think
        ("clipped", "clipped"),  # answers that are cut at 128 tokens, without a word
        ("loop", "repetition"),
    ],
)
@pytest.mark.parametrize("begins", [0, 200], ids=["from the start", "in mid-run"])
def test_a_fault_is_caught_within_a_hundred_answers(job: Job, fault: str, gate: str, begins: int) -> None:
    async def test() -> int:
        async with server("short") as simulated, job.at_work(simulated) as worker:
            await job.answer(worker, begins)
            assert job.state().state == "open"
            simulated.faults.set({fault: Fault()})
            await job.answer(worker, 400)
            return job.state().done - begins

    job.fill(256 if fault == "clipped" else MAX_NEW_TOKENS)
    answers = run(test)
    state = job.state()
    print(f"{fault}: {answers} answers")
    assert answers <= 100
    assert state.state == "halted"
    assert gate_in(state.reason) == gate
    (seen,) = snapshot(job.ledger)["datasets"]
    assert (seen["state"], seen["gate"], seen["reason"]) == ("halted", gate, state.reason)
    samples = re.search(r"look at samples (\d+), (\d+), (\d+) \(`tokenmill show A \3`\)", state.reason)
    assert samples is not None
    flags = {record.index: record.flags for record in records(job.settings.output, "A")}
    assert all(gate in flags[int(index)] for index in samples.groups())
    assert job.told() == [("halted", "keeper")]


@pytest.mark.parametrize("told", [False, True])
def test_a_template_that_was_not_told_to_think(job: Job, told: bool) -> None:
    async def test() -> int:
        async with server("short", thinks=False) as simulated, job.at_work(simulated) as worker:
            await job.answer(worker, 120)
            return job.state().done

    job.fill(thinking=False, chat_template_kwargs={"thinking": False} if told else {})
    answers = run(test)
    state = job.state()
    if told:  # by whoever wants it so
        assert (state.state, answers, state.flags.get("no_think", 0)) == ("open", 120, 0)
    else:
        print(f"no thinking: {answers} answers")
        assert answers <= 100
        assert (state.state, gate_in(state.reason)) == ("halted", "no_think")


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_another_model_in_mid_run_is_caught_within_a_hundred_answers(job: Job, factor: float) -> None:
    async def test() -> int:
        async with server("middle") as simulated, job.at_work(simulated) as worker:
            await job.answer(worker, 240)
            assert job.state().state == "open"
            simulated.faults.set({"other_model": Fault(factor=factor)})
            await job.answer(worker, 400)
            return job.state().done - 240

    job.fill()
    answers = run(test)
    print(f"factor {factor:.2f}: {answers} answers")
    assert answers <= 100
    assert job.state().state == "halted"
    assert gate_in(job.state().reason) == "change"


def test_resume_begins_a_new_window(job: Job) -> None:
    async def test() -> None:
        async with server("short") as simulated, job.at_work(simulated) as worker:
            simulated.faults.set({"no_thinking": Fault()})
            await job.answer(worker, 200)
            assert job.state().state == "paused"
            resume(job.settings, job.ledger, "A")
            job.keeper.tick()
            assert job.state().state == "open"
            simulated.faults.set({"no_thinking": None})
            done = job.state().done
            await job.answer(worker, 60)
            assert (job.state().state, job.state().done) == ("open", done + 60)
            simulated.faults.set({"no_thinking": Fault()})
            await job.answer(worker, 200)
            assert job.state().state == "paused"

    job.fill(gates={"action": "pause"})
    run(test)
    assert job.told() == [("paused", "keeper"), ("resumed", operator()), ("paused", "keeper")]


def test_records_that_do_not_count_are_kept_and_all_books_agree(job: Job) -> None:
    async def test() -> None:
        async with server("short") as simulated, job.at_work(simulated) as worker:
            simulated.faults.set({"no_thinking": Fault(share=0.5)})
            await job.answer(worker, 120)

    job.fill(count="total", gates={"action": "none", "empty_think": {"counts": False}})
    run(test)
    kept = list(records(job.settings.output, "A"))
    free = [record for record in kept if "uncounted" in record.flags]
    assert len(kept) == 120
    assert 20 < len(free) < 100
    assert all(("empty_think" in record.flags) == ("uncounted" in record.flags) for record in kept)
    spent = sum(one.prompt_tokens + one.completion_tokens for one in kept if "uncounted" not in one.flags)
    state = job.state()
    assert (state.spent_tokens, state.uncounted) == (spent, len(free))
    assert state.uncounted_tokens == sum(one.prompt_tokens + one.completion_tokens for one in free)
    assert gather(job.settings.output, ["A"]).datasets[0].samples == 120
    assert verify(job.settings.output, ["A"], job.ledger).differences == []
    job.ledger.redis.flushall()
    recover_dataset(job.settings.output, job.dataset, job.ledger)
    again = job.state()
    assert (again.spent_tokens, again.uncounted, again.uncounted_tokens) == (
        spent,
        state.uncounted,
        state.uncounted_tokens,
    )
    # A cap that is reached only with what does not count is not reached.
    raised = job.dataset.model_copy(update={"cap_tokens": spent + 1})
    assert job.ledger.register(raised) == "known"
    assert verify(job.settings.output, ["A"], job.ledger).differences == []
