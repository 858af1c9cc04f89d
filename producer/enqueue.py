"""Registers datasets: checks everything first, writes what the run is made of, then lets the keeper ask for feeds."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from celery import Celery

from common.amounts import tokens_of
from common.broker import CONTROL_QUEUE, KEEP
from common.chat_template import Tokenizer
from common.errors import ConfigError, ServerRefused, ServerUnavailable, UsageError
from common.events import make_event, tell
from common.ledger import Ledger
from common.reading import keep_reading
from common.registered import keep_registered, read_kept, registering
from common.run_file import write_run_file
from common.sections import DatasetSettings
from common.segments import count, segment_paths
from common.settings import Settings, nearest
from producer.datasets.sample import first_look
from producer.datasets.standard_input import STANDARD_INPUT
from producer.dedupe import remember_answered, remember_queued
from producer.in_force import in_force, put_in_force
from producer.recover import Recovered, cut_short, recover_dataset
from producer.sources import read_on, read_source, refuse_unreadable


def choose(settings: Settings, names: Sequence[str]) -> list[DatasetSettings]:
    """The configured datasets of these names, or all; raises ConfigError if one, or its source file, does not exist."""
    known = {dataset.name: dataset for dataset in settings.datasets}
    if not known:
        raise ConfigError("the configuration has no [[datasets]]; add one with name, path and cap_tokens")
    for name in names:
        if name not in known:
            raise ConfigError(f"the configuration has no dataset named {name!r}{nearest(name, set(known))}")
    chosen = [known[name] for name in dict.fromkeys(names or known)]
    for dataset in chosen:
        refuse_unreadable(settings.output, dataset)
    return chosen


def capped(datasets: Sequence[DatasetSettings], cap: str) -> list[DatasetSettings]:
    """The datasets with this cap in place of theirs, such as `12M` or `none`; raises UsageError if it is none."""
    try:
        tokens = tokens_of(cap)
    except UsageError as error:
        raise UsageError(f"--cap: {error}") from error
    if tokens is not None and tokens < 1:
        raise UsageError(f"--cap {cap} is no cap; it is 1 token at least, or `none`")
    return [dataset.model_copy(update={"cap_tokens": tokens}) for dataset in datasets]


def unusable_sources(output: Path, datasets: Sequence[DatasetSettings]) -> Iterator[str]:
    """A sentence for each dataset of whose first rows none can be a prompt, and of which nothing was read yet."""
    for one in datasets:
        if one.path == STANDARD_INPUT or read_source(output, one.name) is not None:
            continue
        _, why = first_look(one.path, one)
        if why:
            yield f"{one.name}: {why}; correct its `columns` or its path ({one.path})"


def model_facts(
    settings: Settings, datasets: Sequence[DatasetSettings], found: Sequence[Any], tokenizer: Tokenizer
) -> dict[str, Any]:
    """What the servers serve and the prompts of `datasets` are made with: for the ledger and run.json.

    `found` are the ServerFacts of the preflight, of those servers that answered, which serve one model. Raises
    ServerUnavailable, ServerRefused.
    """
    servers = [msgspec.to_builtins(server) for server in found]
    vocab_size, context_length = model_limits(settings, found, tokenizer)
    for dataset in datasets:
        _refuse_no_room(settings, dataset, context_length)
        for server in servers:
            refuse_dropped_parameters(server, settings.sampling_of(dataset).params())
    return {
        "tokenmill_version": version("tokenmill"),
        "model_path": servers[0]["model_path"],
        "weight_version": servers[0]["weight_version"],
        "context_length": context_length,
        "vocab_size": vocab_size,
        **tokenizer.fingerprint(),
        "special_ids": msgspec.to_builtins(tokenizer.special_ids),
        **asked_facts(settings, datasets),
        "servers": servers,
    }


def model_limits(settings: Settings, found: Sequence[Any], tokenizer: Tokenizer) -> tuple[int, int | None]:
    """The vocabulary and the context (tokens; None: unknown) that every prompt must keep to.

    `found` are the ServerFacts of the servers that answered; without any the configuration and the tokenizer tell.
    """
    contexts = [server.context_length for server in found if server.context_length]
    # An id that a server does not know kills it, so the smallest vocabulary counts.
    vocab_size = min([tokenizer.vocab_size, *(server.vocab_size for server in found if server.vocab_size)])
    return vocab_size, settings.server.context_length or min(contexts, default=None)


def asked_facts(settings: Settings, datasets: Sequence[DatasetSettings]) -> dict[str, Any]:
    """What the answers are asked with: in general, and for each dataset with what it has of its own."""
    return {
        "chat_template_kwargs": settings.tokenizer.chat_template_kwargs,
        "sampling_params": settings.sampling.params(),
        "datasets": {
            dataset.name: {
                "chat_template_kwargs": settings.template_kwargs_of(dataset),
                "sampling_params": settings.sampling_of(dataset).params(),
            }
            for dataset in datasets
        },
    }


def _refuse_no_room(settings: Settings, dataset: DatasetSettings, context_length: int | None) -> None:
    sampling = settings.sampling_of(dataset)
    if context_length is None or sampling.max_new_tokens < context_length or sampling.fit == "cut":
        return
    where = "[sampling] max_new_tokens" if dataset.max_new_tokens is None else f"max_new_tokens of {dataset.name}"
    raise ServerUnavailable(
        f"max_new_tokens {sampling.max_new_tokens} leaves no room for a prompt in the servers' context of "
        f"{context_length} tokens; lower {where}, or start the servers with a longer --context-length"
    )


def refuse_dropped_parameters(server: Mapping[str, Any], sampling_params: Mapping[str, Any]) -> None:
    """Raises ServerRefused if `server` is a router that would take a sampling parameter away without a word."""
    if server["router"] and sampling_params.get("logit_bias"):
        raise ServerRefused(
            f"{server['url']} is a router, which drops logit_bias without a word, so that answers would not be made "
            "as run.json says; name the servers behind it in [server] urls, or leave logit_bias out of [sampling]"
        )


def register(
    settings: Settings, ledger: Ledger, datasets: Sequence[DatasetSettings], facts: Mapping[str, Any]
) -> tuple[dict[str, str], list[Recovered]]:
    """Make `datasets` known to the ledger; answers `new`, `known` or `reopened` by name, and what was recovered.

    A dataset that has segments while the ledger does not know it was made before Redis was lost: its books are built
    anew from its files first, so that no row is answered twice. Raises UsageError, OSError, redis.RedisError.
    """
    with registering(settings.output):
        states, recovered = register_alone(settings, ledger, datasets, facts)
    for dataset in datasets:
        if states[dataset.name] == "new":
            cap = f"up to {dataset.cap_tokens:,} tokens" if dataset.cap_tokens else "without a cap"
            tell(settings.output, ledger, make_event("registered", f"{dataset.path}, {cap}", dataset.name))
    return states, recovered


def register_alone(
    settings: Settings, ledger: Ledger, datasets: Sequence[DatasetSettings], facts: Mapping[str, Any]
) -> tuple[dict[str, str], list[Recovered]]:
    """The same for a caller within `registering`."""
    known = set(ledger.datasets())
    held = [in_force(settings, dataset) for dataset in datasets]
    for dataset, _ in held:
        _refuse_other_indices(settings.output, dataset)
    recovered = [
        recover_dataset(settings.output, dataset, ledger)
        for dataset, _ in held
        if (dataset.name not in known and segment_paths(settings.output, dataset.name))
        or cut_short(ledger, dataset.name)
    ]
    earlier = {one.name: kept[0] for one, _ in held if (kept := read_kept(settings.output, one.name))}
    deduped = [one for one, _ in held if one.dedupe and one.name in earlier and earlier[one.name].dedupe != one.dedupe]
    for dataset in deduped:
        remember_queued(dataset, ledger)  # first: what is answered meanwhile is found in the files
        remember_answered(dataset, count(settings.output, dataset.name), ledger)
    facts = keep_reading(settings.output, facts)  # before a worker can look for it
    write_run_file(settings.output, facts)
    ledger.set_model(facts)
    states = {dataset.name: ledger.register(dataset) for dataset, _ in held}
    for dataset in deduped:
        remember_queued(dataset, ledger)  # and what was fed meanwhile
    for dataset, steering in held:
        put_in_force(ledger, dataset.name, steering)
        if dataset.name in earlier and _is_raised(earlier[dataset.name].limit, dataset.limit):
            read_on(ledger, dataset.name)
        # Last: if this is killed, the next one finds what is not yet followed.
        keep_registered(settings.output, dataset, steering)
    return states, recovered


def _refuse_other_indices(output: Path, dataset: DatasetSettings) -> None:
    """Raises UsageError if samples of `dataset` were fed while their indices were counted in another way."""
    kept = read_kept(output, dataset.name)
    if kept is None or (kept[0].turns == "all") == (dataset.turns == "all"):
        return
    if read_source(output, dataset.name) is None:
        return
    raise UsageError(
        f'dataset {dataset.name} was made with turns = "{kept[0].turns}", and with "{dataset.turns}" its samples have '
        "other indices; put that back, or choose another name for the dataset"
    )


def _is_raised(before: int | None, now: int | None) -> bool:
    """Whether more rows may be fed than before; None: all of them."""
    return before is not None and (now is None or now > before)


def small_caps(datasets: Sequence[DatasetSettings], max_new_tokens: int) -> Iterator[str]:
    """A sentence for each cap of less than ten answers: it may be missed by much."""
    for dataset in datasets:
        most = dataset.max_new_tokens or max_new_tokens
        mean = dataset.mean_tokens or most // 2
        if dataset.cap_tokens is not None and dataset.cap_tokens < 10 * mean:
            yield (
                f"{dataset.name}: its cap of {dataset.cap_tokens:,} tokens is less than ten answers of {mean:,}, and "
                f"may be passed by one of {most:,}; raise it, or give its mean_tokens if answers are short"
            )


def ask_for_a_tick(app: Celery) -> None:
    """Let the keeper look at once rather than within its second."""
    app.send_task(KEEP, queue=CONTROL_QUEUE)
