"""The law of the governor: single steps, then minutes of the simulator's engine in virtual time."""

import functools
import random
from typing import Any

import pytest

from tests.benchmarks.virtual import Request, Worker, World
from workers.governor import Governor, Load
from workers.sglang.simulator.config import SimulatorConfig

POOL = 159_277


def governor(limit: int = 0, **options: Any) -> Governor:
    """One that has just begun; or one with just this limit, whose start is over."""
    settings = {"capacity_tokens": POOL, "max_new_tokens": 10_240, "phase": 0.0} | options
    made = Governor(**settings)
    if limit:
        made.set_bounds(1, limit)
        polls(made, Load(running=limit, waiting=0), 20)
        made.set_bounds(settings.get("least", 1), settings.get("most"))
        polls(made, Load(running=1000, waiting=1), 2, in_flight=limit - 1)
        assert made.limit == limit
    return made


def polls(made: Governor, load: Load | None, times: int, in_flight: int | None = None, workers: int = 1) -> int:
    for _ in range(times):
        made.polled(load, made.limit if in_flight is None else in_flight, workers)
    return made.limit


def answer(made: Governor, times: int = 30, prompt_tokens: int = 500, completion_tokens: int = 4_000) -> Governor:
    for _ in range(times):
        made.answered(prompt_tokens, completion_tokens)
    return made


class TestStart:
    def test_begins_with_few(self) -> None:
        assert governor().limit == 3

    def test_begins_with_one_where_the_pool_holds_one(self) -> None:
        assert governor(capacity_tokens=12_000).limit == 1

    def test_grows_fast_while_nothing_has_waited_and_it_binds(self) -> None:
        made = governor()
        seen = [polls(made, Load(running=made.limit, waiting=0), 1) for _ in range(5)]
        assert seen == [4, 6, 10, 15, 22]
        assert made.why == "starting: 15 running, none waiting"

    def test_does_not_grow_before_anything_runs(self) -> None:
        made = governor()
        assert polls(made, Load(running=0, waiting=1), 4, in_flight=1) == 3

    def test_what_waits_at_one_poll_alone_has_just_come_and_does_not_end_the_fast_start(self) -> None:
        made = governor()
        for _ in range(4):
            polls(made, Load(running=made.limit, waiting=0), 2)
            before = made.limit
            assert polls(made, Load(running=before - 1, waiting=1), 1) == before
            assert made.why == f"starting: {before - 1} running, 1 waiting"
        assert made.limit > 60

    def test_the_fast_start_ends_when_something_waits(self) -> None:
        made = governor()
        polls(made, Load(running=30, waiting=1), 2)
        assert polls(made, Load(running=30, waiting=0), 1, in_flight=4) - 3 <= 1

    def test_not_above_what_the_pool_may_hold_while_no_answer_is_known(self) -> None:
        assert polls(governor(), Load(running=100, waiting=0), 40) == int(POOL / (10_240 / 8))


