"""What kombu makes of our broker settings, on a real Redis."""

from base64 import b64encode
from pathlib import Path
from typing import Any, cast

import msgspec
import redis

from common.broker import GENERATE_QUEUE, VISIBILITY_SECONDS, make_celery
from common.settings import Settings, TokenizerSettings
from tests.conftest import wait_until


def test_a_sweep_that_was_killed_half_way_keeps_the_others_from_theirs_for_seconds(valkey: str, tmp_path: Path) -> None:
    """The worker that dies within kombu's sweep leaves its lock behind; what it held must not wait 300 s for it."""
    client = redis.Redis.from_url(valkey)
    with (
        make_celery("test", Settings(output=tmp_path, redis=valkey, tokenizer=TokenizerSettings(path=tmp_path))) as app,
        app.connection() as connection,
    ):
        channel = cast("Any", connection.default_channel)
        app.amqp.queues[GENERATE_QUEUE](channel).declare()
        # A message that a worker held unacked long ago, as kombu keeps it.
        message = {"body": b64encode(b"{}").decode(), "headers": {}, "properties": {"delivery_tag": "t"}}
        client.hset("unacked", "t", msgspec.json.encode([message, "generate", "generate"]))
        client.zadd("unacked_index", {"t": 1.0})
        client.set(channel.unacked_mutex_key, "of the dead", px=channel.unacked_mutex_expire * 1000)
        assert cast("int", client.pttl(channel.unacked_mutex_key)) <= VISIBILITY_SECONDS * 1000
        channel.qos.restore_visible(interval=1)
        assert client.hlen("unacked") == 1
        client.pexpire(channel.unacked_mutex_key, 1)
        wait_until("the lock is gone", lambda: not client.exists(channel.unacked_mutex_key))
        channel.qos.restore_visible(interval=1)
        assert client.hlen("unacked") == 0
        assert client.llen("generate") == 1
