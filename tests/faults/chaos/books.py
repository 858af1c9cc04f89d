"""The books: each sample in exactly one place, and every reader of them of one mind, to the token."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
import redis

from common.ledger import Ledger
from common.ledger._keys import keys_of
from common.records import Record
from common.rejects import Reject, read_rejects
from common.segments import Counted, count, records, segment_paths
from tests.faults.chaos.faults import EXPLAINS
from tests.faults.chaos.site import SERVERS, Dataset, Site, within

# The sums that `status`, `verify` and `recover` must agree on with the files.
Sums = tuple[int, int, int, int]
_SUMS = ("done", "rejected", "prompt_tokens", "completion_tokens")
# A dataset with a cap ends so near to it, in shares of the cap, whatever was thrown.
_CAP_SHARE = 0.1


@dataclass
class Books:
    """What was found. `wrong`: the books do not balance. `findings`: they do, and yet this must not be."""

    samples: int = 0
    voided: int = 0
    unsettled: int = 0
    rejects: Counter[str] = field(default_factory=Counter)
    bad_rows: int = 0
    wrong: list[str] = field(default_factory=list)
    unexplained: list[tuple[str, int, str]] = field(default_factory=list)  # dataset, index, its reject
    findings: list[str] = field(default_factory=list)
    odd: dict[str, set[int]] = field(default_factory=dict)  # dataset -> the indices to show
    evidence: list[str] = field(default_factory=list)

    def show(self, dataset: str, indices: Collection[int]) -> str:
        """Note these indices as evidence; answers the first of them in words."""
        self.odd.setdefault(dataset, set()).update(indices)
        some = sorted(indices)
        return f"{len(some)} samples: {some[:10]}{'...' if len(some) > 10 else ''}"


def check(site: Site, thrown: Collection[str], books: Books, story: Callable[[str, int], str]) -> None:
    """Check everything, with all but Valkey and the model servers stopped.

    `thrown` are the kinds of faults, `story` what was seen of a sample's attempts.
    """
    explained = {reason for kind in thrown for reason in EXPLAINS.get(kind, ())}
    sums = {dataset.name: _check_dataset(site, dataset, explained, books) for dataset in site.datasets}
    _idle(site, books)
    _agree(site, sums, books, "after the end")
    books.findings = [f"{name} {index}: {reject}; {story(name, index)}" for name, index, reject in books.unexplained]
    books.evidence += [*_in_files(site, books), *_in_the_ledger(site, books)]
    with site.connection(30) as client:
        client.flushall()
    done = site.command("recover")
    if done.returncode:
        books.wrong.append(f"recover ends with {done.returncode}: {done.stderr.decode()}")
    _agree(site, sums, books, "after recover", ended=False)


def _check_dataset(site: Site, dataset: Dataset, explained: Collection[str], books: Books) -> Sums:
    """One dataset's files, and the ledger's view of each index; answers the sums of the files."""
    output = site.settings.output
    counted, rejects = count(output, dataset.name), read_rejects(output, dataset.name)
    books.wrong += [
        f"{fault.path}:{fault.line}: {fault.reason}" for fault in (*counted.faults, *rejects.faults) if not fault.torn
    ]
    kept = {record.index: record for record in records(output, dataset.name, counted)}
    rejected = {index: row for index, row in rejects.rows.items() if index not in kept}
    books.samples += len(kept)
    books.voided += counted.superseded
    _check_records(dataset, kept, books)
    _check_rejects(dataset, rejected, explained, books)
    _check_places(site, dataset, set(kept) | set(rejected), books)
    _check_spent(dataset, kept, books)
    _check_settled(site, dataset, counted, books)
    return (
        len(kept),
        len(rejected),
        sum(record.prompt_tokens for record in kept.values()),
        sum(record.completion_tokens for record in kept.values()),
    )


def _check_records(dataset: Dataset, kept: Mapping[int, Record], books: Books) -> None:
    strangers = {index for index in kept if index >= len(dataset.rows)}
    if strangers:
        books.wrong.append(f"{dataset.name}: records of rows that there are not, {books.show(dataset.name, strangers)}")
    mixed = {
        index
        for index in kept.keys() - strangers
        if kept[index].input_ids != dataset.rows[index] or kept[index].meta != {"id": f"{dataset.name}-{index}"}
    }
    if mixed:
        books.wrong.append(f"{dataset.name}: records of other prompts, {books.show(dataset.name, mixed)}")


def _check_rejects(dataset: Dataset, rejected: Mapping[int, Reject], explained: Collection[str], books: Books) -> None:
    """The bad rows, by their reasons; of the others those that a fault explains, and those that are findings."""
    read = {index for index in dataset.bad if index in rejected}
    wrong = {index for index in read if rejected[index].reason != dataset.bad[index]}
    if wrong:
        books.wrong.append(f"{dataset.name}: bad rows with other reasons, {books.show(dataset.name, wrong)}")
    books.bad_rows += len(read)
    for index, row in rejected.items():
        if index in dataset.bad:
            continue
        books.rejects[row.reason] += 1
        if row.reason not in explained:
            books.show(dataset.name, {index})
            books.unexplained.append((dataset.name, index, f"{row.reason}: {row.detail}"))


def _check_places(site: Site, dataset: Dataset, ended: set[int], books: Books) -> None:
    """Each index is done in the files and in the ledger, or in neither; none is left where there is no cap."""
    with site.connection(30) as client:
        ledger = Ledger(client)
        done = ledger.done_among(dataset.name, range(len(dataset.rows)))
        state = ledger.snapshot(dataset.name)
    for indices, words in (
        (ended - done, "ended in the files, and not in the ledger"),
        (done - ended, "ended in the ledger, and nowhere in the files"),
    ):
        if indices:
            books.wrong.append(f"{dataset.name}: {words}, {books.show(dataset.name, indices)}")
    left = set(range(len(dataset.rows))) - ended
    if dataset.cap_tokens is None and left:
        books.wrong.append(f"{dataset.name}: neither a record nor a reject, {books.show(dataset.name, left)}")
    expected = "exhausted" if dataset.cap_tokens is None else "capped"
    if (state.state, state.in_flight) != (expected, 0):
        books.wrong.append(
            f"{dataset.name} is {state.state} ({state.reason}) with {state.queued} queued and {state.in_flight} in "
            f"flight, not {expected}"
        )


def _check_spent(dataset: Dataset, kept: Mapping[int, Record], books: Books) -> None:
    if dataset.cap_tokens is not None:
        spent = sum(record.completion_tokens for record in kept.values())
        if abs(spent - dataset.cap_tokens) > _CAP_SHARE * dataset.cap_tokens:
            books.wrong.append(f"{dataset.name}: {spent:,} tokens for a cap of {dataset.cap_tokens:,}")


def _check_settled(site: Site, dataset: Dataset, counted: Counted, books: Books) -> None:
    """The ledger knows each segment as settled to its last whole line; where it does not, a keeper would adopt it."""
    with site.connection(30) as client:
        committed = Ledger(client).committed()
    books.unsettled += sum(end > committed.get(f"{dataset.name}/{path.name}", 0) for path, end in counted.ends.items())


def _agree(site: Site, sums: Mapping[str, Sums], books: Books, when: str, *, ended: bool = True) -> None:
    """`status` and `verify` say what the files say."""
    seen = site.command("status", "--json")
    try:
        datasets = msgspec.json.decode(seen.stdout)["datasets"]
    except msgspec.DecodeError:
        books.wrong.append(f"status {when} ends with {seen.returncode}: {seen.stderr.decode()}")
        return
    states: dict[str, dict[str, Any]] = {one["name"]: one for one in datasets}
    for name, files in sums.items():
        said = tuple(states[name][key] for key in _SUMS) if name in states else None
        if said != files:
            books.wrong.append(f"{name}: {_SUMS} are {said} in status {when}, and {files} in the files")
    done = site.command("verify", "--json")
    report = msgspec.json.decode(done.stdout or b"{}")
    faults = report.get("faults"), report.get("differences")
    if done.returncode or faults != ([], []) or (ended and not report["ledger_compared"]):
        books.wrong.append(f"verify {when} ends with {done.returncode}: {done.stdout.decode()} {done.stderr.decode()}")
        return
    verified = {
        one["name"]: (one["samples"], one["rejects"], one["prompt_tokens"], one["completion_tokens"])
        for one in report["datasets"]
    }
    if verified != sums:
        books.wrong.append(f"verify {when} counts {verified}, and the files hold {dict(sums)}")


def _idle(site: Site, books: Books) -> None:
    """Nothing is left running: no process here, no request at the servers."""
    if not within(20, lambda: all(_at_work(site, name) == 0 for name in SERVERS)):
        at_work = {name: _at_work(site, name) for name in SERVERS}
        books.wrong.append(f"requests that nobody waits for run at the servers: {at_work}")
    servers = {site.pid(name) for name in SERVERS}
    if not within(10, lambda: not set(site.left()) - servers):
        books.wrong.append(f"processes outlived those that had started them: {set(site.left()) - servers}")


def _at_work(site: Site, server: str) -> int | None:
    """The requests that run or wait at a model server; None while it starts."""
    site.parts[server].look_after()  # one that was told to end drains first, and may have ended only now
    try:
        with urlopen(f"{site.url(server)}/v1/loads", timeout=10) as response:
            loads = msgspec.json.decode(response.read(), type=dict[str, Any])["loads"]
    except OSError:
        return None
    return sum(int(load["num_running_reqs"] + load["num_waiting_reqs"]) for load in loads)


def _in_files(site: Site, books: Books) -> Iterator[str]:
    """Every line that stands anywhere of the odd samples, the first 20 of each dataset."""
    for name, indices in books.odd.items():
        for index in sorted(indices)[:20]:
            yield f"--- {name} {index}"
            for path in (*segment_paths(site.settings.output, name), site.settings.output / name / "rejects.jsonl"):
                yield from (f"{path.name}:{line}" for line in _lines_of(path, index))


def _lines_of(path: Path, index: int) -> Iterator[str]:
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            told = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        if told.get("void", told).get("index") == index:
            short = {key: value for key, value in told.items() if not key.endswith("_ids")}
            yield f"{number}: {msgspec.json.encode(short).decode()}"


def _in_the_ledger(site: Site, books: Books) -> Iterator[str]:
    try:
        with site.connection(5) as client:
            for name, indices in books.odd.items():
                keys = keys_of(name)
                for index in map(str, sorted(indices)[:20]):
                    yield (
                        f"{name} {index}: queued {client.zscore(keys.queued, index)}, "
                        f"leased until {client.zscore(keys.leases, index)}, owner {client.hget(keys.owners, index)!r}, "
                        f"tries {client.hget(keys.tries, index)!r}, payload {client.hexists(keys.payloads, index)}"
                    )
    except redis.RedisError as error:
        yield f"the ledger cannot be asked: {error}"
