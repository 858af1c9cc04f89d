"""A plan put together: what is known of each dataset and of the servers, from where, and what follows from that."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from common.sections import DatasetSettings
from common.segments import segment_paths
from common.settings import Settings
from producer.plan.arithmetic import Known, Limit, Planned, Totals, limit, plan
from producer.plan.look import Rows, Source
from producer.report.gather import Came, Gathered

# Of fewer answers the mean is told with a warning: while a job runs the short ones have ended first.
FEW_ANSWERS = 30
# In a record, beside its ids: names, times, the server's address, a row's own id.
_RECORD_BYTES = 500

AnswersFrom = Literal["records", "pilot", "mean_tokens", "guess"]
RateFrom = Literal["given", "records", "servers", "pilot", "unknown"]


class Answers(msgspec.Struct, frozen=True):
    """What is expected of an answer: tokens on average, of how many answers, and the share that ended by length."""

    origin: AnswersFrom
    mean_tokens: float
    answers: int = 0
    truncated: int = 0


class Rate(msgspec.Struct, frozen=True):
    """Completion tokens a second on all servers together; None: not known."""

    tokens_per_second: float | None
    origin: RateFrom


class Dataset(msgspec.Struct, frozen=True):
    """One line of the plan, and where its figures come from."""

    rows: Rows
    cap_tokens: int | None
    count: str
    weight: float
    answered: int
    rejected: int
    stopped: int
    looked_at: int
    rejected_of_looked_at: int
    mean_prompt_tokens: float
    answers: Answers
    record_bytes_from: Literal["records", "estimate"]
    planned: Planned


class Plan(msgspec.Struct, frozen=True):
    """The whole plan; `notes` are sentences for a person."""

    rate: Rate
    limit: Limit
    datasets: list[Dataset]
    totals: Totals
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Asked:
    """One dataset with all that was found out about it. `pilot` are workers.sglang.pilot.Told.

    stopped: turns that are not made, since an answer before them cannot be followed.
    """

    dataset: DatasetSettings
    source: Source
    came: Came
    pilot: Sequence[Any] = ()
    stopped: int = 0


def make_plan(
    settings: Settings, asked: Sequence[Asked], rate: Rate, servers: Sequence[Any], kv_tokens: int | None
) -> Plan:
    """The plan of `asked`. `servers` are the ServerFacts of those that answered, `kv_tokens` what their pools hold."""
    answers = [expected(settings, one) for one in asked]
    known = [_known(settings, one, each) for one, each in zip(asked, answers, strict=True)]
    planned, totals = plan(known, rate.tokens_per_second)
    running = _running(servers)
    in_flight = settings.worker.concurrency * settings.run.workers
    held = limit(known, planned, kv_tokens, running, in_flight)
    datasets = [
        Dataset(
            rows=one.source.rows,
            cap_tokens=one.dataset.cap_tokens,
            count=one.dataset.count,
            weight=one.dataset.weight,
            answered=one.came.samples,
            rejected=sum(one.came.rejects.values()),
            stopped=one.stopped,
            looked_at=one.source.looked_at,
            rejected_of_looked_at=one.source.rejected,
            mean_prompt_tokens=round(one.source.mean_prompt_tokens, 1),
            answers=each,
            record_bytes_from="records" if one.came.samples else "estimate",
            planned=line,
        )
        for one, each, line in zip(asked, answers, planned, strict=True)
    ]
    return Plan(rate, held, datasets, totals, [])


def expected(settings: Settings, asked: Asked) -> Answers:
    """Of the records and the pilot those that are more answers; without any the configuration's guess."""
    came, told = asked.came, [one for one in asked.pilot if not one.failure]
    if came.samples and came.samples >= len(told):
        mean = float(came.completion_tokens.mean())
        return Answers("records", mean, came.samples, came.finish_reasons["length"])
    if told:
        mean = sum(one.completion_tokens for one in told) / len(told)
        return Answers("pilot", mean, len(told), sum(one.finish_reason == "length" for one in told))
    if asked.dataset.mean_tokens is not None:
        return Answers("mean_tokens", asked.dataset.mean_tokens)
    return Answers("guess", settings.sampling_of(asked.dataset).max_new_tokens / 2)


def _known(settings: Settings, asked: Asked, answers: Answers) -> Known:
    dataset, source, came = asked.dataset, asked.source, asked.came
    left = source.rows.count * source.samples_a_row - came.samples - sum(came.rejects.values()) - asked.stopped
    made = int(came.completion_tokens.sum())
    charged = came.completion_tokens * came.counts
    prompts = came.prompt_tokens * came.counts
    mean_prompt = source.mean_prompt_tokens
    if came.samples:
        size = sum(path.stat().st_size for path in segment_paths(settings.output, dataset.name))
        record_bytes = size / came.samples
    else:
        record_bytes = _RECORD_BYTES + source.id_bytes * (mean_prompt + answers.mean_tokens)
    return Known(
        name=dataset.name,
        left=max(0, round(left * (1 - source.rejected_share))),
        prompt_tokens=mean_prompt,
        completion_tokens=answers.mean_tokens,
        charged_tokens=answers.mean_tokens * (int(charged.sum()) / made if made else 1.0),
        record_bytes=record_bytes,
        cap_tokens=dataset.cap_tokens,
        count=dataset.count,
        spent_tokens=int(charged.sum()) + (int(prompts.sum()) if dataset.count == "total" else 0),
        weight=dataset.weight,
    )


def _running(servers: Sequence[Any]) -> int | None:
    """How many requests all servers run at once; None unless all of them say it."""
    told = [server.max_running_requests and server.max_running_requests * server.dp_size for server in servers]
    return sum(told) if told and all(told) else None


def kv_tokens_of(servers: Sequence[Any], loads: Sequence[Any]) -> int | None:
    """The tokens that the KV pools of all servers hold; None unless all of them say it."""
    told = [
        (load.capacity_tokens if load is not None else None)
        or (server.max_total_num_tokens and server.max_total_num_tokens * server.dp_size)
        for server, load in zip(servers, loads, strict=True)
    ]
    return sum(told) if told and all(told) else None


def rate_of(given: float | None, run: Gathered, loads: Sequence[Any], pilot: Any | None) -> Rate:
    """The given rate, else that of the records, of what the servers do now, or of the pilot, in this order."""
    if given is not None:
        return Rate(given, "given")
    seconds = run.work_seconds
    if sum(one.samples for one in run.datasets) >= FEW_ANSWERS and seconds > 0:
        return Rate(sum(int(one.completion_tokens.sum()) for one in run.datasets) / seconds, "records")
    busy = [load.tokens_per_second for load in loads if load is not None and load.running and load.tokens_per_second]
    if busy:
        return Rate(sum(busy), "servers")
    if pilot is not None and (tokens := sum(one.completion_tokens for one in pilot.told)):
        return Rate(tokens / pilot.seconds, "pilot")
    return Rate(None, "unknown")