class TestSteering:
    def test_grows_only_when_the_limit_binds(self) -> None:
        made = governor(20)
        limit = made.limit
        assert polls(made, Load(running=20, waiting=0), 20, in_flight=limit - 1) == limit
        assert made.why == f"enough: {limit - 1} in flight, nothing is held back"
        assert polls(made, Load(running=20, waiting=0), 20) > limit

    def test_a_limit_that_was_reached_between_two_polls_binds(self) -> None:
        made = governor(20)
        limit = made.limit
        for _ in range(5):
            made.started(made.limit)
            made.polled(Load(running=20, waiting=0), made.limit - 2)
        assert made.limit > limit

    def test_shrinks_while_more_wait_than_wanted(self) -> None:
        made = governor(60)
        assert polls(made, Load(running=50, waiting=13), 1) == 55
        assert made.why == "shrinking: 13 waiting, 4 wanted"

    def test_cuts_from_what_is_in_flight(self) -> None:
        made = governor(60)
        assert polls(made, Load(running=26, waiting=5), 1, in_flight=31) == 30

    def test_does_not_wind_up(self) -> None:
        made = governor(20)
        assert polls(made, Load(running=100, waiting=0), 200, in_flight=20) <= 20 + 1 + 6

    def test_takes_its_share_of_a_correction(self) -> None:
        alone, one_of_four = governor(60), governor(60)
        polls(alone, Load(running=50, waiting=13), 1)
        polls(one_of_four, Load(running=200, waiting=52), 1)
        assert 60 - alone.limit == 5  # half of the excess of 10
        assert 60 - one_of_four.limit == 5  # half of a quarter of the excess of 40

    def test_at_the_wanted_queue_all_grow_alike_whatever_they_have(self) -> None:
        small, large = governor(2), governor(60)
        before = small.limit, large.limit
        for _ in range(21):  # 0.1 a poll; the queue is just short of what is wanted
            for made in (small, large):
                made.polled(Load(running=1000, waiting=15), made.limit)
        assert small.limit - before[0] == pytest.approx(large.limit - before[1], abs=2)

    @pytest.mark.parametrize(("completion_tokens", "polls_to_cut"), [(100, 1), (200, 1), (2_000, 10), (4_000, 20)])
    def test_goes_more_slowly_the_longer_answers_are(self, completion_tokens: int, polls_to_cut: int) -> None:
        made = answer(governor(60), completion_tokens=completion_tokens)
        made.set_bounds(1, 60)
        for _ in range(polls_to_cut):
            made.polled(Load(running=50, waiting=14), 60)
        assert made.limit == 55  # half of the excess of 10, after so many polls

    def test_a_timeout_cuts_a_tenth_of_what_is_in_flight(self) -> None:
        made = governor(60)
        made.timed_out(40)
        assert made.limit == 36

    def test_a_server_that_comes_back_is_begun_with_few(self) -> None:
        made = governor(60)
        made.refused()
        assert made.limit == 3
        assert polls(made, Load(running=3, waiting=0), 1) == 4


