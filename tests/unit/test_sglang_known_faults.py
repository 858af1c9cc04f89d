"""What is known of releases and launch arguments: some are refused, of some it is said what happens there."""

from typing import Any

import pytest

from common.errors import ServerRefused
from tests.unit.preflight_steps import URL, facts_of, paths_of, server, sglang
from workers.sglang.preflight import refuse, refuse_other_model, warnings_of


@pytest.mark.parametrize("version", ["0.5.5", "0.5.5.post3", "0.5.10", "0.5.23", "1.0.0", "0.0.0.dev1+g1a2b3c", None])
def test_a_good_or_unknown_version_is_taken(version: str | None) -> None:
    facts = facts_of(sglang(version=version))
    assert facts.version == version
    refuse(facts)


@pytest.mark.parametrize(
    ("version", "fault"),
    [
        ("0.4.4", "without output_ids"),
        ("0.4.10.post2", "without output_ids"),
        ("0.5.1", "ids of the prompt"),
        ("0.5.2rc1", "ids of the prompt"),
        ("v0.5.4.post1", "ids of the prompt"),
    ],
)
def test_a_version_whose_ids_are_wrong_is_refused(version: str, fault: str) -> None:
    with pytest.raises(ServerRefused) as caught:
        refuse(facts_of(sglang(version=version)))
    for words in (URL, version, fault, "--skip-tokenizer-init"):
        assert words in str(caught.value)
    refuse(facts_of(sglang(version=version, skip_tokenizer_init=True)))


POOL, ABORTS, GHOSTS = "KV pool runs full", "an abort that meets", "as a ghost"


@pytest.mark.parametrize(
    ("version", "faults"),
    [
        ("0.5.5", [POOL, ABORTS]),
        ("0.5.9.post1", [POOL, ABORTS]),
        ("0.5.10", [ABORTS]),
        ("0.5.13", [ABORTS]),
        ("0.5.14", []),
        ("0.5.17", []),
        ("0.5.18", [GHOSTS]),
        ("0.5.19", [GHOSTS]),
        ("0.5.20", []),
        ("0.0.0.dev1", []),
        (None, []),
    ],
)
def test_what_is_known_of_a_release_is_said(version: str | None, faults: list[str]) -> None:
    sentences = warnings_of(facts_of(sglang(version=version)))
    assert len(sentences) == len(faults)
    for sentence, words in zip(sentences, faults, strict=True):
        assert sentence.startswith(f"{URL}: SGLang {version}: ")
        assert words in sentence
        assert "\n" not in sentence


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"allow_auto_truncate": True}, "cuts prompts that are too long, and tokenmill rejects their answers"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype is fp8_e5m2"),
        ({"kv_cache_dtype": "fp4_e2m1"}, "kv_cache_dtype is fp4_e2m1"),
        ({"preferred_sampling_params": {"top_p": 0.5}}, 'preferred_sampling_params {"top_p":0.5} stand for'),
    ],
)
def test_what_a_launch_argument_does_is_said(changes: dict[str, Any], words: str) -> None:
    (sentence,) = warnings_of(facts_of(sglang(**changes)))
    assert sentence.startswith(f"{URL}: ")
    assert words in sentence


def test_what_a_router_cannot_do_is_said() -> None:
    (sentence,) = warnings_of(facts_of(server(paths_of() | {"/workers": {"workers": []}})))
    for words in ("cannot abort", "/health says only that itself lives", "logit_bias"):
        assert words in sentence


def test_a_reasoning_parser_is_no_fault() -> None:
    facts = facts_of(sglang(reasoning_parser="kimi_k2", kv_cache_dtype="bfloat16"))
    assert facts.reasoning_parser == "kimi_k2"
    assert warnings_of(facts) == []


def test_a_server_of_another_model_than_the_runs_is_refused() -> None:
    facts = facts_of(sglang())
    refuse_other_model(facts, {"model_path": "models/a", "weight_version": "default", "vocab_size": 5})
    refuse_other_model(facts, {"vocab_size": 5})
    with pytest.raises(ServerRefused, match="serves model 'models/a' and this run 'models/b'"):
        refuse_other_model(facts, {"model_path": "models/b", "weight_version": "default"})
    with pytest.raises(ServerRefused, match="serves weight version 'default' and this run None"):
        refuse_other_model(facts, {"model_path": "models/a", "weight_version": None})
