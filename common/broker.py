"""The queue: names of tasks and queues, the Celery application, and how messages are sent.

A message is a doorbell: it names a dataset and some indices, never token ids. The ledger says what they are worth.
"""

import contextlib
from base64 import b64decode
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import redis
from celery import Celery
from kombu import Queue
from kombu.serialization import disable_insecure_serializers

from common.records import Index
from common.settings import Settings

GENERATE, KEEP, FEED, RESTORE = "generate", "keep", "feed", "restore"
GENERATE_QUEUE, CONTROL_QUEUE, PRODUCE_QUEUE = "generate", "control", "produce"
# A message held unclaimed for this long is offered to the other workers as well; the ledger lets one of them have it.
# Messages are acked at the claim, so no answer, however long, is ever measured against this. It is also how long the
# samples of a message that a killed worker held unclaimed wait: with 60 s they were what a whole run waited for.
VISIBILITY_SECONDS = 10
KEEP_SECONDS = 1.0
_PUBLISH_BATCH = 200


def make_celery(name: str, settings: Settings) -> Celery:
    """The Celery application that workers, control, Flower and senders share: its broker settings must be the same."""
    disable_insecure_serializers(allowed=["json"])
    app = Celery(name, broker=_broker_url(settings.redis_url), set_as_current=False)
    app.conf.update(
        accept_content=["json"],
        task_serializer="json",
        event_serializer="json",
        result_backend=None,
        task_ignore_result=True,
        task_queues=[Queue(queue) for queue in (GENERATE_QUEUE, CONTROL_QUEUE, PRODUCE_QUEUE)],
        task_routes={
            GENERATE: {"queue": GENERATE_QUEUE},
            KEEP: {"queue": CONTROL_QUEUE},
            FEED: {"queue": PRODUCE_QUEUE},
            RESTORE: {"queue": PRODUCE_QUEUE},
        },
        task_create_missing_queues=False,
        task_default_queue=CONTROL_QUEUE,
        broker_transport_options={
            "visibility_timeout": VISIBILITY_SECONDS,
            # The defaults sweep every 10 s at most; a killed worker's messages were then seen to take 86 s to return.
            "unacked_restore_interval": 5,
            "unacked_restore_throttle": 1,
            # Whoever dies within its sweep keeps the others from theirs for so long; the default is 300 s.
            "unacked_mutex_expire": VISIBILITY_SECONDS,
            "priority_steps": [0],
            "socket_timeout": 30,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
        },
        visibility_timeout=VISIBILITY_SECONDS,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        # An answer under way outlives a broken connection; it is guarded by its lease, not by its message.
        worker_cancel_long_running_tasks_on_connection_loss=False,
        # Would set the prefetch of our pool, which has no processes, to 0: no limit.
        worker_enable_prefetch_count_reduction=False,
        # A Redis that is full refuses what kombu writes at each message; without this the worker would end by it.
        broker_channel_error_retry=True,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_send_task_events=True,
        task_send_sent_event=False,
        # The keeper's clock. In memory: a tick missed while control was down is not made up for.
        beat_scheduler="common.beat:Steady",
        beat_schedule={"keep": {"task": KEEP, "schedule": KEEP_SECONDS, "options": {"expires": 5 * KEEP_SECONDS}}},
    )
    return app


def _broker_url(url: str) -> str:
    """redis-py's unix://path as kombu spells it."""
    return f"redis+socket://{url.removeprefix('unix://')}" if url.startswith("unix://") else url


class Sender:
    """Sends messages by name, many to one round trip."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def generate(self, messages: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Send doorbells, each for some indices of one dataset, in this order.

        A message that is lost on the way is found by the keeper: its samples stay queued in the ledger.
        """
        with self._app.producer_pool.acquire(block=True) as producer:
            for start in range(0, len(messages), _PUBLISH_BATCH):
                with producer.batch(_PUBLISH_BATCH):  # type: ignore[attr-defined]
                    for dataset, indices in messages[start : start + _PUBLISH_BATCH]:
                        self._app.send_task(
                            GENERATE,
                            args=[dataset, list(indices)],
                            argsrepr=describe(dataset, indices),
                            producer=producer,
                        )

    def keep(self) -> None:
        """Ask for a tick of the keeper now, beside those of every second."""
        self._app.send_task(KEEP, expires=5 * KEEP_SECONDS)

    def feed(self, dataset: str) -> None:
        """Ask for the next rows of `dataset`."""
        self._app.send_task(FEED, args=[dataset], argsrepr=dataset)

    def restore(self) -> None:
        """Ask for the books of what Redis has forgotten to be built anew."""
        self._app.send_task(RESTORE)


def describe(dataset: str, indices: Sequence[int]) -> str:
    """A message as a person reads it in Flower: `B1_glaive 1200-1215`, or `B1_glaive 7, 9, 12`."""
    first, last = indices[0], indices[-1]
    if len(indices) == 1:
        return f"{dataset} {first}"
    if list(indices) == list(range(first, last + 1)):
        return f"{dataset} {first}-{last}"
    return f"{dataset} {', '.join(map(str, indices))}"


def message_arguments(body: Any) -> tuple[str, list[int]]:
    """The dataset and indices of a generate message's body; raises ValueError on anything else."""
    match body:
        case [arguments, *_]:
            # An index that Redis refuses would be tried again for ever, and hold up all that come behind it.
            with contextlib.suppress(msgspec.ValidationError):
                return msgspec.convert(arguments, tuple[str, list[Index]])
    raise ValueError("not a generate message")


def pending_samples(client: redis.Redis) -> dict[str, set[int]]:
    """By dataset, the indices that are in a message now: in the queue, or held unacked by a worker.

    Reads what kombu keeps in Redis: the list `generate` of messages, and the hash `unacked` of those not acked yet.
    Takes 5 us a message.
    """
    messages = cast("list[bytes]", client.lrange(GENERATE_QUEUE, 0, -1))
    held = cast("list[bytes]", client.hvals("unacked"))
    found: dict[str, set[int]] = {}
    for raw in (*messages, *(_held_message(value) for value in held)):
        try:
            dataset, indices = message_arguments(msgspec.json.decode(b64decode(_envelope(raw).body)))
        except (ValueError, msgspec.MsgspecError):
            continue  # another task's message
        found.setdefault(dataset, set()).update(indices)
    return found


def forget_messages(client: redis.Redis) -> None:
    """Drop all messages, also those that consumers hold unacked; only where no consumer lives.

    They are doorbells: the keeper sends what is queued again within 3 s, where kombu would let what the dead held
    wait for its visibility timeout, and for a sweep.
    """
    client.delete(GENERATE_QUEUE, CONTROL_QUEUE, PRODUCE_QUEUE, "unacked", "unacked_index", "unacked_mutex")


def waiting_messages(client: redis.Redis, queue: str) -> int:
    """How many messages wait in `queue` for a worker."""
    return client.llen(queue)


class _Envelope(msgspec.Struct):
    body: str


_envelope = msgspec.json.Decoder(_Envelope).decode
_held = msgspec.json.Decoder(tuple[msgspec.Raw, str, str]).decode


def _held_message(value: bytes) -> bytes:
    """The message in an entry of `unacked`: [message, exchange, routing key]."""
    try:
        return bytes(_held(value)[0])
    except msgspec.MsgspecError:
        return b""
