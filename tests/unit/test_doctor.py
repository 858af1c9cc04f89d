"""What `doctor` finds, with the servers played: each check, and the report as a person and a program read it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.settings import Settings, load_settings
from tests.conftest import REPO
from tests.unit.conftest import Write
from tests.unit.preflight_steps import INFO, paths_of, several
from workers.doctor import Report, examine, lines

IDS = 4096  # of the examples' tokenizer
Hosts = dict[str, dict[str, Any]]


def configured(
    write: Write, *hosts: str, tokenizer: Path = REPO / "examples" / "tokenizer", more: str = ""
) -> Settings:
    urls = json.dumps([f"http://{host}:30000" for host in hosts])
    text = f'[server]\nurls = {urls}\n[tokenizer]\npath = "{tokenizer}"\n[sampling]\nmax_new_tokens = 1000\n{more}'
    return load_settings(write(text))


def report(write: Write, hosts: Hosts, *urls: str, **settings: Any) -> Report:
    return examine(configured(write, *(urls or hosts), **settings), several(hosts))


def test_a_good_server_is_shown_and_nothing_is_said_against_it(write: Write) -> None:
    found = report(write, {"one": paths_of(vocab_size=IDS)})

    assert (found.warnings, found.refusals) == ([], [])
    assert list(lines(found)) == [
        "http://one:30000",
        "  version         0.5.23",
        "  model           models/a",
        "  weight version  default",
        "  context         2,048 tokens",
        "  vocabulary      4,096 ids",
        "  KV pool         4,096 tokens",
        "  running limit   8 requests",
        "  kv_cache_dtype  auto",
        "  stream mode     cumulative",
        "  router          no",
        "",
        "special ids of the tokenizer",
        "  think           4092",
        "  end of think    4093",
        "  end of answer   4090",
        "  tool            4094 <tool_call>",
        "  tool            4095 </tool_call>",
        "",
        "the server can be used",
    ]


def test_what_a_server_does_not_say_is_shown_as_that(write: Write) -> None:
    router = {"/server_info": {"max_total_num_tokens": 4096, "dp_size": 4}, "/workers": {"workers": []}}

    shown = list(lines(report(write, {"one": router})))

    assert "  version         (does not say)" in shown
    assert "  KV pool         4,096 tokens on each of 4 ranks" in shown
    assert "  router          yes" in shown


def test_servers_that_say_the_same_share_a_table(write: Write) -> None:
    shown = list(lines(report(write, {"one": paths_of(), "two": paths_of(dp_size=2), "three": paths_of()})))

    tables = "\n".join(line for line in shown if not line.startswith("  ")).split("\n\n")
    assert tables[:2] == ["http://one:30000\nhttp://three:30000", "http://two:30000"]
    assert tables[3:] == ["all 3 servers can be used"]


def test_every_fault_of_every_server_is_said(write: Write) -> None:
    hosts = {"one": paths_of(version="0.5.13"), "two": paths_of(version="0.5.2"), "four": paths_of(model_path="b")}

    found = report(write, hosts, "one", "two", "three", "four")

    assert [server.url for server in found.servers] == ["http://one:30000", "http://two:30000", "http://four:30000"]
    assert [sentence.partition(": ")[0] for sentence in found.warnings] == [
        "http://one:30000",
        "http://two:30000",
        "http://two:30000",
    ]
    assert [sentence.split()[0] for sentence in found.refusals] == [
        "http://three:30000",
        "http://two:30000",
        "http://four:30000",
    ]
    away, old, other = found.refusals
    assert "cannot be reached (Connection refused)" in away
    assert "SGLang 0.5.2, which puts ids of the prompt into output_ids" in old
    assert "serves model 'b' and http://one:30000 'models/a'" in other
    shown = list(lines(found))
    assert shown[-3:] == [f"cannot be used: {sentence}" for sentence in found.refusals]
    assert [line for line in shown if line.startswith("warning: ")] == [f"warning: {line}" for line in found.warnings]


@pytest.mark.parametrize("ids", [IDS - 1, IDS + 64])
def test_another_vocabulary_than_the_tokenizers_is_said(write: Write, ids: int) -> None:
    found = report(write, {"one": paths_of(vocab_size=ids)})

    (sentence,) = found.warnings
    assert sentence.startswith(
        f"http://one:30000 knows {ids:,} ids and the tokenizer in {REPO}/examples/tokenizer 4,096;"
    )
    assert found.refusals == []


def test_a_pool_that_cuts_answers_off_is_said(write: Write) -> None:
    found = report(write, {"one": paths_of(max_total_num_tokens=1000)})

    (sentence,) = found.warnings
    assert sentence.startswith("http://one:30000 has a KV pool of 1,000 tokens and cuts off answers that do not fit")


def test_a_context_without_room_for_a_prompt_is_a_refusal(write: Write) -> None:
    found = report(write, {"one": paths_of(context_length=1000), "two": paths_of(context_length=1001)})

    (sentence,) = found.refusals
    assert sentence.startswith("http://one:30000 has a context of 1,000 tokens, where max_new_tokens 1,000 leaves no")


def test_the_longest_answers_of_any_dataset_count(write: Write) -> None:
    own = '[[datasets]]\nname = "A"\npath = "a"\nmax_new_tokens = 1500\n'
    other = '[[datasets]]\nname = "B"\npath = "b"\nmax_new_tokens = 10\n'

    (sentence,) = report(write, {"one": paths_of(context_length=1500, vocab_size=IDS)}, more=own + other).refusals
    assert "max_new_tokens 1,500 leaves no room for a prompt; lower max_new_tokens of A" in sentence
    assert report(write, {"one": paths_of(context_length=900)}, more=other).refusals == []


def test_arguments_of_the_template_that_change_nothing_are_said(write: Write) -> None:
    own = "chat_template_kwargs = { enable_thinking = true, thinking = false }\n"
    more = f'[[datasets]]\nname = "A"\npath = "a"\n{own}'

    (sentence,) = report(write, {"one": paths_of(vocab_size=IDS)}, more=more).warnings
    assert sentence.startswith("dataset A chat_template_kwargs: enable_thinking = True changes no prompt; did you mean")


def test_a_tokenizer_that_does_not_load_is_a_refusal_and_the_servers_are_shown(write: Write, tmp_path: Path) -> None:
    found = report(write, {"one": paths_of(vocab_size=5)}, tokenizer=tmp_path / "none")

    assert [server.version for server in found.servers] == ["0.5.23"]
    (sentence,) = found.refusals
    assert sentence.startswith(f"[tokenizer] path {tmp_path / 'none'} is not a folder")


def test_the_report_is_one_object_without_keys(write: Write) -> None:
    written = msgspec.json.encode(report(write, {"one": paths_of()}))

    told = json.loads(written)
    assert set(told) == {"servers", "special_ids", "warnings", "refusals"}
    assert told["special_ids"]["end"] == [4090]
    assert told["servers"][0]["max_total_num_tokens"] == INFO["max_total_num_tokens"]
    assert b"never-to-be-stored" not in written
