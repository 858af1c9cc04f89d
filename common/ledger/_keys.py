"""The only place where a key of the ledger is spelled. The attribute names are those of the KEYS lines of the scripts.

tokenmill:datasets                 sorted set   name -> time of registration (ms)
tokenmill:segments                 hash         "dataset/file" -> bytes of it that are settled
tokenmill:workers                  hash         process -> "last_seen_ms facts(JSON)"
tokenmill:model                    string       what the servers serve (JSON)
tokenmill:servers                  hash         url -> added or drained, while the job runs
tokenmill:failed_attempts          hash         "process start" -> reason -> attempts (JSON)
tokenmill:keeper                   string       the keeper's lock
tokenmill:expected                 string       there for as long as control and workers that are being started may take
tokenmill:suspects                 hash         "key-of-the-leases index" -> "ms until which it is alone, worker"
tokenmill:orders                   hash         worker -> drain or stop, until it has begun to
tokenmill:prompts                  hash         digest of a prompt -> "dataset index" that was fed first with it
tokenmill:events                   list         the last 200 events (JSON), the newest last
tokenmill:d:<dataset>:state        hash         settings, state, cursor, sums
tokenmill:d:<dataset>:done         bitmap       by index: a record or a reject exists
tokenmill:d:<dataset>:attempts     string       by index, 6 bytes big-endian: its last attempt
tokenmill:d:<dataset>:queued       sorted set   index -> when its message was sent (ms). Below 1: in none, in the order
                                                in which they were fed; below 0.5 if it was given back
tokenmill:d:<dataset>:leases       sorted set   index -> when its lease runs out (ms)
tokenmill:d:<dataset>:owners       hash         index -> worker
tokenmill:d:<dataset>:payloads     hash         index -> payload (common/payload.py), until settled
tokenmill:d:<dataset>:prompts      hash         index -> prompt tokens, until settled; where the budget counts them
tokenmill:d:<dataset>:tries        hash         index -> attempts lost so far
tokenmill:d:<dataset>:lengths      hash         bucket (_lengths.py) -> answers
tokenmill:d:<dataset>:rejects      hash         reason -> samples
tokenmill:d:<dataset>:flags        hash         flag -> answers
tokenmill:d:<dataset>:conversations hash        index -> what is to come of its conversation, until that ends
tokenmill:d:<dataset>:answers      hash         index -> its answer, until the next turn is queued that follows it
tokenmill:d:<dataset>:resumed      hash         the same after a recovery, until the row was read again
tokenmill:d:<dataset>:stopped      hash         reason -> turns that are not made
tokenmill:d:<dataset>:lost         hash         index -> furthest clock of its lost attempts (tokens), until it ends
tokenmill:d:<dataset>:clocks       hash         worker -> how far its answers in flight are (_outcomes.py)
tokenmill:d:<dataset>:outcomes     string       how the last attempts ended, a ring (_outcomes.py)
tokenmill:d:<dataset>:prompts_fed  hash         the same of this dataset alone
tokenmill:d:<dataset>:told         bitmap       by index: its prompt was compared with those that were fed
tokenmill:d:<dataset>:recent       string       the last answers, for the gates, a ring (_recent.py)
tokenmill:d:<dataset>:feeding      string       the lock of the feed at work
"""

from dataclasses import dataclass

_PREFIX = "tokenmill:"
DATASETS = _PREFIX + "datasets"
SEGMENTS = _PREFIX + "segments"
WORKERS = _PREFIX + "workers"
MODEL = _PREFIX + "model"
SERVERS = _PREFIX + "servers"
FAILED_ATTEMPTS = _PREFIX + "failed_attempts"
KEEPER = _PREFIX + "keeper"
EXPECTED = _PREFIX + "expected"
SUSPECTS = _PREFIX + "suspects"
SHARED_PROMPTS = _PREFIX + "prompts"
EVENTS = _PREFIX + "events"
ORDERS = _PREFIX + "orders"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one dataset, and the shared ones that its scripts touch."""

    state: str
    done: str
    attempts: str
    queued: str
    leases: str
    owners: str
    payloads: str
    prompts: str
    tries: str
    lengths: str
    rejects: str
    flags: str
    lost: str
    clocks: str
    outcomes: str
    feeding: str
    conversations: str
    answers: str
    resumed: str
    stopped: str
    prompts_fed: str
    recent: str
    told: str
    datasets: str = DATASETS
    segments: str = SEGMENTS
    workers: str = WORKERS
    suspects: str = SUSPECTS
    shared_prompts: str = SHARED_PROMPTS


_OF_DATASET = (
    "state",
    "done",
    "attempts",
    "queued",
    "leases",
    "owners",
    "payloads",
    "prompts",
    "tries",
    "lengths",
    "rejects",
    "flags",
    "lost",
    "clocks",
    "outcomes",
    "feeding",
    "conversations",
    "answers",
    "resumed",
    "stopped",
    "prompts_fed",
    "recent",
    "told",
)


def keys_of(dataset: str) -> Keys:
    """The keys of `dataset`."""
    return Keys(*(f"{_PREFIX}d:{dataset}:{name}" for name in _OF_DATASET))


def dataset_keys(dataset: str) -> list[str]:
    """Every key that belongs to `dataset` alone, as a recovery clears them."""
    return [f"{_PREFIX}d:{dataset}:{name}" for name in _OF_DATASET]
