"""A wrong configuration is told in one sentence for each fault, with its file and key."""

import os
import re
from pathlib import Path

import pytest

from common.sections import TokenizerSettings
from common.settings import MAX_SOCKET_PATH, Settings, load_settings
from tests.unit.conftest import Write
from tests.unit.settings_steps import TOKENIZER, faults

DATASET = '[[datasets]]\nname = "{}"\npath = "data.jsonl"\n'


def test_a_small_file_is_enough(write: Write) -> None:
    settings = load_settings(write(TOKENIZER + DATASET.format("b1") + "cap_tokens = 10_000_000\n"))

    assert settings.embedded
    assert settings.server.urls == ["http://127.0.0.1:30000"]
    assert settings.sampling.params() == {"max_new_tokens": 10240, "temperature": 1.0}
    assert [(d.name, d.cap_tokens, d.count) for d in settings.datasets] == [("b1", 10_000_000, "completion")]
    assert settings.server.request_timeout_seconds is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('outptu = "x"\n' + TOKENIZER, "unknown key outptu; did you mean output?"),
        ("wholly_other = 1\n" + TOKENIZER, "unknown key wholly_other; "),
        (TOKENIZER + "vocabsize = 3\n", "unknown key tokenizer.vocabsize; did you mean vocab_size?"),
        (TOKENIZER + "[sampling]\nmax_tokens = 3\n", "unknown key sampling.max_tokens; did you mean max_new_tokens?"),
        (TOKENIZER + "[server]\nurl = []\n", "unknown key server.url; did you mean urls?"),
        (TOKENIZER + DATASET.format("b1") + "cap = 3\n", "unknown key datasets[0].cap; did you mean cap_tokens?"),
        ("", "tokenizer is missing"),
        ("[tokenizer]\n", "tokenizer.path is missing"),
        (TOKENIZER + '[[datasets]]\nname = "b1"\n', "datasets[0].path is missing"),
        (TOKENIZER + DATASET.format("b1") + "cap_tokens = 0\n", "datasets[0].cap_tokens: Input should be greater"),
        (TOKENIZER + DATASET.format("b1") + "cap_tokens = -1\n", "datasets[0].cap_tokens: Input should be greater"),
        (TOKENIZER + DATASET.format("b1") + 'cap_tokens = "0k"\n', "datasets[0].cap_tokens: Input should be greater"),
        (TOKENIZER + DATASET.format("b1") + 'cap_tokens = "10 M"\n', "datasets[0].cap_tokens: '10 M' is no number of"),
        (TOKENIZER + DATASET.format("b1") + 'count = "all"\n', "datasets[0].count: Input should be 'completion' or"),
        (TOKENIZER + DATASET.format("b1") + "shuffle = false\n", "datasets[0].shuffle: Input should be a valid int"),
        (TOKENIZER + DATASET.format("b1") + "shuffle = -1\n", "datasets[0].shuffle: Input should be greater than or"),
        (TOKENIZER + DATASET.format("b1") + "limit = 0\n", "datasets[0].limit: Input should be greater than 0"),
        (TOKENIZER + DATASET.format("b1") + "dedupe = true\n", "datasets[0].dedupe: Input should be 'dataset' or"),
        (
            TOKENIZER + DATASET.format("b1") + 'dedupe = "all"\nturns = "all"\n',
            'datasets[0]: dedupe compares the one prompt of a row, and with turns = "all" a row has many; leave one',
        ),
        ('redis = "http://localhost"\n' + TOKENIZER, 'redis: must be "embedded" or a redis://, rediss:// or unix://'),
        ('redis = "localhost:6379"\n' + TOKENIZER, 'redis: must be "embedded" or a redis://, rediss:// or unix://'),
        ('redis = "redis://:pa/ss@host"\n' + TOKENIZER, "redis: has no valid port; write / # @ : in a password as"),
        (TOKENIZER + '[server]\nurls = ["ftp://x"]\n', "server.urls: 'ftp://x' is no http:// or https:// address"),
        (TOKENIZER + "[server]\nurls = []\n", "server.urls: List should have at least 1 item"),
        (TOKENIZER + "[sampling]\ntemperature = nan\n", "sampling.temperature: Input should be a finite number"),
        (TOKENIZER + "[worker]\nlease_seconds = inf\n", "worker.lease_seconds: Input should be a finite number"),
        ("server = 3\n" + TOKENIZER, "server: Input should be a valid table"),
        (TOKENIZER + '[datasets]\nname = "b1"\n', "datasets: Input should be a valid list"),
    ],
)
def test_a_fault_names_the_file_the_key_and_the_way_out(write: Write, text: str, said: str) -> None:
    path = write(text)

    (fault,) = faults(path)

    assert fault.startswith(f"{path}: {said}")


