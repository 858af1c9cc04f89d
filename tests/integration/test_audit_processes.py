"""An audit by several processes: the same report as by one, and an end to all of them whatever happens."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from common.errors import TokenmillError
from producer.audit.audit import audit
from producer.audit.pool import parts_by
from producer.audit.stretches import STRETCH_BYTES, Wanted, stretches
from tests.unit.audit_steps import Row, clean, flat, tokenizer, words

ENCODE = msgspec.json.Encoder().encode
DEADLINE_SECONDS = 60.0
TALK = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]


def conversation(rng: random.Random) -> Row:
    return {"conversations": [{"from": "human", "value": words(rng, 20)}, {"from": "gpt", "value": words(rng, 20)}]}


def ids(rng: random.Random) -> Row:
    return {"input_ids": [rng.randrange(90_000) for _ in range(60)], "loss_mask": [0] * 20 + [1] * 40}


def mixed(path: Path) -> tuple[Path, list[int]]:
    """Three stretches of rows of all kinds, and which rows are broken; no newline stands at the end."""
    rng = random.Random(0)
    rows = [
        *clean(1_500),
        *flat(clean(700, seed=1)),
        *(conversation(rng) for _ in range(9_000)),
        *({"question": words(rng, 25), "answer": words(rng, rng.randrange(30, 60))} for _ in range(9_000)),
        *(ids(rng) for _ in range(800)),
        *({"messages": [{"role": "user", "content": "<|im_end|> caf\u00c3\u00a9"}]} for _ in range(30)),
    ]
    rng.shuffle(rows)
    rows += rows[:500]  # there again in another stretch
    lines = [ENCODE(row) for row in rows]
    broken = sorted(rng.sample(range(len(lines)), 40))
    for number in broken:
        lines[number] = lines[number][:-3]
    ends = [rng.choice([b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b"\n  \r\n"]) for _ in lines]
    # A line of 1.5 MB that begins 1 MB before the second stretch.
    place, at = 0, 0
    while at < STRETCH_BYTES - 1_000_000:
        at += len(lines[place]) + len(ends[place])
        place += 1
    lines.insert(place, ENCODE({"question": "Q", "answer": "long " * 300_000}))
    ends.insert(place, b"\n")
    ends[-1] = b""
    path.write_bytes(b"\xef\xbb\xbf" + b"".join(line + end for line, end in zip(lines, ends, strict=True)))
    return path, [number + (number >= place) for number in broken]


def readers(of: int) -> list[int]:
    """The processes that read for an audit of the process `of`."""
    children = Path(f"/proc/{of}/task/{of}/children").read_text().split()
    return [int(pid) for pid in children if b"producer.audit.reader" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_none_lives(pids: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while any(map(lives, pids)):
        assert time.monotonic() < deadline, f"of {pids} some still run"
        time.sleep(0.01)


def test_the_report_is_that_of_one_process(tmp_path: Path) -> None:
    path, broken = mixed(tmp_path / "rows.jsonl")
    assert path.stat().st_size > 2 * STRETCH_BYTES
    of = tokenizer()
    one, two, three = (audit(path, of, sample_rows=50, processes=number) for number in (1, 2, 3))
    assert ENCODE(two) == ENCODE(one)
    assert ENCODE(three) == ENCODE(one)
    assert one.facts["broken_rows"] == len(broken)
    (found,) = (finding for finding in one.findings if finding.name == "not_json")
    assert [example.partition(":")[0] for example in found.examples] == [f"row {number:,}" for number in broken[:3]]
    (again,) = (finding for finding in one.findings if finding.name == "duplicates")
    assert int(again.says.split()[0].replace(",", "")) > 400
    assert one.facts["tokens_in_text"]["rows_sampled"] == 50
    assert readers(os.getpid()) == []


def test_several_files_are_one_source(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"part-{number}.jsonl").write_bytes(b"\n".join(map(ENCODE, clean(50, seed=number % 2))))
    prompts = [{"messages": row["messages"]} for row in clean(40, seed=2)]
    (tmp_path / "part-3.jsonl").write_bytes(b"\n".join(map(ENCODE, [*prompts, *clean(10, seed=3)])))
    (tmp_path / "part-4.jsonl").write_bytes(b"\n".join(map(ENCODE, [*prompts, {"messages": TALK}])))
    found = audit(tmp_path, processes=2)
    assert ENCODE(found) == ENCODE(audit(tmp_path, processes=1))
    assert found.facts["rows"] == 241
    assert {one.name: one.says[:13] for one in found.findings if one.name in {"prompts", "no_answer"}} == {
        "prompts": "40 of 241 row",
        "no_answer": "40 of 241 row",
    }
    assert "50 rows (21 %) have prompt and answer of an earlier row." in [one.says for one in found.findings]


def _wanted(path: Path, limit: int) -> Iterator[Wanted]:
    return (Wanted(one, limit, 0, 1.0, 0) for one in stretches(str(path), path.stat().st_size))


def test_a_process_that_is_killed_is_told_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "q", "answer": "a"}\n' * (5 * STRETCH_BYTES // 33))
    parts = parts_by(2, _wanted(path, 1_000))
    next(parts)
    pids = readers(os.getpid())
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(TokenmillError, match="a process that read for the audit ended by signal SIGKILL"):
        list(parts)
    assert readers(os.getpid()) == []


def test_a_process_that_fails_is_told_in_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"{}\n")
    with pytest.raises(TokenmillError, match="ended with exit code 1"):
        list(parts_by(2, _wanted(path, None)))  # type: ignore[arg-type]
    assert "TypeError" in capfd.readouterr().err


def test_a_file_that_went_away_is_an_error_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"{}\n")
    wanted = list(_wanted(path, 1_000))
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"rows\.jsonl"):
        list(parts_by(2, iter(wanted)))


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_all_end_with_the_command(tmp_path: Path, ended_by: signal.Signals) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:  # one line and no end, most of which takes no room on the disk
        file.write(b'{"question": "q"}\n')
        file.truncate(16 * 1024**3)
    script = f"from producer.audit.audit import audit; audit({str(path)!r}, processes=2)"
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(pids := readers(process.pid)) < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(ended_by)
        process.communicate(timeout=DEADLINE_SECONDS)
    wait_until_none_lives(pids)
    assert process.returncode == -ended_by
