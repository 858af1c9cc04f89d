"""What `doctor`, the start of a job and a worker find by trying a simulated server: each release, each fault."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from common.chat_template import Tokenizer
from common.errors import ServerRefused, UnavailableError, UsageError
from common.ledger import Ledger
from common.sections import SamplingSettings, ServerSettings, TokenizerSettings
from common.settings import Settings, load_settings
from tests.conftest import REPO
from tests.contract.conftest import simulated
from tests.integration.worker_steps import VOCAB_SIZE, Server, run, until
from workers.doctor.examine import examine
from workers.doctor.report import Report
from workers.doctor.start import Beginning, forced, is_known, look_at, look_before
from workers.service import Service
from workers.sglang.http import AiohttpHttp
from workers.sglang.preflight import ServerFacts, read_facts
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.server import Simulator

TOKENIZER = REPO / "examples" / "tokenizer"
EXAMPLE: dict[str, Any] = {
    "vocab_size": 4096,
    "last_id": 4087,
    "end_token_id": 4090,
    "think_end_token_id": 4093,
    "mean_tokens": 40.0,
    "cv": 0.1,
    "speed": 0.0,
    "tokenizer": str(TOKENIZER),
}
Start = Callable[..., Simulator]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts simulated servers of the examples' tokenizer; settings given replace that."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(simulated(**{**EXAMPLE, **settings}))


def configured(folder: Path, *servers: Simulator, tokenizer: Path = TOKENIZER) -> Settings:
    urls = json.dumps([server.url for server in servers])
    path = folder / "tokenmill.toml"
    path.write_text(f'[server]\nurls = {urls}\n[tokenizer]\npath = "{tokenizer}"\n[sampling]\nmax_new_tokens = 2000\n')
    return load_settings(path)


def findings(report: Report) -> dict[str, str]:
    """What is not ok, by name."""
    return {check.name: check.state for check in report.checks if check.state != "ok"}


def said(report: Report, name: str) -> str:
    [check] = [check for check in report.checks if check.name == name]
    return check.says


def test_a_good_server_is_tried_and_nothing_is_said_against_it(start: Start, tmp_path: Path) -> None:
    server = start()

    found = examine(configured(tmp_path, server))

    assert findings(found) == {}
    assert said(found, "tokenizer") == "a text of many scripts gives the same ids on both sides (124)"
    assert said(found, "probe_answers").startswith("5 are good, ")
    assert said(found, "probe_greedy") == "one prompt twice at temperature 0 gives the same 16 ids"
    assert said(found, "probe_think") == "the prompt opens the think block, and all 3 answers that ended closed it"
    assert said(found, "probe_end") == "3 of 3 answers ended, each with its end token"
    assert (server.totals.taken, server.totals.finished) == (5, 5)


def test_without_a_probe_no_work_is_sent(start: Start, tmp_path: Path) -> None:
    server = start()

    found = examine(configured(tmp_path, server), probe=False)

    assert findings(found) == {}
    assert not {"tokenizer", "probe_answers"} & {check.name for check in found.checks}
    assert server.totals.taken == 0


@pytest.mark.parametrize(
    ("profile", "wanted", "taken"),
    [
        ("0.5.2", {"release": "wrong"}, 0),
        ("0.5.9", {"release": "warning"}, 5),
        ("0.5.13", {"release": "warning"}, 5),
        ("0.5.19", {"release": "warning"}, 5),
        ("0.5.23", {}, 5),
    ],
)
def test_each_release(start: Start, tmp_path: Path, profile: str, wanted: dict[str, str], taken: int) -> None:
    server = start(profile=profile)

    found = examine(configured(tmp_path, server))

    assert {check.name: check.state for check in found.of("wrong")} == {
        name: state for name, state in wanted.items() if state == "wrong"
    }
    assert set(findings(found)) == set(wanted)
    assert server.totals.taken == taken


def test_a_server_that_reads_no_text_is_asked_with_sure_ids_alone(start: Start, tmp_path: Path) -> None:
    server = start(tokenizer=None, skip_tokenizer_init=True)

    found = examine(configured(tmp_path, server))

    assert findings(found) == {}
    assert said(found, "tokenizer").startswith("not compared: with --skip-tokenizer-init it reads no text")
    tried, unasked = [check.says for check in found.checks if check.name == "probe_answers"]
    assert tried.startswith("2 are good, 32 ids")
    assert unasked.startswith("no question was asked: it neither reads text nor says how many ids it knows")
    assert server.totals.taken == 2


def test_a_model_that_does_not_close_its_thoughts_is_said(start: Start, tmp_path: Path) -> None:
    found = examine(configured(tmp_path, start(think_end_token_id=None)))

    assert findings(found) == {"probe_think": "warning"}
    assert said(found, "probe_think").endswith(": 3 of 3 answers ended without </think>")


def test_a_model_that_does_not_think_is_said(start: Start, tmp_path: Path) -> None:
    found = examine(configured(tmp_path, start(faults=("no_thinking",))))

    assert findings(found) == {"probe_think": "warning"}
    assert "the think blocks of all 3 answers that ended are empty" in said(found, "probe_think")


def test_an_end_that_the_tokenizer_does_not_name_is_said(start: Start, tmp_path: Path) -> None:
    found = examine(configured(tmp_path, start(end_token_id=4091)))

    assert findings(found)["probe_end"] == "warning"
    assert "it ends answers with 4091, which the tokenizer's files do not name" in said(found, "probe_end")


def other_tokenizer(folder: Path) -> Path:
    """The examples' tokenizer with two of its words in each other's place."""
    shutil.copytree(TOKENIZER, folder)
    path = folder / "tokenizer.json"
    model = json.loads(path.read_text())
    vocab = model["model"]["vocab"]
    vocab["e"], vocab["o"] = vocab["o"], vocab["e"]
    path.write_text(json.dumps(model))
    return folder


def test_another_tokenizer_than_the_servers_is_wrong_and_gets_no_ids(start: Start, tmp_path: Path) -> None:
    server = start()

    found = examine(configured(tmp_path, server, tokenizer=other_tokenizer(tmp_path / "other")))

    assert findings(found) == {"tokenizer": "wrong"}
    assert "it reads a text otherwise than the tokenizer in" in said(found, "tokenizer")
    assert server.totals.taken == 2  # of the ids that every model knows


@pytest.mark.parametrize(
    "fault",
    ["no_output_ids", "lost_id", "prompt_leak", "nan", "truncated_prompt", "weight_version", "bad_output_id"],
)
def test_answers_that_cannot_be_trusted_stop_a_job_at_its_start(start: Start, tmp_path: Path, fault: str) -> None:
    server = start(faults=(fault,))
    settings = configured(tmp_path, server)

    assert examine(settings).of("wrong")[0].name == "probe_answers"
    beginning = Beginning(settings, [])
    report = beginning.report(Tokenizer(settings.tokenizer))
    assert findings(report) == {"probe_answers": "wrong"}
    with pytest.raises(UnavailableError) as caught:
        beginning.warnings(report)
    assert str(caught.value).startswith(f"{server.url}: 2 of 2 short answers were not good") or fault == "bad_output_id"
    assert str(caught.value).endswith("; or go on all the same with --force")


def test_a_forced_start_says_what_is_wrong_and_goes_on(start: Start, tmp_path: Path) -> None:
    settings = configured(tmp_path, start(faults=("nan",)))

    beginning = Beginning(settings, [], force=True)
    report = beginning.report(Tokenizer(settings.tokenizer))

    [sentence] = beginning.warnings(report)
    assert sentence.startswith("forced: ")
    assert [one["name"] for one in forced(report)] == ["probe_answers"]


@pytest.mark.parametrize("fault", ["status:status=500", "reset", "html"])
def test_what_may_pass_stops_no_job(start: Start, tmp_path: Path, fault: str) -> None:
    settings = configured(tmp_path, start(faults=(fault,)))

    assert findings(examine(settings)) == {"probe_answers": "wrong"}
    beginning = Beginning(settings, [])
    report = beginning.report(Tokenizer(settings.tokenizer))
    assert findings(report) == {"probe_answers": "warning"}
    assert len(beginning.warnings(report)) == 1


def test_a_start_asks_for_two_short_answers_of_each_server(start: Start, tmp_path: Path) -> None:
    servers = start(), start()
    settings = configured(tmp_path, *servers)

    beginning = Beginning(settings, [])
    report = beginning.report(Tokenizer(settings.tokenizer))

    assert (findings(report), beginning.warnings(report)) == ({}, [])
    assert [server.totals.completion_tokens for server in servers] == [32, 32]


def test_a_paused_server_is_let_go(start: Start, tmp_path: Path) -> None:
    server = start(speed=1.0)
    server.process.pause("in_place")
    settings = configured(tmp_path, server)

    beginning = Beginning(settings, [])
    report = beginning.report(Tokenizer(settings.tokenizer))

    assert findings(report) == {"probe_answers": "warning"}
    assert "(late): no answer within 3 s" in said(report, "probe_answers")


def test_another_model_is_left_out_if_it_is_forced(start: Start, tmp_path: Path) -> None:
    settings = configured(tmp_path, start(), start(model_path="other"))

    with pytest.raises(ServerRefused, match="serves model 'other'"):
        Beginning(settings, [])
    beginning = Beginning(settings, [], force=True)
    assert [server.model_path for server in beginning.servers] == ["simulated"]


def facts_of(url: str) -> ServerFacts:
    async def ask() -> ServerFacts:
        http = AiohttpHttp(1)
        try:
            return await read_facts(url, None, http)
        finally:
            await http.aclose()

    return asyncio.run(ask())


def test_a_worker_trusts_servers_like_those_of_the_start(start: Start) -> None:
    known = [
        {
            "url": "http://one",
            **{name: getattr(facts_of(start().url), name) for name in ServerFacts.__struct_fields__[1:]},
        }
    ]

    assert is_known(facts_of(start(max_running_requests=7).url), known)
    assert not is_known(facts_of(start(profile="0.5.19").url), known)
    assert not is_known(facts_of(start(says=("kv_cache_dtype=fp8_e5m2",)).url), known)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, {}),
        ({"says": ("kv_cache_dtype=fp8_e5m2",)}, {"kv_cache_dtype": "warning"}),
        ({"faults": ("lost_id",)}, {"probe_answers": "wrong"}),
        ({"context_length": 4096}, {"context": "wrong"}),
    ],
)
def test_a_worker_looks_at_others(
    start: Start, tmp_path: Path, settings: dict[str, Any], wanted: dict[str, str]
) -> None:
    server = start(**settings)

    async def look() -> dict[str, str]:
        http = AiohttpHttp(4)
        try:
            facts = await read_facts(server.url, None, http)
            checks = await look_at(facts, None, http, configured(tmp_path, server), 131_072)
        finally:
            await http.aclose()
        return {check.name: check.state for check in checks}

    assert asyncio.run(look()) == wanted


def test_a_server_is_looked_at_before_it_is_added(start: Start, tmp_path: Path) -> None:
    good, bad = start(says=("kv_cache_dtype=fp8_e5m2",)), start(faults=("lost_id",))

    [warning] = look_before(facts_of(good.url), configured(tmp_path, good))
    assert warning.startswith(f"{good.url}: kv_cache_dtype is fp8_e5m2")
    with pytest.raises(ServerRefused, match="2 of 2 short answers were not good"):
        look_before(facts_of(bad.url), configured(tmp_path, good))


def test_what_a_simulated_server_is_to_say_has_a_key() -> None:
    with pytest.raises(UsageError, match="KEY=VALUE"):
        SimulatorConfig(says=("fp8",))


@pytest.mark.parametrize(
    ("model", "state"),
    [
        ({"servers": [{"version": "0.5.9"}]}, "unfit"),
        ({"servers": [{"version": "0.5.9"}], "forced": [{"name": "probe_answers"}]}, "up"),
        ({}, "up"),  # of a version that noted no servers
    ],
)
def test_a_worker_takes_no_server_of_another_kind_with_which_something_is_wrong(
    valkey: str, ledger: Ledger, tmp_path: Path, model: dict[str, Any], state: str
) -> None:
    async def test() -> None:
        async with Server(speed=0.0, faults=("lost_id",)) as server:
            settings = Settings(
                output=tmp_path,
                redis=valkey,
                server=ServerSettings(urls=[server.url]),
                tokenizer=TokenizerSettings(path=tmp_path),
                sampling=SamplingSettings(max_new_tokens=64),
            )
            service = Service(settings, owner="w1@host", concurrency=3)
            ledger.set_model({"vocab_size": VOCAB_SIZE, "weight_version": "default", **model})
            await service.start()
            await until("the server was looked at", lambda: seen() not in {None, "checking"})
            found, tried = seen(), server.totals.taken
            await service.stop(0)
            assert found == state
            assert bool(tried) == ("servers" in model)

    def seen() -> Any:
        servers = ledger.processes().get("w1@host", (0, {}))[1].get("servers") or [{}]
        return servers[0].get("state")

    run(test)
