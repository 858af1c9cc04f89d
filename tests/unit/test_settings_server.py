"""[server]: addresses and API keys; a key or a password is in no file of the configuration, and in no message."""

import re
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.settings import load_settings
from tests.unit.conftest import Write
from tests.unit.settings_steps import TOKENIZER, faults


def test_an_api_key_in_the_file_is_refused_and_not_repeated(write: Write) -> None:
    path = write(TOKENIZER + '[server]\napi_key = "sesame"\n')

    (fault,) = faults(path)

    assert fault.startswith(f"{path}: [server] api_key does not belong in a configuration file")
    assert "TOKENMILL_SERVER__API_KEY" in fault
    assert "sesame" not in fault


def test_the_api_key_comes_from_the_environment_and_is_not_shown(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_SERVER__API_KEY", "sesame")

    settings = load_settings(write(TOKENIZER))

    assert settings.api_key == "sesame"
    assert "sesame" not in repr(settings)
    assert "sesame" not in settings.model_dump_json()


def test_the_api_key_comes_from_a_file_beside_the_configuration(write: Write, tmp_path: Path) -> None:
    settings = load_settings(write(TOKENIZER + '[server]\napi_key_file = "key"\n'))

    with pytest.raises(ConfigError, match=r"\[server\] api_key_file .*key: No such file"):
        _ = settings.api_key
    (tmp_path / "key").write_text("sesame\n")
    assert settings.api_key == "sesame"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; write the key into it"),
        (b" \n", "is empty; write the key into it"),
        (b"sesame\nsecond\n", "holds more than one line"),
        (b"sesame\x1b", "holds more than one line, or characters that no key has"),
        (b"\xff\xfes", "is not text"),
    ],
)
def test_a_file_that_holds_no_key_is_told_and_not_repeated(
    write: Write, tmp_path: Path, content: bytes, said: str
) -> None:
    settings = load_settings(write(TOKENIZER + '[server]\napi_key_file = "key"\n'))
    (tmp_path / "key").write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        settings.api_key_of("http://one")

    assert str(caught.value).startswith(f"[server] api_key_file {tmp_path / 'key'} {said}")
    assert "sesame" not in str(caught.value)


KEY_FILES = '[server.api_key_files]\n"http://one:1/" = "one"\n"http://two:1" = "two"\n'


def test_a_server_has_its_own_key_or_the_general_one(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_SERVER__API_KEY", "general\n")
    monkeypatch.setenv(
        "TOKENMILL_SERVER__API_KEYS",
        '{"http://two:1/": "from the environment", "http://three:1": "3", "http://no": ""}',
    )
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"from {name}'s file\n")

    settings = load_settings(write(TOKENIZER + KEY_FILES))

    assert settings.server.urls == ["http://127.0.0.1:30000"]  # the others can be added to a running job
    assert [settings.api_key_of(url) for url in ("http://one:1", "http://one:1/")] == ["from one's file"] * 2
    assert settings.api_key_of("http://two:1") == "from the environment"
    assert settings.api_key_of("http://three:1/") == "3"
    assert settings.api_key_of("http://four:1") == "general"
    assert settings.api_key_of("http://no") is None
    for shown in (repr(settings), settings.model_dump_json()):
        assert "general" not in shown
        assert "from the" not in shown


def test_a_servers_key_file_that_is_not_there_is_named(write: Write, tmp_path: Path) -> None:
    settings = load_settings(write(TOKENIZER + KEY_FILES))

    assert settings.api_key_of("http://three:1") is None
    with pytest.raises(ConfigError) as caught:
        settings.api_key_of("http://one:1")
    assert str(caught.value) == f'[server.api_key_files] "http://one:1" {tmp_path / "one"}: No such file or directory'


def test_the_environments_key_wins_over_a_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_SERVER__API_KEY", "sesame")

    assert load_settings(write(TOKENIZER + '[server]\napi_key_file = "none"\n')).api_key_of("http://one") == "sesame"


def test_keys_of_servers_in_the_file_are_refused_and_not_repeated(write: Write) -> None:
    path = write(TOKENIZER + '[server.api_keys]\n"http://one:1" = "sesame"\n')

    (fault,) = faults(path)

    assert fault.startswith(f"{path}: [server] api_keys does not belong in a configuration file")
    assert "TOKENMILL_SERVER__API_KEYS, or into a file named by [server.api_key_files]" in fault
    assert "sesame" not in fault


@pytest.mark.parametrize("value", ['"sesame"', '["sesame"]', '{"http://one": {"sesame": 1}}', "sesame", '{"sesame'])
def test_keys_that_are_no_table_are_not_repeated(write: Write, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TOKENMILL_SERVER__API_KEYS", value)

    (fault,) = faults(write(TOKENIZER))

    assert "TOKENMILL_SERVER" in fault
    assert "sesame" not in fault


@pytest.mark.parametrize(
    "url",
    [
        "http://me:sesame@host:1",
        "http://me:ses/ame@host",
        "http://sesame@host",
        "https://me:sesame@host/x",
        "ftp://a@b",
    ],
)
@pytest.mark.parametrize("text", ['[server]\nurls = ["{}"]\n', '[server.api_key_files]\n"{}" = "k"\n'])
def test_a_password_in_an_address_is_refused_and_not_repeated(write: Write, text: str, url: str) -> None:
    path = write(TOKENIZER + text.format(url))

    (fault,) = faults(path)

    assert re.match(rf"{re.escape(str(path))}: server\.(urls|api_key_files): an address holds a user name", fault)
    assert "ame" not in fault.replace("user name", "")


@pytest.mark.parametrize(
    "url", ["", "host:30000", "http://", "http://:30000", "http://h:x", "http://h:99999", "http://h?a=1", "http://h/#a"]
)
def test_an_address_that_cannot_be_one_is_refused(write: Write, url: str) -> None:
    path = write(TOKENIZER + f'[server]\nurls = ["{url}"]\n')

    assert faults(path) == [
        f"{path}: server.urls: {url!r} is no http:// or https:// address, as in http://127.0.0.1:30000"
    ]


def test_an_address_given_twice_is_one_server(write: Write) -> None:
    settings = load_settings(write(TOKENIZER + '[server]\nurls = ["http://b/", "http://a:1", "http://b"]\n'))

    assert settings.server.urls == ["http://b", "http://a:1"]


def test_bounds_of_the_governor_that_exclude_each_other_are_refused(write: Write) -> None:
    path = write(TOKENIZER + "[worker]\nleast_in_flight = 10\nmost_in_flight = 5\n")
    assert faults(path) == [f"{path}: worker: least_in_flight 10 is above most_in_flight 5"]
    assert load_settings(write(TOKENIZER + "[worker]\nleast_in_flight = 5\nmost_in_flight = 5\n"))
