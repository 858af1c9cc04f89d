"""Books that Redis has forgotten: the keeper asks for them, once, and what it asks for builds them from the files."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from celery import Celery

from common.broker import PRODUCE_QUEUE, make_celery
from common.chat_template import Tokenizer
from common.ledger import Ledger
from common.registered import read_registered
from common.settings import Settings, load_settings
from producer.enqueue import register
from producer.recover import recover_dataset
from producer.restore import restore, trouble
from tests.conftest import REPO
from tests.lines import record_line, write_segment
from workers.keeper import Keeper


@pytest.fixture
def settings(tmp_path: Path, valkey: str) -> Settings:
    sources = "".join(f'[[datasets]]\nname = "{name}"\npath = "rows.jsonl"\n' for name in "AB")
    (tmp_path / "rows.jsonl").write_text("")
    (tmp_path / "tokenmill.toml").write_text(
        f'output = "out"\nredis = "{valkey}"\n[tokenizer]\npath = "{REPO}/examples/tokenizer"\n{sources}'
    )
    return load_settings(tmp_path / "tokenmill.toml")


@pytest.fixture
def facts(settings: Settings) -> dict[str, Any]:
    made = {"chat_template_kwargs": {}, "sampling_params": settings.sampling.params(), "servers": [], "datasets": {}}
    model = {"model_path": "m", "weight_version": "1", "vocab_size": 4096}
    return model | made | Tokenizer(settings.tokenizer).fingerprint()


@pytest.fixture
def app(settings: Settings) -> Iterator[Celery]:
    with make_celery("tokenmill", settings) as app:
        yield app


@pytest.fixture
def keeper(settings: Settings, app: Celery, ledger: Ledger) -> Iterator[Keeper]:
    keeper = Keeper(settings, app, ledger)
    yield keeper
    keeper.close()


def asked(ledger: Ledger, keeper: Keeper, ticks: int = 2) -> int:
    """How often the keeper asks for the books within so many ticks; feeds are not of interest here."""
    for _ in range(ticks):
        assert keeper.tick()
    names = [msgspec.json.decode(text)["headers"]["task"] for text in ledger.redis.lrange(PRODUCE_QUEUE, 0, -1)]
    ledger.redis.delete(PRODUCE_QUEUE)
    return names.count("restore")


def test_an_emptied_ledger_is_asked_for_once_and_built_from_the_files(
    settings: Settings, facts: dict[str, Any], ledger: Ledger, keeper: Keeper
) -> None:
    raised = settings.datasets[1].model_copy(update={"cap_tokens": 7000})
    register(settings, ledger, [settings.datasets[0], raised], facts)
    write_segment(settings.output, "w-0.jsonl", record_line(0), record_line(1))
    assert asked(ledger, keeper) == 0
    ledger.redis.flushall()
    assert trouble(settings, ledger) == [
        "Redis has forgotten A, B; the books are built anew from the files by `tokenmill control`, `run` or `enqueue`"
    ]
    assert asked(ledger, keeper) == 1
    assert restore(settings, ledger) == "1 dataset built anew from the files"
    assert trouble(settings, ledger) == []
    a, b = map(ledger.snapshot, "AB")
    assert (a.state, a.done, b.state, b.cap_tokens) == ("open", 2, "open", 7000)
    assert a.reason == b.reason
    assert a.reason.startswith("Redis had forgotten it; its books were built anew at ")
    assert ledger.model() == facts
    # Whoever comes second finds nothing to do.
    ledger.transition("A", "paused", ["open"], "by hand")
    assert restore(settings, ledger) == "0 datasets built anew from the files"
    assert ledger.snapshot("A").reason == "by hand"
    assert asked(ledger, keeper) == 0


def test_one_dataset_alone_or_the_model_alone_may_be_gone(
    settings: Settings, facts: dict[str, Any], ledger: Ledger, keeper: Keeper
) -> None:
    register(settings, ledger, settings.datasets, facts)
    ledger.forget("B")
    assert asked(ledger, keeper) == 1  # this keeper has never seen it
    restore(settings, ledger)
    assert ledger.datasets() == ["A", "B"]
    assert asked(ledger, keeper) == 0
    ledger.redis.delete("tokenmill:model")
    assert asked(ledger, keeper) == 1
    restore(settings, ledger)
    assert ledger.model() == facts


def test_a_rebuilding_that_was_cut_short_is_done_again(
    settings: Settings, facts: dict[str, Any], ledger: Ledger
) -> None:
    register(settings, ledger, settings.datasets, facts)
    write_segment(settings.output, "w-0.jsonl", record_line(0))
    ledger.redis.execute_command("ACL", "SETUSER", "default", "-setbit")  # type: ignore[no-untyped-call]
    try:
        with pytest.raises(Exception, match="setbit"):
            recover_dataset(settings.output, settings.datasets[0], ledger)
    finally:
        ledger.redis.execute_command("ACL", "SETUSER", "default", "+setbit")  # type: ignore[no-untyped-call]
    assert ledger.snapshot("A").state == "paused"
    restore(settings, ledger)
    assert (ledger.snapshot("A").state, ledger.snapshot("A").done) == ("open", 1)


def test_before_anything_was_enqueued_and_after_the_files_were_removed_nothing_is_asked_for(
    settings: Settings, facts: dict[str, Any], ledger: Ledger, keeper: Keeper
) -> None:
    assert asked(ledger, keeper) == 0
    assert restore(settings, ledger) == "nothing: there is no run.json"
    register(settings, ledger, settings.datasets, facts)
    assert asked(ledger, keeper) == 0
    ledger.redis.flushall()
    shutil.rmtree(settings.output)
    assert asked(ledger, keeper) == 0


def test_books_are_not_built_for_another_configuration(
    settings: Settings, facts: dict[str, Any], ledger: Ledger
) -> None:
    register(settings, ledger, settings.datasets, facts)
    assert [one.name for one in read_registered(settings.output)] == ["A", "B"]
    ledger.redis.flushall()
    sampling = settings.sampling.model_copy(update={"temperature": 0.5})
    assert "sampling_params was" in restore(settings.model_copy(update={"sampling": sampling}), ledger)
    assert ledger.datasets() == []
