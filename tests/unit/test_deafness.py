"""A worker that is given no messages although some wait: when it connects anew, and when it ends."""

from workers.service import Deafness


def test_it_connects_anew_once_and_then_ends() -> None:
    deaf = Deafness(60.0)
    told = [deaf.told(True, now) for now in (0.0, 30.0, 59.9, 60.0, 62.0, 119.0, 120.0)]
    assert told == [None, None, None, "reconnect", None, None, "end"]


def test_one_message_begins_the_time_anew() -> None:
    deaf = Deafness(60.0)
    assert [deaf.told(True, 0.0), deaf.told(False, 59.0), deaf.told(True, 61.0), deaf.told(True, 120.0)] == [None] * 4
    assert deaf.told(True, 121.0) == "reconnect"
    assert [deaf.told(False, 122.0), deaf.told(True, 130.0), deaf.told(True, 190.0)] == [None, None, "reconnect"]


def test_a_worker_with_nothing_to_take_is_not_deaf() -> None:
    deaf = Deafness(60.0)
    assert [deaf.told(False, now) for now in (0.0, 1000.0, 2000.0)] == [None] * 3
