"""How many messages a worker holds, also after its connection was lost."""

from types import SimpleNamespace
from typing import Any, cast

from kombu.common import QoS

from workers.pool import FewMessages


def test_a_connection_that_is_made_anew_holds_as_many_messages_as_the_slots_ask_for() -> None:
    pool = SimpleNamespace(slots=0)
    consumer: Any = SimpleNamespace(pool=pool)
    FewMessages(cast("Any", consumer))
    for _ in range(2):  # as Celery does whenever it connects
        consumer.qos = QoS(lambda **_: None, consumer.initial_prefetch_count)
        for slots, held in ((10, 2), (128, 4), (512, 8), (100, 3)):
            pool.on_slots(slots)
            assert (consumer.qos.value, consumer.initial_prefetch_count) == (held, held)
