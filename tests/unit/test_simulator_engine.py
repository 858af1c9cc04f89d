"""The engine in virtual time: what must hold at every moment, whatever arrives."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.engine import End, Engine, LatencyEngine, QueueFullError, Sequence
from workers.sglang.simulator.scheduler import StepEngine

POOL = 1000
RUNNING = 4
TIMES = {
    "step_base_seconds": 0.03,
    "step_request_seconds": 0.001,
    "step_token_seconds": 0.0,
    "prefill_base_seconds": 0.02,
    "prefill_tokens_per_second": 1000.0,
}


@dataclass
class World:
    """An engine, its clock, and what has ended in it."""

    kind: type[Engine] = StepEngine
    settings: dict[str, Any] = field(default_factory=dict)
    now: float = 0.0
    ended: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = {"max_total_tokens": POOL, "max_running_requests": RUNNING, **TIMES, **self.settings}
        self.config = SimulatorConfig(**settings)
        self.engine = self.kind(self.config, lambda: self.now)

    def submit(self, rid: str, prompt: int = 10, new: int = 100, tokens: int | None = None, **more: Any) -> Sequence:
        length = new if tokens is None else tokens
        sequence = Sequence(rid, prompt, new, length, self.ended.append, latency_seconds=length / 10 + 0.1, **more)
        self.engine.submit(sequence)
        return sequence

    def run(self, until: float = float("inf")) -> None:
        """Go from one due moment to the next, and look at the invariants at each."""
        while (due := self.engine.due()) is not None and due <= until:
            self.now = max(self.now, due)
            self.engine.advance()
            self.check()
            self.check_work_conserving()
        self.now = until if until != float("inf") else self.now

    def check(self) -> None:
        engine = self.engine
        load = engine.load()
        assert 0 <= load.used_tokens <= load.used_tokens + load.cached_tokens <= self.config.max_total_tokens
        assert load.used_tokens >= sum(
            one.prompt_tokens - one.missing_tokens for one in engine.running if not one.input_ids
        )
        assert load.running == len(engine.running) <= self.config.max_running_requests
        assert load.waiting == len(engine.waiting)

    def check_work_conserving(self) -> None:
        """At a moment of admission the head of the queue is left only if it does not fit."""
        engine = self.engine
        if isinstance(engine, LatencyEngine):
            reserved = sum(one.prompt_tokens + one.max_new_tokens for one in engine.running)
            assert engine.reserved_tokens == reserved < self.config.max_total_tokens
            if engine.waiting and len(engine.running) < self.config.max_running_requests:
                head = engine.waiting[0]
                assert reserved + head.prompt_tokens + head.max_new_tokens + 1 >= self.config.max_total_tokens

    def order(self) -> list[str]:
        return [one.rid for one in self.ended]


def running(world: World) -> list[str]:
    return [one.rid for one in world.engine.running]


KINDS = pytest.mark.parametrize("kind", [StepEngine, LatencyEngine])

requests = st.lists(
    st.tuples(
        st.floats(0, 3),  # seconds since the one before
        st.integers(1, 300),  # prompt_tokens
        st.integers(0, 500),  # max_new_tokens
        st.floats(0, 1),  # share of them generated
        st.booleans(),  # aborted half a second later
        st.integers(0, 300),  # how much of its prompt all begin with; 0: its ids are not known
    ),
    max_size=40,
)


@KINDS
@given(requests=requests)
@settings(max_examples=150, deadline=None)
def test_the_pool_never_runs_over_and_every_request_ends_once(
    kind: type[Engine], requests: list[tuple[float, int, int, float, bool, int]]
) -> None:
    world = World(kind, {"chunked_prefill_size": 64, "schedule_conservativeness": 0.2})
    submitted: list[Sequence] = []
    for number, (gap, prompt, new, share, aborted, common) in enumerate(requests):
        world.run(world.now + gap)
        ids = (*range(min(common, prompt)), *[1000 + number] * (prompt - common)) if common else ()
        submitted.append(world.submit(f"{number:03d}.", prompt, new, int(new * share), input_ids=ids))
        world.check()
        if aborted:
            world.run(world.now + 0.5)
            world.engine.abort(f"{number:03d}.")
            world.check()
    world.run()
    assert sorted(world.order()) == [one.rid for one in submitted]
    for one in submitted:
        assert one.end is not None
        if one.end is End.FINISHED:
            assert one.generated_tokens == one.completion_tokens
        assert one.generated_tokens <= one.completion_tokens
        assert one.arrived_at <= one.ended_at
    admitted = [one for one in submitted if one.admitted_at is not None]
    times = [one.admitted_at for one in admitted if one.admitted_at is not None]
    assert times == sorted(times)  # first come, first served
    load = world.engine.load()
    assert (load.running, load.waiting, load.used_tokens, load.tokens_per_second) == (0, 0, 0, 0.0)
    assert world.engine.flush()
    assert world.engine.load().cached_tokens == 0


def test_a_lone_request_takes_its_prefill_and_one_step_for_each_further_token() -> None:
    world = World()
    one = world.submit("a", prompt=100, new=11)
    world.run()
    assert one.first_token_at == pytest.approx(0.02 + 100 / 1000)
    assert one.ended_at == pytest.approx(0.12 + 10 * 0.031)


def test_a_step_takes_longer_the_more_run_and_the_fuller_the_pool_is() -> None:
    world = World(settings={"step_token_seconds": 0.0001})
    first = world.submit("a", prompt=100, new=3)
    second = world.submit("b", prompt=100, new=3)  # waits for the first prefill to end
    world.run()
    prefill = 0.02 + 0.1
    assert first.first_token_at == pytest.approx(prefill)
    assert second.first_token_at == pytest.approx(2 * prefill)
    step = 0.03 + 2 * 0.001
    seconds = (step + 0.0001 * 202) + (step + 0.0001 * 204)
    assert second.ended_at == pytest.approx(2 * prefill + seconds)


def test_a_constant_rate_holds_whatever_else_runs() -> None:
    world = World(settings={"tokens_per_second": 50.0})
    sequences = [world.submit(f"{number}.", new=101) for number in range(RUNNING)]
    world.run()  # the first gets its first token at once, the others after its first step
    assert [one.ended_at for one in sequences] == pytest.approx([2.0, 2.02, 2.02, 2.02])


def test_requests_end_in_the_order_of_their_lengths_when_they_start_together() -> None:
    world = World()
    for rid, tokens in (("a", 30), ("b", 5), ("c", 1), ("d", 0)):
        world.submit(rid, new=100, tokens=tokens)
    world.run()
    assert world.order()[-1] == "a"
    assert {one.rid: one.generated_tokens for one in world.ended} == {"a": 30, "b": 5, "c": 1, "d": 0}


@KINDS
def test_admission_reserves_for_all_that_may_be_generated(kind: type[Engine]) -> None:
    """As observed: ten requests of up to 1500 new tokens in a pool of 4096 ran two at a time, eight waiting."""
    world = World(kind, {"max_total_tokens": 4096, "max_running_requests": 8})
    for number in range(10):
        world.submit(f"{number}.", prompt=5, new=1500, tokens=200, ignore_eos=True)
    world.run(1.0)
    assert (world.engine.load().running, world.engine.load().waiting) == (2, 8)


@KINDS
def test_a_large_request_at_the_head_holds_up_small_ones_behind_it(kind: type[Engine]) -> None:
    world = World(kind)
    first = world.submit("first", prompt=10, new=500, tokens=50)
    large = world.submit("large", prompt=10, new=900, tokens=5)
    small = world.submit("small", prompt=10, new=10, tokens=1)
    world.run(0.5)
    assert running(world) == ["first"]
    world.run()
    assert first.ended_at == large.admitted_at == small.admitted_at


def test_a_prefill_takes_no_more_prompt_tokens_than_it_may_but_always_one_request() -> None:
    world = World(settings={"max_prefill_tokens": 150})
    world.submit("running", prompt=200, new=20)
    for rid in ("a", "b", "c"):
        world.submit(rid, prompt=100, new=20)
    world.now = 0.22 + 0.1
    world.engine.advance()
    assert running(world) == ["running", "a"]


@KINDS
def test_a_full_queue_refuses_and_forgets(kind: type[Engine]) -> None:
    world = World(kind, {"max_queued_requests": 2})
    for number in range(RUNNING):
        world.submit(f"{number}.")
        world.run(world.now + 1.0)
    world.submit("q1")
    world.submit("q2")
    with pytest.raises(QueueFullError):
        world.submit("q3")
    world.run()
    assert sorted(world.order()) == ["0.", "1.", "2.", "3.", "q1", "q2"]


@KINDS
def test_an_abort_takes_every_request_whose_rid_begins_so(kind: type[Engine]) -> None:
    world = World(kind, {"max_running_requests": 2})
    for rid in ("p1", "q1", "p10", "p1x", "q2"):
        world.submit(rid)
    world.run(2.0)
    assert running(world) == ["p1", "q1"]
    world.engine.abort("p1")
    world.run(3.0)
    ends = {one.rid: one.end for one in world.ended}
    assert ends == {"p1": End.ABORTED, "p10": End.ABORTED_WAITING, "p1x": End.ABORTED_WAITING}
    assert running(world) == ["q1", "q2"]
    world.run()
    assert world.order()[3:] == ["q1", "q2"]


@KINDS
def test_an_aborted_request_keeps_what_it_has_generated(kind: type[Engine]) -> None:
    world = World(kind)
    one = world.submit("a", prompt=10, new=100)
    world.run(1.0)
    generated = world.engine.load().used_tokens - 10
    world.engine.abort("a")
    world.run(1.1)
    assert one.end is End.ABORTED
    assert generated <= one.generated_tokens <= generated + 1
    assert 0 < one.generated_tokens < 100
    assert world.engine.load().used_tokens == 0


@KINDS
def test_an_abort_of_nobody_is_no_error(kind: type[Engine]) -> None:
    world = World(kind)
    world.engine.abort("nobody")
    assert world.engine.due() is None


def test_the_load_counts_tokens_as_they_come() -> None:
    world = World()
    world.submit("a", prompt=100, new=50)
    world.submit("b", prompt=60, new=50)
    assert world.engine.load().tokens_per_second == pytest.approx(1 / 0.031)
    load = world.engine.load()
    assert (load.running, load.waiting, load.used_tokens, load.waiting_tokens) == (1, 1, 100, 60)
    world.run(0.1201)
    assert (world.engine.load().used_tokens, world.engine.load().waiting) == (160, 0)
    world.run(0.12 + 0.08 + 10 * 0.032 + 0.0001)
    assert world.engine.load().used_tokens == 182
    assert world.engine.load().tokens_per_second == pytest.approx(2 / 0.032)


def test_steps_that_fell_due_long_ago_are_caught_up_with_in_order() -> None:
    """A busy process wakes late; simulated time must not suffer."""
    late, punctual = World(), World()
    for world in (late, punctual):
        for number in range(8):
            world.submit(f"{number}.", prompt=20, new=100, tokens=10 * number + 1)
    punctual.run()
    late.now = 1000.0
    late.engine.advance()
    assert [(one.rid, one.ended_at) for one in late.ended] == [(one.rid, one.ended_at) for one in punctual.ended]


def test_a_latency_engine_takes_the_latency_of_each_from_its_admission_on() -> None:
    world = World(LatencyEngine, {"max_running_requests": 1})
    first = world.submit("a", tokens=20)
    second = world.submit("b", tokens=10)
    world.run()
    assert first.ended_at == pytest.approx(2.1)
    assert second.admitted_at == pytest.approx(2.1)
    assert second.ended_at == pytest.approx(2.1 + 1.1)
