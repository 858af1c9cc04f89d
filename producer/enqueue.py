"""Registers datasets: checks everything first, writes what the run is made of, then lets the keeper ask for feeds."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from celery import Celery

from common.broker import CONTROL_QUEUE, KEEP
from common.chat_template import Tokenizer
from common.durable import make_folder, replace_file
from common.errors import ConfigError, DataError, ServerRefused, ServerUnavailable, UsageError
from common.ledger import Ledger
from common.registered import keep_registered, registering
from common.sections import DatasetSettings
from common.segments import segment_paths
from common.settings import Settings
from producer.recover import Recovered, cut_short, recover_dataset
from producer.sources import refuse_unreadable

# What must be the same in one output folder, or its records are of two kinds.
_SAME = (
    "model_path",
    "weight_version",
    "tokenizer_sha256",
    "template_sha256",
    "chat_template_kwargs",
    "sampling_params",
)


def choose(settings: Settings, names: Sequence[str], cap_tokens: int | None = None) -> list[DatasetSettings]:
    """The configured datasets of these names (all if none is given), with their cap replaced if one is given.

    Raises ConfigError for a name or a source file that does not exist.
    """
    known = {dataset.name: dataset for dataset in settings.datasets}
    if not known:
        raise ConfigError("the configuration has no [[datasets]]; add one with name, path and cap_tokens")
    for name in names:
        if name not in known:
            raise ConfigError(f"no dataset is named {name!r}; the configuration has {', '.join(known)}")
    chosen = [known[name] for name in dict.fromkeys(names or known)]
    for dataset in chosen:
        refuse_unreadable(settings.output, dataset)
    if cap_tokens is None:
        return chosen
    return [dataset.model_copy(update={"cap_tokens": cap_tokens}) for dataset in chosen]


def model_facts(settings: Settings, found: Sequence[Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """What the servers serve and the prompts are made with: for the ledger and run.json.

    `found` are the ServerFacts of the preflight, of those servers that answered, which serve one model. Raises
    ServerUnavailable, ServerRefused.
    """
    servers = [msgspec.to_builtins(server) for server in found]
    contexts = [server["context_length"] for server in servers if server["context_length"]]
    context_length = settings.server.context_length or min(contexts, default=None)
    # An id that a server does not know kills it, so the smallest vocabulary counts.
    vocab_size = min(tokenizer.vocab_size, *(server["vocab_size"] or tokenizer.vocab_size for server in servers))
    for server in servers:
        refuse_dropped_parameters(server, settings.sampling.params())
    asked = settings.sampling.max_new_tokens
    if context_length is not None and asked >= context_length and settings.sampling.fit == "reject":
        raise ServerUnavailable(
            f"max_new_tokens {asked} leaves no room for a prompt in the servers' context of {context_length} tokens; "
            "lower [sampling] max_new_tokens, or start the servers with a longer --context-length"
        )
    return {
        "tokenmill_version": version("tokenmill"),
        "model_path": servers[0]["model_path"],
        "weight_version": servers[0]["weight_version"],
        "context_length": context_length,
        "vocab_size": vocab_size,
        **tokenizer.fingerprint(),
        "special_ids": msgspec.to_builtins(tokenizer.special_ids),
        "chat_template_kwargs": settings.tokenizer.chat_template_kwargs,
        "sampling_params": settings.sampling.params(),
        "servers": servers,
    }


def refuse_dropped_parameters(server: Mapping[str, Any], sampling_params: Mapping[str, Any]) -> None:
    """Raises ServerRefused if `server` is a router that would take a sampling parameter away without a word."""
    if server["router"] and sampling_params.get("logit_bias"):
        raise ServerRefused(
            f"{server['url']} is a router, which drops logit_bias without a word, so that answers would not be made "
            "as run.json says; name the servers behind it in [server] urls, or leave logit_bias out of [sampling]"
        )


def refuse_changes(output: Path, facts: Mapping[str, Any]) -> None:
    """Raises UsageError if `output` was made by another model, tokenizer, template or with other sampling.

    Records of two models in one folder cannot be told apart by a trainer; whoever wants that says so.
    """
    before = read_run_file(output)
    changes = [
        f"{name} was {before[name]!r} and is {facts[name]!r}"
        for name in _SAME
        if before and before.get(name) != facts[name]
    ]
    if changes:
        raise UsageError(
            f"{output / 'run.json'} says that this output was made otherwise: {'; '.join(changes)}; "
            "choose another `output`, or go on with --accept-changes"
        )


def register(
    settings: Settings, ledger: Ledger, datasets: Sequence[DatasetSettings], facts: Mapping[str, Any]
) -> tuple[dict[str, str], list[Recovered]]:
    """Make `datasets` known to the ledger; answers `new`, `known` or `reopened` by name, and what was recovered.

    A dataset that has segments while the ledger does not know it was made before Redis was lost: its books are built
    anew from its files first, so that no row is answered twice. Raises OSError, redis.RedisError.
    """
    with registering(settings.output):
        return register_alone(settings, ledger, datasets, facts)


def register_alone(
    settings: Settings, ledger: Ledger, datasets: Sequence[DatasetSettings], facts: Mapping[str, Any]
) -> tuple[dict[str, str], list[Recovered]]:
    """The same for a caller within `registering`."""
    known = set(ledger.datasets())
    recovered = [
        recover_dataset(settings.output, dataset, ledger)
        for dataset in datasets
        if (dataset.name not in known and segment_paths(settings.output, dataset.name))
        or cut_short(ledger, dataset.name)
    ]
    write_run_file(settings.output, facts)
    ledger.set_model(facts)
    states = {dataset.name: ledger.register(dataset) for dataset in datasets}
    for dataset in datasets:
        keep_registered(settings.output, dataset)
    return states, recovered


def small_caps(datasets: Sequence[DatasetSettings], max_new_tokens: int) -> Iterator[str]:
    """A sentence for each cap of less than ten answers: it may be missed by much."""
    for dataset in datasets:
        mean = dataset.mean_tokens or max_new_tokens // 2
        if dataset.cap_tokens is not None and dataset.cap_tokens < 10 * mean:
            yield (
                f"{dataset.name}: its cap of {dataset.cap_tokens:,} tokens is less than ten answers of {mean:,}, and "
                f"may be passed by one of {max_new_tokens:,}; raise it, or give its mean_tokens if answers are short"
            )


def ask_for_a_tick(app: Celery) -> None:
    """Let the keeper look at once rather than within its second."""
    app.send_task(KEEP, queue=CONTROL_QUEUE)


def read_run_file(output: Path) -> dict[str, Any] | None:
    """What `<output>/run.json` says; None if there is none. Raises DataError if it cannot be read."""
    path = output / "run.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); mend it, or move it away if nothing else is there"
        ) from error


def write_run_file(output: Path, facts: Mapping[str, Any]) -> None:
    """`<output>/run.json`: what made the data, with what made it before an accepted change under `earlier`.

    Replaced whole, so that it is never half a file.
    """
    make_folder(output)
    before = read_run_file(output)
    earlier = before.pop("earlier", []) if before else []
    if before and any(before.get(name) != facts[name] for name in _SAME):
        earlier = [*earlier, before]
    text = msgspec.json.format(msgspec.json.encode({**facts, "earlier": earlier}), indent=2)
    replace_file(output / "run.json", [text, b"\n"])
