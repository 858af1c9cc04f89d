"""The scripts' headers, the stubs beside them and the keys that both name agree."""

import re
from pathlib import Path

import pytest

from common.ledger import _scripts
from common.ledger._keys import Keys, dataset_keys, keys_of
from common.ledger._scripts import Call, header

SCRIPTS = sorted(Path(_scripts.__file__).with_name("scripts").glob("*.lua"))
scripts = pytest.mark.parametrize("path", SCRIPTS, ids=[path.stem for path in SCRIPTS])


def opening(path: Path) -> list[str]:
    """The comment lines that a script opens with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    code = next(i for i, line in enumerate(lines) if not line.startswith("--"))
    return lines[:code]


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 13


@scripts
def test_every_script_opens_with_its_name_keys_arguments_and_answers(path: Path) -> None:
    lines = opening(path)
    words = [match.group(1) for line in lines if (match := re.match(r"-- ([A-Za-z_]+):", line))]

    assert words[0] == path.stem
    assert [word for word in words if word.isupper()] == ["KEYS", "ARGV", "ANSWERS"]
    assert re.fullmatch(rf"-- {path.stem}: \w.*", lines[0])


@scripts
def test_every_script_has_a_stub(path: Path) -> None:
    stub = getattr(_scripts, path.stem)

    assert callable(stub)
    assert stub.__module__ == _scripts.__name__


@scripts
def test_every_key_of_a_script_is_spelled_in_one_module(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = header(text, "KEYS")
    used = {int(number) for number in re.findall(r"KEYS\[(\d+)\]", text)}

    assert set(named) <= set(Keys.__slots__)
    assert used == set(range(1, len(named) + 1))
    assert "tokenmill:" not in text


def test_a_stub_that_lacks_an_argument_is_refused() -> None:
    def claim(call: Call, owner: str, indices: list[int]) -> None: ...

    with pytest.raises(AssertionError, match=r"claim: the stub takes .*'owner', 'indices'.*'lease_ms'"):
        _scripts._script(claim)


def test_a_stub_with_its_arguments_in_another_order_is_refused() -> None:
    def transition(call: Call, reason: str, target: str, sources: list[str]) -> None: ...

    with pytest.raises(AssertionError, match="transition: the stub takes"):
        _scripts._script(transition)


def test_a_stub_without_a_script_is_refused() -> None:
    def vanish(call: Call) -> None: ...

    with pytest.raises(FileNotFoundError, match=r"vanish\.lua"):
        _scripts._script(vanish)


def test_a_stub_with_its_scripts_arguments_is_taken() -> None:
    def heartbeat(call: Call, name: str, facts: str) -> None: ...

    assert callable(_scripts._script(heartbeat))


def test_a_header_line_may_be_empty_but_not_missing() -> None:
    assert header("-- name: x\n-- KEYS: state done\n-- ARGV:\n", "KEYS") == ["state", "done"]
    assert header("-- ARGV: owner samples...\n", "ARGV") == ["owner", "samples"]
    assert header("-- ARGV:\n", "ARGV") == []
    with pytest.raises(ValueError, match="no line that starts with -- KEYS:"):
        header("return 1 -- KEYS: state", "KEYS")


def test_two_datasets_share_no_key_of_their_own() -> None:
    first, second = set(dataset_keys("a")), set(dataset_keys("b"))

    assert not first & second
    assert keys_of("a").done in first
    assert keys_of("a").segments not in first