@pytest.mark.parametrize(
    ("cap", "tokens"), [("12M", 12_000_000), ("2.5k", 2500), ("10_000", 10_000), ("1G", 10**9), ("none", None)]
)
def test_a_cap_is_written_as_on_the_command_line(write: Write, cap: str, tokens: int | None) -> None:
    settings = load_settings(write(TOKENIZER + DATASET.format("b1") + f'cap_tokens = "{cap}"\n'))
    assert settings.datasets[0].cap_tokens == tokens


@pytest.mark.parametrize("name", ["a/b", "../b1", "..", ".", ".hidden", "", "x" * 65, "b 1", "b1\\n", "run.json", "ü"])
def test_a_dataset_name_cannot_leave_the_output_folder(write: Write, name: str) -> None:
    path = write(TOKENIZER + DATASET.format(name))

    (fault,) = faults(path)

    assert fault.startswith(f"{path}: datasets[0].name: ")
    assert "cannot be a dataset's name; use 1 to 64 of the characters" in fault


@pytest.mark.parametrize("name", ["a", "x" * 64, "B1_glaive-v2.1", "a..b", "-", "_"])
def test_a_plain_dataset_name_is_taken(write: Write, name: str) -> None:
    assert load_settings(write(TOKENIZER + DATASET.format(name))).datasets[0].name == name


@pytest.mark.parametrize(("first", "second"), [("glaive", "glaive"), ("a", "a"), ("Glaive", "gLAIVE")])
def test_two_datasets_of_one_name_are_refused(write: Write, first: str, second: str) -> None:
    path = write(TOKENIZER + DATASET.format(first) + DATASET.format("other") + DATASET.format(second))

    (fault,) = faults(path)

    assert fault.startswith(f"{path}: datasets[0] and datasets[2] have one name, {second!r}")


def test_every_fault_has_a_line(write: Write) -> None:
    path = write('redis = "x"\n' + TOKENIZER + DATASET.format("b/1") + "cap_tokens = 0\n")

    assert [re.sub(rf"{re.escape(str(path))}: ([^:]+): .*", r"\1", fault) for fault in faults(path)] == [
        "redis",
        "datasets[0].name",
        "datasets[0].cap_tokens",
    ]


def test_a_missing_file_is_told_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"

    says = "write it (docs/configuration.md has the keys) or name another with -c FILE"
    assert faults(path) == [f"{path} does not exist; {says}"]


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    assert faults(tmp_path) == [f"{tmp_path} cannot be read: Is a directory"]


def test_bad_toml_is_told_with_its_line(write: Write) -> None:
    path = write('output = "out"\nredis = embedded\n')

    (fault,) = faults(path)

    assert fault.startswith(f"{path} is not valid TOML: ")
    assert "at line 2" in fault


def test_a_byte_order_mark_is_no_fault(write: Write) -> None:
    assert load_settings(write("\ufeff" + TOKENIZER)).embedded


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("TOKENMILL_OUTPU", "; did you mean TOKENMILL_OUTPUT?"),
        ("TOKENMILL_API_KEY", "; did you mean TOKENMILL_SERVER__API_KEY?"),
        ("TOKENMILL_SAMPLINGS__TOP_P", "; did you mean TOKENMILL_SAMPLING__TOP_P?"),
    ],
)
def test_an_unknown_variable_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    monkeypatch.setenv(name, "1")

    assert faults(write(TOKENIZER)) == [f"the environment variable {name} is not a key of the configuration{said}"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TOKENMILL_SAMPLING__MAX_TOKENS", "3", "unknown key sampling.max_tokens; did you mean max_new_tokens?"),
        ("TOKENMILL_SAMPLING__MAX_NEW_TOKENS", "many", "sampling.max_new_tokens: Input should be a valid integer"),
        ("TOKENMILL_REDIS", "x", 'redis: must be "embedded" or'),
        ("TOKENMILL_DATASETS", '[{"name": "b1"}]', "datasets[0].path is missing"),
    ],
)
def test_a_wrong_value_in_the_environment_is_not_blamed_on_the_file(
    write: Write, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)

    (fault,) = faults(write(TOKENIZER + "[sampling]\nmax_new_tokens = 5\n"))

    assert fault.startswith(f"the environment variable {name}: {said}")


