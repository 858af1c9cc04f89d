"""The decode clock: what one running request has decoded, from whatever the server tells."""

import pytest

from workers.governor import Load
from workers.sglang.progress import NOMINAL_TOKENS_PER_SECOND, DecodeClock


def counted(tokens: float, running: int = 10, rate: float | None = None) -> Load:
    return Load(running=running, waiting=0, generated_tokens=tokens, tokens_per_second=rate)


def rated(tokens_per_second: float, running: int = 10, age_seconds: float = 0.0) -> Load:
    return Load(running=running, waiting=0, tokens_per_second=tokens_per_second, age_seconds=age_seconds)


class TestCounter:
    def test_is_divided_by_those_that_run(self) -> None:
        clock = DecodeClock(0.0)
        clock.advance(0.0, counted(1000.0))
        clock.advance(2.0, counted(1400.0))
        assert clock.tokens == 40.0
        clock.advance(4.0, counted(1700.0, running=20))
        assert clock.tokens == 40.0 + 300 / 15
        assert clock.tokens_per_second == 10.0

    def test_stops_in_a_stall_whatever_the_rate_says(self) -> None:
        clock = DecodeClock(0.0)
        clock.advance(0.0, counted(1000.0, rate=170.0))
        clock.advance(2.0, counted(1340.0, rate=170.0))
        for second in range(4, 300, 2):
            clock.advance(float(second), counted(1340.0, rate=170.0))
        assert clock.tokens == 34.0

    def test_a_restart_is_no_step_back(self) -> None:
        clock = DecodeClock(0.0)
        clock.advance(0.0, counted(9000.0))
        clock.advance(2.0, counted(9400.0))
        clock.advance(4.0, counted(100.0))
        assert clock.tokens >= 40.0
        before = clock.tokens
        clock.advance(6.0, counted(500.0))
        assert clock.tokens == before + 40.0

    def test_covers_polls_that_told_nothing(self) -> None:
        clock = DecodeClock(0.0)
        clock.advance(0.0, counted(1000.0))
        clock.advance(2.0, None)
        assert clock.tokens == 2 * NOMINAL_TOKENS_PER_SECOND
        clock.advance(4.0, counted(2000.0))
        assert clock.tokens == 100.0

    def test_stands_until_the_truth_has_caught_up(self) -> None:
        clock = DecodeClock(0.0)
        clock.advance(0.0, counted(1000.0))
        clock.advance(2.0, None)
        clock.advance(4.0, counted(1100.0))  # 10 tokens, where 34 were assumed
        assert clock.tokens == 34.0
        clock.advance(6.0, counted(1400.0))
        assert clock.tokens == 40.0

    def test_between_counters_it_goes_by_the_rate(self) -> None:
        clock = DecodeClock(0.0)
        clock.advance(0.0, counted(1000.0))
        clock.advance(2.0, rated(200.0))
        assert clock.tokens == 40.0
        clock.advance(4.0, counted(1900.0))
        assert clock.tokens == 90.0


class TestRate:
    def test_is_divided_by_those_that_run(self) -> None:
        clock = DecodeClock(0.0)
        clock.advance(2.0, rated(170.0))
        assert clock.tokens == 34.0
        clock.advance(4.0, rated(300.0, running=30))
        assert clock.tokens == 54.0

    def test_stops_when_nothing_runs(self) -> None:
        clock = DecodeClock(0.0)
        clock.advance(2.0, rated(170.0))
        clock.advance(100.0, Load(running=0, waiting=5, tokens_per_second=170.0))
        assert clock.tokens == 34.0

    def test_stops_when_the_figures_stand_still(self) -> None:
        clock = DecodeClock(0.0)
        clock.advance(2.0, rated(170.0))
        clock.advance(100.0, rated(170.0, age_seconds=98.0))
        assert clock.tokens == 34.0


class TestSeconds:
    def test_at_a_nominal_speed(self) -> None:
        clock = DecodeClock(100.0, nominal_tokens_per_second=20.0)
        clock.advance(110.0, None)
        assert clock.tokens == 200.0

    def test_at_the_speed_of_our_own_answers(self) -> None:
        clock = DecodeClock(0.0)
        for _ in range(10):
            clock.answered(600, 20.0)
        clock.advance(10.0, None)
        clock.advance(20.0, Load(running=5, waiting=0))  # /get_load: no rate and no counter
        assert clock.tokens == pytest.approx(600.0)


class TestBetweenLooks:
    def test_goes_on_at_the_last_speed(self) -> None:
        clock = DecodeClock(0.0)
        clock.advance(2.0, rated(170.0))
        assert clock.at(3.0) == 51.0
        assert clock.tokens == 51.0

    def test_but_not_for_long(self) -> None:
        clock = DecodeClock(0.0)
        clock.advance(2.0, rated(170.0))
        assert clock.at(1000.0) == 34.0 + 4 * 17

    def test_never_backwards(self) -> None:
        clock = DecodeClock(0.0)
        clock.advance(2.0, rated(170.0))
        ahead = clock.at(4.0)
        clock.advance(4.0, rated(0.0))
        assert clock.tokens == clock.at(5.0) == clock.at(3.0) == ahead
