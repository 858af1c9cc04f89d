"""Books of a running job that Redis has forgotten, built anew from the files: it was emptied, or started empty.

`run` and `enqueue --wait` see that themselves. Where neither runs the keeper sees it, and asks the feeder. Caps,
weights, pauses and cancelled datasets stand in each dataset.json, which servers were added or drained in events.jsonl.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from common.chat_template import Tokenizer
from common.errors import TokenmillError
from common.events import make_event, server_changes, tell
from common.ledger import Ledger
from common.logs import about
from common.registered import read_registered, registering
from common.run_file import read_run_file, refuse_changes
from common.sections import DatasetSettings
from common.settings import Settings
from common.words import counted
from producer.enqueue import asked_facts, register_alone
from producer.recover import Recovered, cut_short

log = logging.getLogger(__name__)


def forgotten(ledger: Ledger, datasets: Sequence[DatasetSettings]) -> list[DatasetSettings]:
    """Those of `datasets` that the ledger does not know, or knows half, as their rebuilding was cut short."""
    known = set(ledger.datasets())
    return [one for one in datasets if one.name not in known or cut_short(ledger, one.name)]


def trouble(settings: Settings, ledger: Ledger) -> list[str]:
    """What `status` says while books are missing; nothing if all is well. Raises DataError, OSError."""
    lost = forgotten(ledger, read_registered(settings.output))
    return [_sentence(lost) + " by `tokenmill control`, `run` or `enqueue`"] if lost else []


def _sentence(lost: Sequence[DatasetSettings]) -> str:
    return f"Redis has forgotten {', '.join(one.name for one in lost)}; the books are built anew from the files"


def rebuild(
    settings: Settings, ledger: Ledger, datasets: Sequence[DatasetSettings], facts: Mapping[str, Any]
) -> list[Recovered]:
    """Build the books of those of `datasets` anew that the ledger has forgotten; answers what was found on disk.

    Workers that live go on. What they have in flight counts if it is settled before another attempt has the sample.
    Whoever comes second finds nothing to do. Raises OSError, redis.RedisError.
    """
    with registering(settings.output):
        lost = forgotten(ledger, datasets)
        if not lost and ledger.model() is not None:
            return []
        if lost:
            log.error("%s", _sentence(lost))
        _, recovered = register_alone(settings, ledger, lost, facts)
        for url, change in server_changes(settings.output).items():
            ledger.change_server(url, change)
        reason = f"Redis had forgotten it; its books were built anew at {time.strftime('%Y-%m-%d %H:%M:%S')}"
        for one in lost:
            ledger.transition(one.name, "open", ["open"], reason)
            records = sum(done.records for done in recovered if done.name == one.name)
            tell(settings.output, ledger, make_event("restored", _anew(records), one.name, "tokenmill"))
        for done in recovered:
            log.warning("%s: %s", done.name, _anew(done.records), extra=about(done.name))
        return recovered


def _anew(records: int) -> str:
    return f"Redis had forgotten it; its books were built anew from {counted(records, 'record')} on disk"


def restore(settings: Settings, ledger: Ledger) -> str:
    """What the keeper asks for: the books of all that was ever registered; answers what was done, for Flower.

    Refuses where the configuration has been changed since, as `run` and `enqueue` do: the records of the output folder
    would be of two kinds.
    """
    try:
        facts = read_run_file(settings.output)
        if facts is None:
            return "nothing: there is no run.json"
        facts.pop("earlier", None)
        datasets = read_registered(settings.output)
        now = Tokenizer(settings.tokenizer).fingerprint() | asked_facts(settings, datasets)
        refuse_changes(settings.output, facts | now)
        recovered = rebuild(settings, ledger, datasets, facts)
    except (TokenmillError, OSError) as error:
        log.error("the books cannot be built anew, and nothing is made: %s", error)
        return f"nothing: {error}"
    return f"{counted(len(recovered), 'dataset')} built anew from the files"
