"""What a dataset may have of its own: sampling, max_new_tokens, arguments of the template; and how it is recorded."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.chat_template import Tokenizer
from common.errors import ServerRefused, ServerUnavailable, UsageError
from common.registered import Steering, keep_registered, read_registered
from common.run_file import read_run_file, refuse_changes, write_run_file
from common.sections import DatasetSettings
from common.settings import Settings, load_settings
from producer.enqueue import asked_facts, model_facts
from tests.conftest import REPO
from tests.unit.conftest import Write
from tests.unit.preflight_steps import facts_of, sglang
from tests.unit.settings_steps import TOKENIZER, faults

OWN = "max_new_tokens = 9\nchat_template_kwargs = { thinking = false }\n[datasets.sampling]\ntemperature = 0.6\n"
SHARED = {"model_path": "m", "weight_version": "w", "tokenizer_sha256": "t", "template_sha256": "c", "servers": []}


def configured(write: Write, *datasets: str, sampling: str = "max_new_tokens = 64\ntop_p = 0.9") -> Settings:
    """Datasets A, B, ... with these keys."""
    named = "".join(f'[[datasets]]\nname = "{chr(65 + n)}"\npath = "a"\n{more}\n' for n, more in enumerate(datasets))
    tokenizer = (
        f'[tokenizer]\npath = "{REPO}/examples/tokenizer"\nchat_template_kwargs = {{ a = 1, thinking = true }}\n'
    )
    return load_settings(write(f"{tokenizer}[sampling]\n{sampling}\n{named}"))


def facts(settings: Settings, *names: str) -> dict[str, Any]:
    chosen = [dataset for dataset in settings.datasets if dataset.name in (names or "AB")]
    return {**SHARED, **asked_facts(settings, chosen)}


def test_what_is_a_datasets_own_goes_over_what_holds_for_all(write: Write) -> None:
    settings = configured(write, OWN, "")
    own, other = settings.datasets

    assert settings.sampling_of(own).params() == {"max_new_tokens": 9, "temperature": 0.6, "top_p": 0.9}
    assert settings.sampling_of(other) == settings.sampling
    assert settings.template_kwargs_of(own) == {"a": 1, "thinking": False}
    assert settings.template_kwargs_of(other) == {"a": 1, "thinking": True}


def test_what_is_set_to_its_default_counts_as_set(write: Write) -> None:
    settings = configured(
        write, '[datasets.sampling]\ntemperature = 1.0\nfit = "reject"', sampling='temperature = 0.3\nfit = "cut"'
    )
    assert settings.sampling_of(settings.datasets[0]).temperature == 1.0
    assert settings.sampling_of(settings.datasets[0]).fit == "reject"


def test_it_is_the_same_after_the_ledger_and_the_file_of_the_dataset(write: Write, tmp_path: Path) -> None:
    settings = configured(write, OWN)
    (dataset,) = settings.datasets

    spec = json.loads(msgspec.json.encode(dataset.model_dump(mode="json")))
    assert spec["sampling"] == {"temperature": 0.6}
    assert settings.sampling_of(DatasetSettings(**spec)) == settings.sampling_of(dataset)
    (tmp_path / "A").mkdir()
    keep_registered(tmp_path, dataset, Steering())
    (kept,) = read_registered(tmp_path)
    assert settings.sampling_of(kept) == settings.sampling_of(dataset)
    assert kept.chat_template_kwargs == {"thinking": False}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("max_new_tokens = 0", "datasets[0].max_new_tokens: Input should be greater than 0"),
        (
            "[datasets.sampling]\ntemprature = 1",
            "unknown key datasets[0].sampling.temprature; did you mean temperature?",
        ),
        ("[datasets.sampling]\ntop_p = 2", "datasets[0].sampling.top_p: Input should be less than or equal to 1"),
        (
            "[datasets.sampling]\nmax_new_tokens = 2",
            "datasets[0].sampling: max_new_tokens is a key of the dataset itself; put it in front of",
        ),
        ('prompt_column = "question"', "unknown key datasets[0].prompt_column; use columns.prompt"),
        ('columns.promt = "question"', "unknown key datasets[0].columns.promt; did you mean prompt?"),
    ],
)
def test_a_fault_is_named(write: Write, more: str, said: str) -> None:
    path = write(f'{TOKENIZER}[[datasets]]\nname = "A"\npath = "a"\n{more}\n')
    (fault,) = faults(path)
    assert fault.startswith(f"{path}: {said}")


def test_run_json_has_it_for_each_dataset_and_keeps_those_not_asked_for(write: Write, tmp_path: Path) -> None:
    settings = configured(write, OWN, "")
    write_run_file(tmp_path, facts(settings, "A"))
    write_run_file(tmp_path, facts(settings, "B"))

    made = read_run_file(tmp_path)
    assert made is not None
    assert made["sampling_params"] == {"max_new_tokens": 64, "temperature": 1.0, "top_p": 0.9}
    assert made["datasets"] == {
        "A": {
            "chat_template_kwargs": {"a": 1, "thinking": False},
            "sampling_params": {"max_new_tokens": 9, "temperature": 0.6, "top_p": 0.9},
        },
        "B": {"chat_template_kwargs": made["chat_template_kwargs"], "sampling_params": made["sampling_params"]},
    }
    assert made["earlier"] == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "[datasets.sampling]\ntemperature = 0.7",
            "sampling_params of B was {.*'temperature': 1.0.*} and is {.*0.7.*}",
        ),
        ("max_new_tokens = 63", "sampling_params of B was {'max_new_tokens': 64.*} and is {'max_new_tokens': 63"),
        ("chat_template_kwargs = { b = 2 }", "chat_template_kwargs of B was {.*} and is {.*'b': 2}"),
    ],
)
def test_a_change_of_a_dataset_that_was_made_is_refused(write: Write, tmp_path: Path, more: str, said: str) -> None:
    write_run_file(tmp_path, facts(configured(write, OWN, "")))
    changed = facts(configured(write, OWN, more))

    with pytest.raises(UsageError, match=said):
        refuse_changes(tmp_path, changed)
    refuse_changes(tmp_path, facts(configured(write, OWN, more), "A"))  # B is not asked for
    write_run_file(tmp_path, changed)  # accepted
    made = read_run_file(tmp_path)
    assert made is not None
    assert [len(made["earlier"]), made["earlier"][0]["datasets"]["B"] == made["datasets"]["B"]] == [1, False]
    refuse_changes(tmp_path, changed)


def test_a_new_dataset_with_sampling_of_its_own_is_no_change(write: Write, tmp_path: Path) -> None:
    write_run_file(tmp_path, facts(configured(write, "")))
    refuse_changes(tmp_path, facts(configured(write, "", OWN)))


def test_a_change_for_all_is_said_once(write: Write, tmp_path: Path) -> None:
    write_run_file(tmp_path, facts(configured(write, "", "")))
    with pytest.raises(UsageError) as refused:
        refuse_changes(tmp_path, facts(configured(write, "", "", sampling="max_new_tokens = 65\ntop_p = 0.9")))
    assert str(refused.value).count("was {") == 1


def test_each_dataset_must_fit_the_context_and_the_router(write: Write) -> None:
    def made(*datasets: str, **server: Any) -> dict[str, Any]:
        settings = configured(write, *datasets, sampling="max_new_tokens = 1000")
        return model_facts(settings, settings.datasets, [found(**server)], Tokenizer(settings.tokenizer))

    def found(*, router: bool = False, **server: Any) -> Any:
        return msgspec.structs.replace(facts_of(sglang(**server)), router=router)

    assert made("max_new_tokens = 60", context_length=64)["context_length"] == 64
    with pytest.raises(ServerUnavailable, match=r"max_new_tokens 64 leaves no room .* lower max_new_tokens of B"):
        made("max_new_tokens = 60", "max_new_tokens = 64", context_length=64)
    with pytest.raises(ServerUnavailable, match=r"lower \[sampling\] max_new_tokens"):
        made("max_new_tokens = 60", "", context_length=64)
    assert made('[datasets.sampling]\nfit = "cut"', context_length=64)["context_length"] == 64
    with pytest.raises(ServerRefused, match="drops logit_bias"):
        made("", '[datasets.sampling]\nlogit_bias = { "2" = 1.0 }', router=True)


def test_a_misspelt_argument_of_a_dataset_is_said_with_its_name(write: Write) -> None:
    settings = configured(write, OWN, "chat_template_kwargs = { enable_thinking = false }")
    tokenizer = Tokenizer(settings.tokenizer)
    own, other = settings.datasets

    assert tokenizer.unread(own) == []
    (sentence,) = tokenizer.unread(other)
    assert sentence.startswith("dataset B chat_template_kwargs: enable_thinking = False changes no prompt")
