"""Steps that the tests of the feed share: a dataset A with its source, and what is queued of it."""

import json
from base64 import b64decode
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from common.broker import CONTROL_QUEUE, GENERATE_QUEUE, make_celery, waiting_messages
from common.ledger import DatasetState, Ledger, Settled
from common.ledger._keys import keys_of
from common.payload import Packer
from common.settings import Settings, load_settings
from producer.enqueue import register
from producer.feed import Feeder
from producer.sources import follow_sources, refuse_replaced
from tests.conftest import REPO
from tests.lines import record_line, write_segment

TOKENIZER = REPO / "examples" / "tokenizer"
VOCAB_SIZE = 4096
MAX_NEW_TOKENS = 64
# Any source that is read beyond what is wanted has rejects.
BAD = "x"
Row = dict[str, Any] | str
FACTS = dict.fromkeys(
    ("model_path", "weight_version", "tokenizer_sha256", "template_sha256", "chat_template_kwargs", "sampling_params")
)


class Feed:
    """A dataset A with its source, on an empty ledger that knows the model."""

    def __init__(self, folder: Path, redis_url: str, ledger: Ledger) -> None:
        self.source = folder / "a.jsonl"
        self.config = folder / "tokenmill.toml"
        self._redis_url = redis_url
        self.ledger = ledger
        self.configure()
        self.set_model()

    def configure(self, tokenizer: Path = TOKENIZER, more: str = "") -> None:
        self.config.write_text(
            f'output = "out"\nredis = "{self._redis_url}"\n[tokenizer]\npath = "{tokenizer}"\n'
            f"[sampling]\nmax_new_tokens = {MAX_NEW_TOKENS}\n"
            f'[[datasets]]\nname = "A"\npath = "a.jsonl"\n{more}\n'
        )

    def set_model(self, context_length: int | None = None) -> None:
        self.ledger.set_model({"vocab_size": VOCAB_SIZE, "context_length": context_length})

    @property
    def settings(self) -> Settings:
        return load_settings(self.config)

    @property
    def output(self) -> Path:
        return self.settings.output

    def write(self, *rows: Row) -> None:
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        self.source.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def register(self, *, room: int = 10**6, window: int = 1000) -> None:
        self.ledger.register(self.settings.datasets[0])
        self.admit(room=room, window=window)

    def admit(self, *, room: int = 10**6, window: int = 1000) -> None:
        self.ledger.admit("A", room=room, window=window, tokens_per_second=0)

    def feed(self) -> int:
        """One turn of a feeder of its own, as if the process had just been started."""
        app = make_celery("test", self.settings)
        with closing(app), closing(Ledger.connect(self._redis_url)) as ledger:
            return Feeder(self.settings, app, ledger).feed("A")

    # What is queued

    def state(self) -> DatasetState:
        return self.ledger.snapshot("A")

    def queued(self) -> list[int]:
        return sorted(self.ledger.unsent("A", 2**20))

    def prompts(self) -> dict[int, list[int]]:
        """The ids that wait in Redis, by index."""
        packer = Packer()
        payloads = cast("dict[bytes, bytes]", self.ledger.redis.hgetall(keys_of("A").payloads))
        return {int(index): json.loads(packer.unpack(packed).input_ids) for index, packed in payloads.items()}

    def meta(self, index: int) -> dict[str, Any]:
        packed = self.ledger.redis.hget(keys_of("A").payloads, str(index))
        assert isinstance(packed, bytes)
        return dict(Packer().unpack(packed).meta)

    def max_new_tokens(self, index: int) -> int | None:
        """What the sample asks for, where it is less than its dataset's."""
        packed = self.ledger.redis.hget(keys_of("A").payloads, str(index))
        assert isinstance(packed, bytes)
        return Packer().unpack(packed).max_new_tokens

    def messages(self) -> list[tuple[str, list[int]]]:
        """The messages sent and not yet taken, oldest first."""
        raw = cast("list[bytes]", self.ledger.redis.lrange(GENERATE_QUEUE, 0, -1))
        bodies = [json.loads(b64decode(json.loads(message)["body"])) for message in reversed(raw)]
        return [(body[0][0], body[0][1]) for body in bodies]

    def asked_to_keep(self) -> int:
        """How often the keeper was asked for a tick."""
        return waiting_messages(self.ledger.redis, CONTROL_QUEUE)

    def reject_lines(self) -> list[dict[str, Any]]:
        path = self.output / "A" / "rejects.jsonl"
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def ids(*values: int, **more: Any) -> Row:
    return {"input_ids": list(values), **more}


def numbered(rows: int) -> list[Row]:
    return [ids(index % 4000, 7) for index in range(rows)]


def begin(feed: Feed, *, accept: bool = False) -> list[str]:
    """What `run` and `enqueue` do with the sources, and then with the ledger; answers what they say of the sources."""
    if not accept:
        refuse_replaced(feed.output, feed.settings.datasets)
    notes = list(follow_sources(feed.settings, feed.ledger, feed.settings.datasets))
    register(feed.settings, feed.ledger, feed.settings.datasets, FACTS)
    feed.set_model()
    feed.admit()
    return notes


def answer(feed: Feed, indices: list[int]) -> None:
    """A worker's part: records of queued samples, in a segment and in the ledger."""
    claimed, _ = feed.ledger.claim("A", "w", 60, indices)
    prompts = [json.loads(Packer().unpack(one.payload).input_ids) for one in claimed]
    lines = [record_line(one.index, one.attempt, prompt=ids) for one, ids in zip(claimed, prompts, strict=True)]
    path = write_segment(feed.output, f"w-{indices[0]}.jsonl", *lines)
    settled = [Settled(one.index, one.attempt, len(ids), 2, 1, ()) for one, ids in zip(claimed, prompts, strict=True)]
    size = path.stat().st_size
    assert all(feed.ledger.settle("A", settled, segment=f"A/{path.name}", committed_bytes=size))


def first_ids(feed: Feed) -> dict[int, int]:
    """For each queued sample the first id of its prompt: which row it is."""
    return {index: prompt[0] for index, prompt in feed.prompts().items()}