class TestBounds:
    def test_never_below_the_least(self) -> None:
        made = governor(least=8)
        assert made.limit == 8
        assert polls(made, Load(running=10, waiting=100), 50) == 8

    def test_one_at_least(self) -> None:
        assert polls(governor(20), Load(running=1, waiting=500), 200) == 1

    def test_never_above_the_most(self) -> None:
        made = governor(most=16, phase=0.9)
        assert polls(made, Load(running=30, waiting=0), 50) == 16
        assert made.why == "at the maximum of 16"

    def test_bounds_can_change(self) -> None:
        made = governor(40)
        made.set_bounds(1, 10)
        assert made.limit == 10

    @pytest.mark.parametrize(("least", "most"), [(0, None), (5, 4)])
    def test_bounds_without_sense(self, least: int, most: int) -> None:
        with pytest.raises(ValueError, match="makes no sense"):
            governor(least=least, most=most)

    def test_capped_by_what_answers_hold_of_the_pool(self) -> None:
        made = answer(governor())
        fill = 0.95 * POOL / (500 + 4_000 / 2)  # 60 requests
        assert polls(made, Load(running=500, waiting=0), 60) == int(2 * fill + 16)
        assert made.why == "at the cap: more would not fit the KV pool"

    def test_a_pool_that_the_figures_tell_counts(self) -> None:
        made = answer(governor(capacity_tokens=None))
        assert polls(made, Load(running=500, waiting=0, capacity_tokens=POOL // 2), 60) == int(0.95 * POOL / 2500 + 16)


class TestBadFigures:
    def test_one_poll_without_figures_changes_nothing(self) -> None:
        made = governor(40)
        assert polls(made, None, 2, in_flight=10) == made.limit >= 40

    def test_holds_what_it_had_while_there_are_none(self) -> None:
        made = governor(40)
        assert polls(made, None, 100) >= 40
        assert made.why == "held: the server tells nothing"

    def test_holds_no_less_than_what_runs(self) -> None:
        made = governor(60)
        polls(made, Load(running=50, waiting=60), 3)  # cut, to drain a queue
        assert made.limit < 50
        assert polls(made, None, 3, in_flight=55) == 55

    def test_held_at_most_at_its_part_of_the_pool(self) -> None:
        made = answer(governor(60))
        assert polls(made, None, 3, workers=4) == int(1.25 * 0.95 * POOL / 2500 / 4)

    def test_guesses_where_there_never_were_any(self) -> None:
        assert polls(governor(), None, 3, workers=4) == 8

    def test_then_goes_by_the_pool(self) -> None:
        made = governor()
        polls(made, None, 3)
        assert polls(answer(made), None, 100) == int(0.95 * POOL / 2500)
        assert made.why == "by the KV pool and the lengths of answers: the server tells nothing"

    @pytest.mark.parametrize("load", [Load(running=0, waiting=0), Load(running=10, waiting=1)])
    def test_figures_that_miss_our_calls_are_not_believed(self, load: Load) -> None:
        made = governor(40)
        limit = made.limit
        assert polls(made, load, 100) <= limit + 6
        assert made.why == "held: the server's figures miss our calls"

    def test_figures_that_are_zero_from_the_start_do_not_keep_it_small(self) -> None:
        assert polls(governor(), Load(running=0, waiting=0), 10) == 32

    def test_calls_too_short_to_be_seen_let_it_grow(self) -> None:
        made = governor(most=128)
        for _ in range(12):
            answer(made, 1000, completion_tokens=256)
            made.polled(Load(running=0, waiting=0), made.limit)
        assert made.limit == 128

    def test_stale_figures_hold_it(self) -> None:
        made = governor(40)
        limit = made.limit
        assert polls(made, Load(running=40, waiting=0, age_seconds=60.0), 100) == limit
        assert polls(made, Load(running=40, waiting=80, age_seconds=60.0), 100) == limit
        assert made.why == "held: the server's figures are 60 s old"


class TestInVirtualTime:
    """A server of one tenth of the size, so that minutes suffice."""

    @pytest.mark.parametrize("workers", [1, 4])
    def test_keeps_it_full_and_the_queue_short(self, workers: int) -> None:
        made, waiting, running = measured(world_of(workers))
        assert sum(made) > 0.97 * fixed_limit()
        assert waiting < 0.12 * running
        assert sum(made) ** 2 / (workers * sum(each * each for each in made)) > 0.95

    def test_begins_small_after_a_restart(self) -> None:
        world = world_of(1)
        (worker,) = world.workers
        world.run(300)
        in_flight = len(worker.in_flight)
        world.go_down(20)
        world.run(322)
        assert worker.lost == in_flight > 20
        assert len(worker.in_flight) <= 4
        world.run(360)
        assert len(worker.in_flight) > 20


def world_of(workers: int, limit: int | None = None) -> World:
    """So many governed workers, or one with a fixed limit."""
    config = SimulatorConfig(max_total_tokens=16_000, prefix_cache=False)
    world, draw = World(config, 1), random.Random(1)

    def source() -> Request:
        return Request(100, min(1_024, 1 + int(draw.expovariate(1 / 400))), 1_024)

    for _ in range(workers):
        made = None if limit else governor(capacity_tokens=16_000, max_new_tokens=1_024, phase=world.draw.random())
        Worker(world, source, limit=limit or 1, governor=made).start()
    return world


@functools.cache
def fixed_limit() -> int:
    """What a limit makes that always keeps some waiting."""
    made, waiting, _ = measured(world_of(1, 50))
    assert waiting > 5
    return sum(made)


def measured(world: World) -> tuple[list[int], float, float]:
    """Ten minutes after the first two: the tokens of each worker, and the means of those that wait and that run."""
    world.run(120)
    before = [worker.useful_tokens() for worker in world.workers]
    looks: list[Load] = []
    world.every(5.0, lambda: looks.append(world.load()))
    world.run(720)
    made = [worker.useful_tokens() - then for worker, then in zip(world.workers, before, strict=True)]
    return made, sum(look.waiting for look in looks) / len(looks), sum(look.running for look in looks) / len(looks)
