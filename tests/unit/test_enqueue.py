"""What a run is made of, from the servers that answered and the tokenizer."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.chat_template import Tokenizer
from common.errors import ServerRefused, ServerUnavailable
from common.sections import DatasetSettings
from common.settings import Settings, load_settings
from producer.enqueue import model_facts, small_caps
from tests.conftest import REPO
from tests.unit.conftest import Write
from tests.unit.preflight_steps import facts_of, sglang
from workers.sglang.preflight import ServerFacts

IDS = 4096  # of the examples' tokenizer
DATASET = '[[datasets]]\nname = "A"\npath = "a.jsonl"\n'


def configured(write: Write, server: str = "") -> Settings:
    tokenizer = REPO / "examples" / "tokenizer"
    return load_settings(
        write(f'[tokenizer]\npath = "{tokenizer}"\n[sampling]\nmax_new_tokens = 64\n{server}\n{DATASET}')
    )


def facts(write: Write, *servers: dict[str, Any], server: str = "") -> dict[str, Any]:
    return made(configured(write, server), *(facts_of(sglang(**changes)) for changes in servers))


def made(settings: Settings, *servers: ServerFacts) -> dict[str, Any]:
    return model_facts(settings, settings.datasets, servers, Tokenizer(settings.tokenizer))


def test_the_facts_of_the_servers_are_kept_without_keys(write: Write) -> None:
    found = facts(write, {}, {"version": "0.5.20", "kv_cache_dtype": "fp8_e4m3"})

    assert [(one["version"], one["kv_cache_dtype"]) for one in found["servers"]] == [
        ("0.5.23", "auto"),
        ("0.5.20", "fp8_e4m3"),
    ]
    assert (found["model_path"], found["weight_version"], found["vocab_size"]) == ("models/a", "default", IDS)
    assert "never-to-be-stored" not in repr(found)


@pytest.mark.parametrize(("told", "counts"), [([IDS + 64, None], IDS), ([None, 4000, 4032], 4000)])
def test_the_smallest_vocabulary_counts(write: Write, told: list[int | None], counts: int) -> None:
    assert facts(write, *({"vocab_size": ids} for ids in told))["vocab_size"] == counts


def test_the_shortest_context_counts_unless_one_is_configured(write: Write) -> None:
    servers = ({"context_length": 900}, {"context_length": 800})

    assert facts(write, *servers)["context_length"] == 800
    assert facts(write, *servers, server="[server]\ncontext_length = 500\n")["context_length"] == 500
    with pytest.raises(ServerUnavailable, match="max_new_tokens 64 leaves no room"):
        facts(write, {"context_length": 64})
    assert facts(write, {"context_length": 64}, server='fit = "cut"\n')["context_length"] == 64


def test_the_ids_that_steer_an_answer_are_kept(write: Write) -> None:
    tools = {"<tool_call>": 4094, "</tool_call>": 4095}
    assert facts(write, {})["special_ids"] == {"think": 4092, "think_end": 4093, "end": (4090,), "tools": tools}


def test_how_a_prompt_fits_is_no_sampling_parameter(write: Write) -> None:
    assert facts(write, {}, server='fit = "cut"\n')["sampling_params"] == facts(write, {})["sampling_params"]


def test_a_router_that_would_drop_a_parameter_is_refused(write: Write) -> None:
    router = msgspec.structs.replace(facts_of(sglang()), router=True)

    assert made(configured(write), router)["servers"][0]["router"] is True
    with pytest.raises(ServerRefused, match="is a router, which drops logit_bias without a word"):
        made(configured(write, 'logit_bias = { "2" = 5.0 }\n'), facts_of(sglang()), router)


@pytest.mark.parametrize(
    ("cap_tokens", "mean_tokens", "is_small"),
    [(None, None, False), (319, None, True), (320, None, False), (59, 6, True), (60, 6, False)],
)
def test_a_cap_of_less_than_ten_answers_is_warned_of(
    cap_tokens: int | None, mean_tokens: int | None, is_small: bool
) -> None:
    dataset = DatasetSettings(name="A", path=Path("a.jsonl"), cap_tokens=cap_tokens, mean_tokens=mean_tokens)
    warnings = list(small_caps([dataset], max_new_tokens=64))
    assert bool(warnings) is is_small
    longer = dataset.model_copy(update={"max_new_tokens": 640})
    assert any(small_caps([longer], max_new_tokens=64)) is (
        cap_tokens is not None and cap_tokens < 10 * (mean_tokens or 320)
    )
    assert all(warning.startswith(f"A: its cap of {cap_tokens} tokens") for warning in warnings)