@pytest.mark.parametrize("name", ["TOKENMILL_SERVER__URLS", "TOKENMILL_SERVER"])
def test_a_list_in_the_environment_that_is_no_json_is_told(
    write: Write, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "http://localhost:30000")

    (fault,) = faults(write(TOKENIZER))

    assert fault.startswith(
        "the environment variables of TOKENMILL_SERVER cannot be read; write lists and tables as JSON"
    )


def test_other_variables_are_none_of_ours(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_DEBUG", "1")
    monkeypatch.setenv("OUTPUT", "elsewhere")

    assert load_settings(write(TOKENIZER)).output.name == "out"


def test_the_environment_wins_over_the_file_key_by_key(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_OUTPUT", "elsewhere")
    monkeypatch.setenv("TOKENMILL_SAMPLING__MAX_NEW_TOKENS", "7")
    monkeypatch.setenv("TOKENMILL_SERVER__URLS", '["https://a:1/", "http://b"]')

    path = write('output = "out"\n' + TOKENIZER + "[sampling]\nmax_new_tokens = 5\ntop_p = 0.5\n")
    settings = load_settings(path)

    assert settings.output == path.parent / "elsewhere"
    assert settings.sampling.params() == {"max_new_tokens": 7, "temperature": 1.0, "top_p": 0.5}
    assert settings.server.urls == ["https://a:1", "http://b"]


def test_the_file_is_named_by_the_environment_unless_given(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = write('output = "given"\n' + TOKENIZER)
    (tmp_path / "other.toml").write_text('output = "other"\n' + TOKENIZER)
    monkeypatch.setenv("TOKENMILL_CONFIG", str(tmp_path / "other.toml"))

    assert load_settings().output == tmp_path / "other"
    assert load_settings(given).output == tmp_path / "given"


def test_relative_paths_are_relative_to_the_file(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write('output = "../out"\n' + TOKENIZER + DATASET.format("b1") + '[server]\napi_key_file = "k"\n')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    settings = load_settings(path)

    assert settings.output == tmp_path.parent / "out"
    assert settings.tokenizer.path == tmp_path / "tok"
    assert settings.datasets[0].path == tmp_path / "data.jsonl"
    assert settings.server.api_key_file == tmp_path / "k"


def test_absolute_and_home_paths_stay(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")

    settings = load_settings(write('output = "/data/out"\n[tokenizer]\npath = "~/tok"\n'))

    assert settings.output == Path("/data/out")
    assert settings.tokenizer.path == Path("/home/someone/tok")


def test_a_home_that_nobody_has_is_told(write: Write) -> None:
    path = write('output = "~nobody-of-this-name/out"\n' + TOKENIZER)

    (fault,) = faults(path)

    assert fault.startswith(f"{path}: a path starts with ~ and has no home directory behind it")


def test_the_socket_stands_in_the_output_folder_where_its_path_is_short() -> None:
    settings = Settings(output=Path("/o"), tokenizer=TokenizerSettings(path=Path("tok")))

    assert settings.redis_socket == Path("/o/.redis/valkey.sock")
    assert settings.redis_url == "unix:///o/.redis/valkey.sock"


def test_a_long_output_path_gives_a_short_socket_path_of_its_own() -> None:
    first, again, second = (
        Settings(output=Path("/o") / ("x" * 200) / name, tokenizer=TokenizerSettings(path=Path("tok"))).redis_socket
        for name in "aab"
    )

    assert len(os.fsencode(first)) <= MAX_SOCKET_PATH
    assert first == again != second


def test_settings_are_frozen(write: Write) -> None:
    settings = load_settings(write(TOKENIZER))

    with pytest.raises(ValueError, match="frozen"):
        settings.output = Path("x")
