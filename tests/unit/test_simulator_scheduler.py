"""The scheduler of the simulated server in virtual time: admission, chunks, retraction, the prefix cache, the pace."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from workers.sglang.simulator.answers import Lognormal
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.engine import End, Sequence
from workers.sglang.simulator.presets import PRESETS
from workers.sglang.simulator.scheduler import StepEngine

# A step a second, a prefill a second whatever its size: a moment is a number of steps.
EVEN: dict[str, Any] = {
    "step_base_seconds": 1.0,
    "step_request_seconds": 0.0,
    "step_token_seconds": 0.0,
    "prefill_base_seconds": 1.0,
    "prefill_tokens_per_second": 2.0**60,  # no time at all, without an error of rounding
    "max_total_tokens": 1000,
    "max_running_requests": 100,
}


@dataclass
class World:
    """A scheduler and its clock; `events` says what ended, and when."""

    settings: dict[str, Any] = field(default_factory=dict)
    now: float = 0.0
    ended: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = StepEngine(SimulatorConfig(**self.settings), lambda: self.now)

    def submit(self, rid: str, prompt: int, new: int, tokens: int | None = None, **more: Any) -> Sequence:
        sequence = Sequence(rid, prompt, new, new if tokens is None else tokens, self.ended.append, **more)
        self.engine.submit(sequence)
        return sequence

    def ids(self, rid: str, *ids: int, new: int = 2) -> Sequence:
        """A request whose ids are known, run to its end."""
        sequence = self.submit(rid, len(ids), new, input_ids=ids)
        self.run()
        return sequence

    def run(self, until: float = float("inf")) -> None:
        while (due := self.engine.due()) is not None and due <= until:
            self.now = max(self.now, due)
            self.engine.advance()
            load = self.engine.load()
            assert load.used_tokens + load.cached_tokens <= self.settings["max_total_tokens"]
        self.now = until if until != float("inf") else self.now

    def running(self) -> list[str]:
        return [one.rid for one in self.engine.running]


def even(**settings: Any) -> World:
    return World(EVEN | settings)


def test_a_running_request_holds_a_share_of_what_it_may_still_generate() -> None:
    """1000 - 10 used - 0.7 x 500 reserved leaves 640: 500 + 10 + 1 fit, and then 129 are left."""
    world = even()
    world.submit("a", 10, 500)
    world.submit("b", 10, 500)
    world.submit("c", 10, 500)
    world.submit("d", 10, 100)  # would fit, but stands behind c
    world.run(2.5)
    assert (world.running(), len(world.engine.waiting)) == (["a", "b"], 2)


def test_a_request_that_ignores_the_end_token_holds_all_of_it() -> None:
    """As observed: ten requests of up to 1500 new tokens in a pool of 4096 ran two at a time, eight waiting."""
    world = even(max_total_tokens=4096)
    for number in range(10):
        world.submit(f"{number}.", 5, 1500, 200, ignore_eos=True)
    world.run(50)
    assert (world.running(), len(world.engine.waiting)) == (["0.", "1."], 8)


def test_no_more_than_4096_new_tokens_are_held_for_a_request() -> None:
    world = even(max_total_tokens=20_000, context_length=30_000)
    for number in range(4):
        world.submit(f"{number}.", 10, 15_000, 100)
    world.run(10.5)
    # 20,000 - 3 x 4,096 x 0.7 leaves room for a fourth; by what they may generate, not even a second would fit.
    assert len(world.running()) == 4


def test_more_run_later_since_the_ratio_falls_and_it_starts_again_when_idle() -> None:
    world = even(max_total_tokens=10_000)
    world.submit("a", 10, 3000, 1000)
    world.run(1)
    first = world.engine.load().new_token_ratio
    world.run(301)
    assert first == pytest.approx(0.7, abs=0.002)
    assert world.engine.load().new_token_ratio == pytest.approx(0.7 * (1 - 0.86 / 2), abs=0.002)
    world.run(900)
    assert world.engine.load().new_token_ratio == pytest.approx(0.7 * 0.14)
    world.run()
    assert world.engine.load().new_token_ratio == 0.7


def test_a_full_pool_retracts_the_least_output_and_keeps_its_ids() -> None:
    world = even(max_total_tokens=400, schedule_conservativeness=0.1)
    old = world.submit("old", 50, 290)
    world.run(30)
    young = world.submit("young", 60, 220)
    world.run(170)
    # 110 prompt tokens and the generated ones fill the pool; the younger one gives way, and its ids stay.
    assert (young.num_retractions, old.num_retractions) == (1, 0)
    assert world.running() == ["old"]
    assert world.engine.load().retracted == 1
    kept = young.generated_tokens
    assert 0 < kept < 220
    world.run()
    assert [(one.rid, one.end) for one in world.ended] == [("old", End.FINISHED), ("young", End.FINISHED)]
    assert young.generated_tokens == 220
    # A prefill over prompt and output gives one token, the steps after it the rest.
    assert young.ended_at == old.ended_at + 1 + (220 - kept - 1)


def test_what_a_request_has_by_now_grows_by_one_a_step_and_stays_when_it_is_retracted() -> None:
    world = World(EVEN)
    one = world.submit("one", 10, 20)
    found = []
    for now in range(6):
        world.run(float(now))
        found.append(world.engine.generated(one))
    assert found == [0, 1, 2, 3, 4, 5]
    world.engine.hold("test", retract=True)
    world.run(6.0)
    assert (one in world.engine.waiting, world.engine.generated(one)) == (True, 6)
    world.engine.release("test")
    world.run(7.0)
    assert world.engine.generated(one) == 7  # of the prefill over prompt and ids


def test_a_retraction_raises_the_ratio_to_what_the_others_have_used() -> None:
    world = even(max_total_tokens=400, schedule_conservativeness=0.1)
    world.submit("old", 50, 290)
    world.run(30)
    young = world.submit("young", 60, 220)
    while not young.num_retractions:
        world.run(world.now + 1)
    generated = world.engine.load().used_tokens - 50 - 1
    assert world.engine.load().new_token_ratio == pytest.approx((generated + 1 + 20) / 291, abs=0.01)


def test_a_retracted_request_can_be_aborted_and_still_has_its_ids() -> None:
    world = even(max_total_tokens=400, schedule_conservativeness=0.1)
    world.submit("old", 50, 290)
    world.run(30)
    young = world.submit("young", 60, 220)
    while not young.num_retractions:
        world.run(world.now + 1)
    world.engine.abort("young")
    assert (young.end, young.generated_tokens > 0) == (End.ABORTED_WAITING, True)


def test_the_last_chunk_of_a_long_prompt_leaves_room_for_the_next_prompts() -> None:
    world = even(chunked_prefill_size=100)
    long = world.submit("long", 250, 5)
    short = world.submit("short", 20, 5)
    large = world.submit("large", 60, 5)  # of which 30 fit beside them
    world.run(1.5)
    assert world.running() == ["long"]
    world.run()
    assert [one.first_token_at for one in (long, short, large)] == [3, 3, 4]
    assert [one.ended_at for one in (long, short, large)] == [8, 8, 8]


def test_only_one_prompt_is_chunked_at_a_time() -> None:
    world = even(chunked_prefill_size=100, prefill_tokens_per_second=100.0, prefill_base_seconds=0.0)
    first = world.submit("first", 150, 1)
    second = world.submit("second", 150, 1)
    world.run()
    # 100 of the first; 50 of the first and 50 of the second; 100 of the second.
    assert (first.first_token_at, second.first_token_at) == (2, 3)


def test_decoding_waits_for_a_prefill() -> None:
    world = even(chunked_prefill_size=100)
    one = world.submit("a", 10, 3)
    world.submit("long", 500, 3)
    world.run()
    assert (one.first_token_at, one.ended_at) == (1, 1 + 5 + 2)


def test_a_repeated_prompt_is_cached_but_for_its_last_token() -> None:
    """As recorded: 4 of 5 when the prompt comes again, 5 of 6 when one more id follows."""
    world = even()
    cached = [world.ids("a", 10, 20, 30, 40, 50).cached_tokens, world.ids("b", 10, 20, 30, 40, 50).cached_tokens]
    cached += [world.ids(f"{last}", 10, 20, 30, 40, 50, last).cached_tokens for last in (1, 2)]
    cached += [world.ids("c", 10, 99).cached_tokens, world.ids("d", 99, 10).cached_tokens]
    assert cached == [0, 4, 5, 5, 1, 0]


def test_a_cached_prompt_is_found_while_its_first_request_still_runs() -> None:
    world = even()
    ids = tuple(range(1, 101))
    world.submit("a", 100, 50, input_ids=ids)
    world.run(2.5)
    second = world.submit("b", 100, 50, input_ids=ids)
    world.run(3.5)
    assert second.cached_tokens == 99
    assert world.engine.load().used_tokens < 100 + 2 * 5  # the prompt is held once
    world.run()
    assert world.engine.load().used_tokens == 0


def test_without_a_prefix_cache_nothing_is_shared_or_left() -> None:
    world = even(prefix_cache=False)
    assert [world.ids(rid, 1, 2, 3).cached_tokens for rid in ("a", "b")] == [0, 0]
    assert world.engine.load().cached_tokens == 0


def test_the_least_recently_used_goes_first_and_never_what_is_in_use() -> None:
    world = even(max_total_tokens=300)
    old, new = tuple(range(1000, 1080)), tuple(range(2000, 2080))
    world.ids("old", *old)
    world.ids("new", *new)
    world.ids("new again", *new)
    world.ids("third", *range(3000, 3140))  # needs the room of one of them
    assert world.ids("new", *new).cached_tokens == 79
    assert world.ids("old", *old).cached_tokens == 0


def test_a_flush_empties_the_cache_of_an_idle_server_only() -> None:
    world = even()
    world.ids("a", 1, 2, 3)
    world.submit("b", 3, 5, input_ids=(1, 2, 3))
    assert not world.engine.flush()
    world.run()
    assert world.engine.flush()
    assert world.engine.load().cached_tokens == 0
    assert world.ids("c", 1, 2, 3).cached_tokens == 0


def test_what_is_held_stands_still_and_goes_on() -> None:
    world = even()
    one = world.submit("a", 10, 10)
    world.run(3.5)
    world.engine.hold("pause")
    waiting = world.submit("b", 10, 1)
    world.run(99.5)
    assert (world.running(), len(world.engine.waiting)) == (["a"], 1)
    world.engine.release("pause")
    world.run()
    assert (one.num_retractions, one.generated_tokens, waiting.generated_tokens) == (0, 10, 1)
    # Four tokens by step 4, a prefill for the other, six more steps.
    assert one.ended_at == 99.5 + 1 + 6


def test_what_is_held_by_two_waits_for_both() -> None:
    world = even()
    world.engine.hold("pause")
    world.engine.hold("frozen")
    world.submit("a", 10, 1)
    world.engine.release("pause")
    assert world.engine.due() is None
    world.engine.release("frozen")
    assert world.engine.due() is not None


def test_a_hold_with_retraction_sends_all_back_and_keeps_their_ids() -> None:
    world = even()
    one = world.submit("a", 10, 10)
    world.run(3.5)
    world.engine.hold("pause", retract=True)
    world.run(10)
    assert (world.running(), len(world.engine.waiting), one.generated_tokens) == ([], 1, 4)
    assert world.engine.load().used_tokens == 0
    world.engine.release("pause")
    world.run()
    assert (one.num_retractions, one.generated_tokens, one.ended_at) == (1, 10, 10 + 1 + 5)


def test_a_held_request_can_be_aborted() -> None:
    world = even()
    one = world.submit("a", 10, 10)
    world.run(3.5)
    world.engine.hold("pause")
    world.run(5)
    world.engine.abort("a")
    assert (one.end, one.generated_tokens) == (End.ABORTED, 4)


def test_a_slowed_server_takes_longer_for_each_step() -> None:
    world = even()
    world.engine.extra_step_seconds = 0.5
    assert world.ids("a", 1, 2, new=4).ended_at == 4 * 1.5


def test_a_request_that_is_retracted_into_a_full_queue_is_refused() -> None:
    world = even(max_total_tokens=400, schedule_conservativeness=0.1, max_queued_requests=1)
    world.submit("old", 50, 290)
    world.run(30)
    young = world.submit("young", 60, 220)
    world.run(100)
    world.submit("waiting", 100, 300)
    world.run()
    assert (young.end, young.num_retractions) == (End.QUEUE_FULL, 1)


class Kimi(World):
    """The preset kimi-k2.5-8x, with callers who ask again as soon as they have their answer."""

    def __init__(self) -> None:
        super().__init__(dict(PRESETS["kimi-k2.5-8x"]))
        self.random = random.Random(1)

    def closed_loop(self, lengths: Lognormal, max_new_tokens: int, hours: float) -> None:
        """150 requests in flight, with prompts of 500 tokens."""
        end = hours * 3600
        in_flight = 0
        while self.now < end:
            for _ in range(in_flight, 150):
                tokens = min(round(lengths.at(self.random.random())), max_new_tokens)
                self.submit("", 500, max_new_tokens, max(tokens, 1))
            done = len(self.ended)
            self.now = max(self.now, self.engine.due() or end)
            self.engine.advance()
            in_flight = 150 - (len(self.ended) - done)


def test_forty_requests_that_hold_4000_tokens_decode_at_17_tokens_a_second_each() -> None:
    world = Kimi()
    requests = [world.submit(f"{number}.", 3_900, 100) for number in range(40)]
    world.run()
    for one in requests:
        assert one.first_token_at is not None
    last_first = max(one.first_token_at or 0.0 for one in requests)
    assert 99 / (requests[-1].ended_at - last_first) == pytest.approx(17, abs=0.25)


def test_150_short_requests_decode_at_9_to_10_tokens_a_second_each() -> None:
    world = Kimi()
    world.closed_loop(Lognormal(600, 0.5), 2048, hours=0.5)
    steady = [one for one in world.ended if one.ended_at > 600 and one.generated_tokens > 100]
    rates = [one.generated_tokens / (one.ended_at - (one.first_token_at or 0.0)) for one in steady]
    assert 9.0 < sum(rates) / len(rates) < 10.0
    assert sum(one.num_retractions for one in steady) == 0


def test_150_long_requests_fill_the_pool_and_wait_for_it() -> None:
    """As measured on the real one: 40 to 72 running, 79 to 115 waiting, 680 to 930 tokens/s."""
    world = Kimi()
    world.closed_loop(Lognormal(3_800, 0.7), 10_240, hours=2)
    load = world.engine.load()
    assert 30 < load.running < 75
    assert load.running + load.waiting == 150
    assert load.used_tokens > 0.8 * 159_277
    assert world.engine.retractions > 0
    steady = [one for one in world.ended if one.ended_at > 3600]
    assert 680 < sum(one.generated_tokens for one in steady) / 3600 < 930
