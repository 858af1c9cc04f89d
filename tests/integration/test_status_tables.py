"""Status, and the progress of run, as people read them: on terminals of any width, and in pipes."""

import io
import re
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from common.events import make_event
from common.ledger import Ledger
from producer import display
from producer.cli import operate
from producer.status import snapshot
from tests.integration.status_steps import at_work, fill, say, server, worker
from tests.lines import write_config


def render(shown: Any, width: int, encoding: str = "utf-8") -> list[str]:
    """What is printed where there is no terminal."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width, force_terminal=False, color_system=None)
    console.print(shown)
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    lines = stream.buffer.getvalue().decode(encoding).splitlines()
    assert all(len(line) <= width for line in lines)
    assert "\x1b" not in "".join(lines)
    assert [line for line in lines if line != line.rstrip()] == []
    return lines


def test_the_tables_show_every_dataset_and_what_is_wrong(ledger: Ledger) -> None:
    fill(ledger)
    say(ledger, "w1@host", worker(64, 3, server("http://a:1", "down", 0, "refused")))
    found = render(display.Datasets(snapshot(ledger)), 80)
    lines = [re.sub(r"[-0-9]+ [:0-9]+ \(5m1\ds\)", "THEN (5m)", line) for line in found]
    assert lines == [
        "dataset state                           of cap tokens samples flight tok/s   eta",
        "A       open   █████▊··················  24.0%    240       6      3    26   17s",
        "B       open   ▎·······················   1.0%  1,000       1      0    30 9m03s",
        "C       failed                          no cap      0       0      0     0     -",
        "all                                             1,240       7      3    56 9m03s",
        "",
        "dataset mean p50 p95 max trunc no</th> rej fail expired weight",
        "A         40  32  90  90     1       0   3    1       0      1",
        "B        300 283 283 300     0       0   0    0       0      1",
        "C          0   0   0   0     0       0   0    0       0      1",
        "all                          1       0   3    1       0",
        "! C: its source c.jsonl cannot be read: No such file or directory",
        "! no server can be used since THEN (5m); the workers wait, and",
        "no sample loses a try",
        "! http://a:1 is down since THEN (5m): refused",
    ]


def big(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "state": "exhausted",
        "reason": "",
        "cap_tokens": 10_000_000,
        "count": "completion",
        "weight": 1.0,
        "done": 123_456,
        "spent_tokens": 9_999_999,
        "mean_tokens": 8100.4,
        "p50_tokens": 7000,
        "p95_tokens": 10_100,
        "max_tokens": 10_240,
        "truncated": 1234,
        "no_think_end": 1234,
        "rejected": 1234,
        "rejects": {"too_long": 1234},
        "stopped": {},
        "failed": 1234,
        "expired_leases": 12,
        "in_flight": 1500,
        "tokens_per_second": 1234.5,
        "eta_seconds": 360_000,
    }


@pytest.mark.parametrize("width", [80, 100, 170])
def test_tables_with_large_figures_show_each_of_them_whole(width: int) -> None:
    names = ["B1_glaive", "B2_OpenCodeInstruct", "x" * 64]
    seen = {"datasets": [big(name) for name in names], "totals": big("all") | {"spent_tokens": 29_999_997}}
    lines = render(display.Datasets(seen | {"troubles": []}), width)
    text = "\n".join(lines)
    assert "…" not in text
    heads = [line.split() for line in lines if line.startswith("dataset")]
    assert len(heads) == (1 if width == 170 else 2)
    assert re.sub("exhausted|max|expired", "", text).count("x") == len(heads) * 64
    named = {head for line in heads for head in line}
    assert {"dataset", "state", "of", "cap", "tokens", "eta", "mean", "p95", "max", "trunc", "rej", "fail"} <= named
    for name in names[:2]:
        line, *_ = [line for line in lines if line.startswith(name)]
        words = line.split()
        assert words[1] == "exhausted"
        assert {"100.0%", "9,999,999", "100h00m"} <= set(words)
    assert "29,999,997" in text


def test_without_datasets_there_is_the_head() -> None:
    (head,) = render(display.Datasets({"datasets": [], "totals": {}, "troubles": []}), 80)
    assert head.startswith("dataset state")


def test_the_page_goes_on_with_workers_servers_and_events(ledger: Ledger) -> None:
    fill(ledger)
    say(ledger, "w1@host", worker(64, 3, server("http://a:1", in_flight=3, running=40, waiting=3, kv_usage=0.973)))
    ledger.add_event(make_event("paused", "paused; 3 answers in flight end and count", "A", "me@here"))
    lines = render(display.Page(snapshot(ledger)), 100)
    heads = [line.split()[0] for number, line in enumerate(lines) if number == 0 or not lines[number - 1]]
    assert heads == ["dataset", "dataset", "worker", "server", "when"]
    (about,) = [line for line in lines if line.startswith("w1@host")]
    assert about.split()[1:4] == ["working", "3", "64"]
    (load,) = [line for line in lines if line.startswith("a:1")]
    assert load.split()[:5] == ["a:1", "up", "40", "3", "97%"]
    assert " ".join(lines[-1].split()[1:]) == "paused A me@here paused; 3 answers in flight end and count"


def test_where_only_ascii_can_be_written_it_is(ledger: Ledger) -> None:
    fill(ledger)
    line, *_ = [line for line in render(display.Datasets(snapshot(ledger)), 80, "ascii") if line.startswith("A ")]
    assert re.search(r" #+-+ +24.0% ", line)


def test_what_a_server_says_cannot_steer_the_terminal(ledger: Ledger) -> None:
    say(ledger, "w1@host", worker(64, 3, server("http://a:1", "down", 0, "bad\x1b[2Jgateway")))
    assert "bad\\x1b[2Jgateway" in "\n".join(render(display.Page(snapshot(ledger)), 200))


def test_the_command_prints_the_page_once(ledger: Ledger, tmp_path: Any, valkey: str) -> None:
    fill(ledger)
    result = CliRunner().invoke(operate.status, ["-c", str(write_config(tmp_path, valkey))])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("dataset state")


def test_the_line_for_pipes(ledger: Ledger) -> None:
    fill(ledger)
    at_work(ledger)
    assert display.line(snapshot(ledger)) == (
        "7 samples, 1,240 tokens, 56 tokens/s, 3 in flight, 3 rejected, 2 datasets open"
    )
