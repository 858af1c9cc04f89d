"""Servers of a running job: what `tokenmill servers` changes in the ledger and in run.json, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.errors import ServerRefused, UsageError
from common.ledger import Ledger
from common.run_file import write_run_file
from common.servers import urls_in_use
from common.settings import Settings, load_settings
from producer.servers import add_server, drain_server, known_servers
from tests.lines import write_config
from tests.unit.preflight_steps import facts_of, sglang
from workers.sglang.preflight import ServerFacts, refuse_other_model

ONE, TWO = "http://127.0.0.1:30000", "http://one:30000"


def facts(**changes: Any) -> ServerFacts:
    """Those of a server at TWO."""
    return facts_of(sglang(**changes))


def add(settings: Settings, facts: ServerFacts) -> None:
    """What `tokenmill servers add` does once it knows the server."""
    add_server(settings, facts, refuse_other_model)


@pytest.fixture
def settings(valkey: str, ledger: Ledger, tmp_path: Path) -> Settings:
    """A job that was enqueued with the server ONE."""
    settings = load_settings(write_config(tmp_path, valkey))
    first = msgspec.to_builtins(facts()) | {"url": ONE}
    shared = {"model_path": "models/a", "weight_version": "default", "servers": [first]}
    same: dict[str, Any] = dict.fromkeys(("tokenizer_sha256", "template_sha256", "chat_template_kwargs"))
    same["sampling_params"] = {"max_new_tokens": 64, "logit_bias": {"2": 1.0}}
    ledger.set_model({**shared, **same})
    write_run_file(settings.output, {**shared, **same})
    return settings


@pytest.mark.parametrize(
    ("changes", "used"),
    [
        ({}, [ONE, TWO]),
        ({"http://c": "added"}, [ONE, TWO, "http://c"]),
        ({ONE: "drained", "http://c": "added"}, [TWO, "http://c"]),
        ({ONE: "added", "http://c": "drained"}, [ONE, TWO]),
        ({ONE: "drained", TWO: "drained"}, []),
    ],
)
def test_the_urls_in_use_are_those_configured_and_added_without_the_drained(changes: Any, used: list[str]) -> None:
    assert urls_in_use([ONE + "/", TWO], changes) == used


def test_an_added_server_is_noted_in_the_ledger_and_in_run_json(settings: Settings, ledger: Ledger) -> None:
    add(settings, facts())
    assert ledger.server_changes() == {TWO: "added"}
    kept = json.loads((settings.output / "run.json").read_bytes())
    assert [server["url"] for server in kept["servers"]] == [ONE, TWO]
    assert kept["earlier"] == []
    model = ledger.model()
    assert model is not None
    assert model["servers"] == kept["servers"]
    assert "never-to-be-stored" not in json.dumps(kept)
    add(settings, facts(version="0.5.20"))
    kept = json.loads((settings.output / "run.json").read_bytes())
    assert [(server["url"], server["version"]) for server in kept["servers"]] == [(ONE, "0.5.23"), (TWO, "0.5.20")]


def test_a_server_of_another_model_is_refused_and_nothing_is_changed(settings: Settings, ledger: Ledger) -> None:
    before = (settings.output / "run.json").read_bytes()
    with pytest.raises(ServerRefused, match="serves model 'models/b' and this job is made by 'models/a'"):
        add(settings, facts(model_path="models/b"))
    assert ledger.server_changes() == {}
    assert (settings.output / "run.json").read_bytes() == before


def test_a_router_is_not_added_where_it_would_drop_a_parameter(settings: Settings, ledger: Ledger) -> None:
    router = msgspec.structs.replace(facts(), router=True)
    with pytest.raises(ServerRefused, match="is a router, which drops logit_bias without a word"):
        add(settings, router)
    assert ledger.server_changes() == {}


def test_nothing_is_added_to_a_job_that_was_not_begun(valkey: str, ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing was enqueued yet"):
        add(load_settings(write_config(tmp_path, valkey)), facts())
    assert ledger.server_changes() == {}


def test_a_drained_server_is_taken_again_when_it_is_added(settings: Settings, ledger: Ledger) -> None:
    add(settings, facts())
    drain_server(settings, TWO + "/")
    assert ledger.server_changes() == {TWO: "drained"}
    with pytest.raises(UsageError, match=rf"{TWO} is no server of this job; it uses {ONE}"):
        drain_server(settings, TWO)
    add(settings, facts())
    assert ledger.server_changes() == {TWO: "added"}


@pytest.mark.parametrize("url", ["one:30000", "http://user:secret@one", "ftp://one"])
def test_what_is_no_address_is_refused_without_telling_a_password(settings: Settings, url: str) -> None:
    with pytest.raises(UsageError) as caught:
        drain_server(settings, url)
    assert "secret" not in str(caught.value)


def test_the_list_tells_of_every_server_whether_a_worker_has_seen_it_or_not(settings: Settings, ledger: Ledger) -> None:
    add(settings, facts())
    ledger.change_server("http://three", "added")
    ledger.change_server("http://three", "drained")
    seen = {"url": ONE, "state": "up", "in_flight": 3, "answers": 7, "since": 1.0, "reason": None, "version": "0.5.23"}
    ledger.heartbeat("w1@host", {"kind": "worker", "limit": 8, "in_flight": 3, "servers": [seen]})
    assert [
        (one["url"], one["state"], one["in_flight"], one["configured"]) for one in known_servers(settings, ledger)
    ] == [
        (ONE, "up", 3, True),
        (TWO, "unseen", 0, False),
        ("http://three", "drained", 0, False),
    ]
