"""What kombu makes of our broker settings, on a real Redis."""

from pathlib import Path
from typing import Any, cast

from common.broker import (
    CONTROL_QUEUE,
    GENERATE_QUEUE,
    KEEP,
    PRODUCE_QUEUE,
    VISIBILITY_SECONDS,
    Sender,
    make_celery,
    pending_samples,
    waiting_messages,
)
from common.ledger import Ledger
from common.sections import TokenizerSettings
from common.settings import Settings
from tests.conftest import wait_until


def test_a_sweep_that_was_killed_half_way_keeps_the_others_from_theirs_for_seconds(
    valkey: str, ledger: Ledger, tmp_path: Path
) -> None:
    """The worker that dies within kombu's sweep leaves its lock behind; what it held must not wait 300 s for it."""
    client = ledger.redis
    settings = Settings(output=tmp_path, redis=valkey, tokenizer=TokenizerSettings(path=tmp_path))
    with make_celery("test", settings) as app, app.connection() as of_the_dead, app.connection() as connection:
        Sender(app).generate([("A", [7])])
        held, channel = cast("Any", of_the_dead.default_channel), cast("Any", connection.default_channel)
        message = held.basic_get(GENERATE_QUEUE)
        held.qos.append(message, message.delivery_tag)
        client.zadd("unacked_index", {message.delivery_tag: 1.0})  # long ago
        client.set(channel.unacked_mutex_key, "of the dead", px=channel.unacked_mutex_expire * 1000)
        assert client.pttl(channel.unacked_mutex_key) <= VISIBILITY_SECONDS * 1000
        client.pexpire(channel.unacked_mutex_key, 3_600_000)  # not before it is looked at, however slow this machine is
        channel.qos.restore_visible(interval=1)
        assert (client.hlen("unacked"), client.llen(GENERATE_QUEUE)) == (1, 0)
        client.pexpire(channel.unacked_mutex_key, 1)
        wait_until("the lock is gone", lambda: not client.exists(channel.unacked_mutex_key))
        channel.qos.restore_visible(interval=1)
        assert (client.hlen("unacked"), client.llen(GENERATE_QUEUE)) == (0, 1)


def test_a_message_needs_no_binding(valkey: str, ledger: Ledger, tmp_path: Path) -> None:
    """Bindings that someone deleted drop other people's messages in silence; ours go straight to their queues."""
    client = ledger.redis
    settings = Settings(output=tmp_path, redis=valkey, tokenizer=TokenizerSettings(path=tmp_path))
    with make_celery("test", settings) as app, app.connection() as of_a_worker:
        sender = Sender(app)
        sender.generate([("A", [7])])
        held = cast("Any", of_a_worker.default_channel)
        message = held.basic_get(GENERATE_QUEUE)
        held.qos.append(message, message.delivery_tag)
        for key in client.scan_iter("_kombu.binding*"):
            client.delete(key)
        # Also one that is taken back from a worker that died.
        client.zadd("unacked_index", {message.delivery_tag: 1.0})
        held.qos.restore_visible(interval=1)
        sender.generate([("A", [8])])
        sender.feed("A")
        app.send_task(KEEP, queue=CONTROL_QUEUE)
        assert pending_samples(client) == {"A": {7, 8}}
        assert [waiting_messages(client, queue) for queue in (GENERATE_QUEUE, PRODUCE_QUEUE, CONTROL_QUEUE)] == [
            2,
            1,
            1,
        ]
