"""The only place where a key of the ledger is spelled. The attribute names are those of the KEYS lines of the scripts.

tokenmill:datasets                 sorted set   name -> time of registration (ms)
tokenmill:segments                 hash         "dataset/file" -> bytes of it that are settled
tokenmill:workers                  hash         process -> "last_seen_ms facts(JSON)"
tokenmill:model                    string       what the servers serve (JSON)
tokenmill:servers                  hash         url -> added or drained, while the job runs
tokenmill:failed_attempts          hash         "process start" -> reason -> attempts (JSON)
tokenmill:keeper                   string       the keeper's lock
tokenmill:suspects                 hash         "key-of-the-leases index" -> "ms until which it is alone, worker"
tokenmill:d:<dataset>:state        hash         settings, state, cursor, sums
tokenmill:d:<dataset>:done         bitmap       by index: a record or a reject exists
tokenmill:d:<dataset>:attempts     string       by index, 6 bytes big-endian: its last attempt
tokenmill:d:<dataset>:queued       sorted set   index -> when its message was sent (ms). Below 1: in none, in the order
                                                of the source; below 0.5 if it was given back
tokenmill:d:<dataset>:leases       sorted set   index -> when its lease runs out (ms)
tokenmill:d:<dataset>:owners       hash         index -> worker
tokenmill:d:<dataset>:payloads     hash         index -> payload (common/payload.py), until settled
tokenmill:d:<dataset>:prompts      hash         index -> prompt tokens, until settled; where the budget counts them
tokenmill:d:<dataset>:tries        hash         index -> attempts lost so far
tokenmill:d:<dataset>:lengths      hash         bucket (_lengths.py) -> answers
tokenmill:d:<dataset>:rejects      hash         reason -> samples
tokenmill:d:<dataset>:flags        hash         flag -> answers
tokenmill:d:<dataset>:lost         hash         index -> furthest clock of its lost attempts (tokens), until it ends
tokenmill:d:<dataset>:clocks       hash         worker -> how far its answers in flight are (_outcomes.py)
tokenmill:d:<dataset>:outcomes     string       how the last attempts ended, a ring (_outcomes.py)
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
SUSPECTS = _PREFIX + "suspects"


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
    datasets: str = DATASETS
    segments: str = SEGMENTS
    workers: str = WORKERS
    suspects: str = SUSPECTS


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
)


def keys_of(dataset: str) -> Keys:
    """The keys of `dataset`."""
    return Keys(*(f"{_PREFIX}d:{dataset}:{name}" for name in _OF_DATASET))


def dataset_keys(dataset: str) -> list[str]:
    """Every key that belongs to `dataset` alone, as a recovery clears them."""
    return [f"{_PREFIX}d:{dataset}:{name}" for name in _OF_DATASET]
