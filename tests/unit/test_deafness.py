"""A worker that is given no messages although some wait: when it connects anew, and when it ends."""

from collections.abc import Iterable

from workers.service import Deafness


def told(deaf: Deafness, looks: Iterable[tuple[float, bool]]) -> dict[float, str]:
    """What it said at which second; each look is a second, and whether the worker starves."""
    return {now: said for now, starves in looks if (said := deaf.told(starves, now)) is not None}


def every_two_seconds(first: int, last: int) -> list[tuple[float, bool]]:
    return [(float(now), True) for now in range(first, last + 1, 2)]


def test_it_connects_anew_once_and_then_ends() -> None:
    assert told(Deafness(60.0), every_two_seconds(0, 130)) == {60.0: "reconnect", 120.0: "end"}


def test_one_message_begins_the_time_anew() -> None:
    deaf = Deafness(60.0)
    assert told(deaf, [*every_two_seconds(0, 58), (59.0, False)]) == {}
    assert told(deaf, [*every_two_seconds(60, 130), (131.0, False)]) == {120.0: "reconnect"}
    assert told(deaf, every_two_seconds(140, 200)) == {200.0: "reconnect"}


def test_a_time_in_which_all_stood_still_is_not_deafness() -> None:
    deaf = Deafness(60.0)
    assert told(deaf, [(0.0, True), (180.0, True), (3600.0, True)]) == {}
    assert told(deaf, every_two_seconds(3602, 3800)) == {3652.0: "reconnect", 3712.0: "end", 3772.0: "end"}


def test_a_worker_with_nothing_to_take_is_not_deaf() -> None:
    assert told(Deafness(60.0), [(now, False) for now in (0.0, 1000.0, 2000.0)]) == {}
