"""What a job takes: the arithmetic of a plan, and what is known of sources and answers."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.chat_template import Tokenizer
from common.sections import DatasetSettings, TokenizerSettings
from common.settings import Settings, load_settings
from producer.plan.arithmetic import Known, ends_seconds, limit, plan
from producer.plan.look import COUNT_SECONDS, How, Rows, Source, count_rows, look
from producer.plan.make import Asked, Plan, Rate, expected, kv_tokens_of, make_plan, rate_of
from producer.plan.words import notes
from producer.report.gather import gather
from tests.conftest import REPO
from tests.unit.preflight_steps import facts_of, sglang
from tests.unit.test_report import write as write_records
from workers.governor import Load
from workers.sglang.pilot import Pilot, Told

TOKENIZER = REPO / "examples" / "tokenizer"
MANY, FAR = 2**20, 60.0


def known(name: str = "A", **changes: Any) -> Known:
    facts: dict[str, Any] = {
        "left": 22_022,
        "prompt_tokens": 500.0,
        "completion_tokens": 1000.0,
        "charged_tokens": 1000.0,
        "record_bytes": 9000.0,
    }
    return Known(name=name, **(facts | changes))


@pytest.mark.parametrize(("mean", "capped_hours"), [(1000.0, 26), (1500.0, 17)])
def test_the_worked_example(mean: float, capped_hours: int) -> None:
    """88,088 prompts in four datasets, 26 answers a minute: docs/plan.md."""
    lengths = {"completion_tokens": mean, "charged_tokens": mean}
    rate = 26 / 60 * mean

    whole, totals = plan([known(name, **lengths) for name in "ABCD"], rate)
    assert totals.samples == 88_088
    assert totals.hours is not None
    assert math.ceil(totals.hours) == 57
    assert {one.ends for one in whole} == {"source"}

    capped, less = plan([known(name, **lengths, cap_tokens=10_000_000) for name in "ABCD"], rate)
    assert less.hours is not None
    assert less.saved_hours is not None
    assert round(less.hours) == capped_hours
    assert less.hours + less.saved_hours == pytest.approx(totals.hours)
    assert {one.ends for one in capped} == {"cap"}
    assert {one.samples for one in capped} == {math.ceil(10_000_000 / mean)}
    # All alike, they end together.
    assert [one.done_hours for one in capped] == pytest.approx([less.hours] * 4)


def test_a_cap_takes_the_samples_that_reach_it() -> None:
    [one], _ = plan([known(cap_tokens=10_500, spent_tokens=2_000)], None)
    assert (one.samples, one.completion_tokens, one.prompt_tokens) == (9, 9_000, 4_500)
    assert (one.spent_tokens, one.disk_bytes, one.ends) == (11_000, 81_000, "cap")
    assert (one.hours, one.done_hours, one.saved_hours) == (None, None, None)


def test_prompts_count_where_the_cap_says_so() -> None:
    [one], _ = plan([known(cap_tokens=15_000, count="total")], 100.0)
    assert (one.samples, one.completion_tokens, one.spent_tokens) == (10, 10_000, 15_000)
    assert one.hours == pytest.approx(10_000 / 100 / 3600)  # prompts are not decoded


def test_a_source_that_ends_before_its_cap() -> None:
    [one], totals = plan([known(left=5, cap_tokens=100_000)], 100.0)
    assert (one.ends, one.samples, one.spent_tokens, totals.saved_hours) == ("source", 5, 5_000, 0.0)


def test_a_cap_that_is_reached_takes_nothing() -> None:
    [one], _ = plan([known(cap_tokens=1_000, spent_tokens=1_020)], 100.0)
    assert (one.ends, one.samples, one.spent_tokens, one.hours) == ("cap", 0, 1_020, 0.0)


def test_answers_that_do_not_count_are_made_all_the_same() -> None:
    [one], _ = plan([known(cap_tokens=9_000, charged_tokens=900.0)], None)
    assert (one.samples, one.completion_tokens, one.spent_tokens) == (10, 10_000, 9_000)
    [none], _ = plan([known(left=7, cap_tokens=9_000, charged_tokens=0.0)], None)
    assert (none.samples, none.ends) == (7, "source")


def test_without_a_cap_the_whole_source_and_of_an_empty_one_nothing() -> None:
    (whole, empty), totals = plan([known(), known("B", left=0, prompt_tokens=0.0)], 1000.0)
    assert (whole.samples, whole.ends, whole.saved_hours) == (22_022, "source", None)
    assert (empty.samples, empty.completion_tokens, empty.hours, empty.done_hours) == (0, 0, 0.0, 0.0)
    assert totals.saved_hours is None
    assert plan([], 1000.0)[1].hours == 0


def test_datasets_share_the_servers_by_weight() -> None:
    # A has two thirds of 30 tokens/s and needs 100: 5 s. B has made 50 by then, and has all 30 for its other 150.
    ends = ends_seconds({"A": 100, "B": 200, "C": 0}, {"A": 2, "B": 1, "C": 5}, 30)
    assert ends == pytest.approx({"A": 5.0, "B": 10.0, "C": 0.0})


@pytest.mark.parametrize(
    ("kv_tokens", "running", "asked", "by", "kv"),
    [
        (150_000, 200, 512, "kv", 100),
        (1_500_000, 200, 512, "running", 1000),
        (1_500_000, 2000, 512, "concurrency", 1000),
        (None, 200, 512, "unknown", None),
        (150_000, None, 512, "unknown", 100),
    ],
)
def test_what_holds_requests_in_flight(
    kv_tokens: int | None, running: int | None, asked: int, by: str, kv: int | None
) -> None:
    datasets = [known(), known("B", left=0, completion_tokens=9e6)]
    held = limit(datasets, plan(datasets, None)[0], kv_tokens, running, asked)
    assert (held.by, held.mean_tokens, held.kv, held.running) == (by, 1500.0, kv, running)


@pytest.mark.parametrize(
    ("kv_tokens", "running", "servers", "said"),
    [
        (None, 256, 1, ("The server runs 256 requests at once at most; [worker] concurrency of all workers is 512. "
         "The server did not say how many requests the KV cache holds.")),
        (150_000, None, 2, ("The 2 servers hold 100 requests of 1,500 tokens (prompt and answer) in KV; [worker] "
         "concurrency of all workers is 512. The 2 servers did not say how many run at once.")),
        (None, None, 1, "The server did not say how many requests the KV cache holds, nor how many run at once."),
        (150_000, 200, 1, ("The server holds 100 requests of 1,500 tokens (prompt and answer) in KV and runs 200 "
         "requests at once at most; KV is the limit: shorter answers, or more memory for KV, would let more run.")),
    ],
)  # fmt: skip
def test_what_holds_them_is_said_in_a_sentence(
    kv_tokens: int | None, running: int | None, servers: int, said: str
) -> None:
    lines, totals = plan([known()], None)
    held = limit([known()], lines, kv_tokens, running, 512)
    assert notes(Plan(Rate(None, "unknown"), held, [], totals, []), [], [], servers)[-1] == said


def test_of_a_job_with_nothing_left_no_limit_is_said() -> None:
    done = [known(left=0)]
    lines, totals = plan(done, None)
    made = Plan(Rate(5.0, "given"), limit(done, lines, 150_000, 200, 512), [], totals, [])
    assert not any("server" in note for note in notes(made, [], [], 1))


def jsonl(path: Path, rows: int, size: int = 100) -> Path:
    line = json.dumps({"prompt": "x" * (size - 15)}) + "\n"
    assert len(line) == size
    path.write_text(line * rows)
    return path


def test_rows_are_counted_or_estimated_by_bytes(tmp_path: Path) -> None:
    plain = jsonl(tmp_path / "a.jsonl", 2000)
    assert count_rows(plain, MANY, 100, COUNT_SECONDS)[0] == Rows(2000, "counted")
    assert count_rows(plain, MANY, 100, -1)[0] == Rows(2000, "estimated")
    assert count_rows(plain, MANY, 50, -1)[0] == Rows(4000, "estimated")


def test_rows_of_parquet_are_in_its_footer(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["x"] * 1234}), tmp_path / "a.parquet")
    assert count_rows(tmp_path / "a.parquet", MANY, 100, -1)[0] == Rows(1234, "counted")


def test_rows_of_a_compressed_file_are_at_least_those_that_were_read(tmp_path: Path) -> None:
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(jsonl(tmp_path / "a", 2000).read_bytes()))
    assert count_rows(packed, MANY, 100, COUNT_SECONDS)[0] == Rows(2000, "counted")
    assert count_rows(packed, MANY, 100, -1)[0] == Rows(0, "at least")
    packed.write_bytes(packed.read_bytes()[:-100])
    assert count_rows(packed, MANY, 100, COUNT_SECONDS)[0].how == "at least"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerSettings(path=TOKENIZER))


def configured(folder: Path, more: str = "", sampling: str = "max_new_tokens = 64") -> Settings:
    config = folder / "tokenmill.toml"
    config.write_text(
        f'[tokenizer]\npath = "{TOKENIZER}"\n[sampling]\n{sampling}\n[[datasets]]\nname = "A"\npath = "a.jsonl"\n{more}'
    )
    return load_settings(config)


def looked(folder: Path, tokenizer: Tokenizer, *rows: Any, more: str = "", seconds: float = COUNT_SECONDS) -> Source:
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = configured(folder, more)
    return look(settings, settings.datasets[0], tokenizer, tokenizer.vocab_size, 1000, seconds)


def test_a_small_source_is_seen_whole(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = looked(tmp_path, tokenizer, *({"input_ids": [7] * length} for length in (10, 20, 30, 990)))
    assert (found.rows, found.looked_at, found.rejected) == (Rows(4, "counted"), 4, 1)
    assert (found.mean_prompt_tokens, found.spread, found.samples_a_row) == (20.0, True, 1.0)
    assert found.id_bytes == pytest.approx(2.0, abs=0.1)  # `7,`
    assert sorted(one.prompt_tokens for one in found.prompts) == [10, 20, 30]


@pytest.mark.parametrize(("seconds", "how", "looked_at"), [(FAR, "counted", 469), (-1, "estimated", 330)])
def test_prompts_of_a_large_source_are_from_all_over_it(
    tmp_path: Path, tokenizer: Tokenizer, seconds: float, how: str, looked_at: int
) -> None:
    """They grow from 100 to 400 ids: counted alike, rows from places that are even in bytes have 280 on average."""
    rows = [{"input_ids": [7] * (100 + number // 50)} for number in range(15_000)]
    found = looked(tmp_path, tokenizer, *rows, seconds=seconds)
    assert (found.looked_at, found.rows.how, found.spread) == (looked_at, how, True)
    assert found.mean_prompt_tokens == pytest.approx(250, rel=0.04)
    assert found.rows.count == pytest.approx(15_000, rel=0.04)
    assert looked(tmp_path, tokenizer, *rows, more="limit = 400").rows == Rows(400, "counted")


def test_an_empty_source(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = looked(tmp_path, tokenizer)
    assert (found.rows, found.prompts, found.mean_prompt_tokens) == (Rows(0, "counted"), [], 0.0)


def test_every_turn_of_a_conversation_is_a_sample(tmp_path: Path, tokenizer: Tokenizer) -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b " * 50)) * 3]
    found = looked(tmp_path, tokenizer, {"messages": turns}, more='turns = "all"\n')
    [first] = found.prompts
    last = looked(tmp_path, tokenizer, {"messages": turns[:5]}).prompts[0]
    assert found.samples_a_row == 3.0
    assert found.mean_prompt_tokens == (first.prompt_tokens + last.prompt_tokens) / 2


def source(rows: int = 100, how: How = "counted") -> Source:
    return Source(Rows(rows, how), 20, 2, 0.1, True, [], 50.0, 1.0, 5.0, "")


def asked(settings: Settings, dataset: DatasetSettings, *told: Told) -> Asked:
    [came] = gather(settings.output, [dataset.name]).datasets
    return Asked(dataset, source(), came, told)


def test_expected_answers_are_those_that_were_made_or_else_a_guess(tmp_path: Path) -> None:
    settings = configured(tmp_path, "max_new_tokens = 100\n")
    [dataset] = settings.datasets
    guess = expected(settings, asked(settings, dataset))
    assert (guess.origin, guess.mean_tokens) == ("guess", 50)
    said = expected(settings, asked(settings, dataset.model_copy(update={"mean_tokens": 70})))
    assert (said.origin, said.mean_tokens) == ("mean_tokens", 70)
    pilot = [Told("A", 10, "stop"), Told("A", 30, "length"), Told("A", failure="timeout")]
    tried = expected(settings, asked(settings, dataset, *pilot))
    assert (tried.origin, tried.mean_tokens, tried.answers, tried.truncated) == ("pilot", 20, 2, 1)
    write_records(settings.output, "A", [10, 20, 60])
    made = expected(settings, asked(settings, dataset, *pilot))
    assert (made.origin, made.mean_tokens, made.answers, made.truncated) == ("records", 30, 3, 1)


def test_what_is_answered_is_left_out(tmp_path: Path) -> None:
    settings = configured(tmp_path, "cap_tokens = 200\n")
    write_records(settings.output, "A", [10, 20, 60])
    made = make_plan(
        settings, [asked(settings, settings.datasets[0])], rate_of(5.0, gather(settings.output), [], None), [], None
    )
    [line] = made.datasets
    # 97 rows are left, a tenth of those that were looked at is bad; (200 - 90) / 30 are 4 samples.
    assert (line.planned.uncapped_samples, line.planned.samples, line.planned.spent_tokens) == (87, 4, 210)
    written = sum(path.stat().st_size for path in (settings.output / "A").glob("w-*.jsonl"))
    assert (line.planned.disk_bytes, line.record_bytes_from) == (round(4 * written / 3), "records")


def test_the_rate_is_given_or_measured_or_not_known(tmp_path: Path) -> None:
    run = gather(tmp_path, ["A"])
    busy = Load(running=3, waiting=0, tokens_per_second=70.0, capacity_tokens=4000)
    idle = Load(running=0, waiting=0, tokens_per_second=0.0)
    pilot = Pilot([Told("A", 100, "stop"), Told("A", failure="timeout")], 4.0)
    assert msgspec.to_builtins(rate_of(None, run, [], None)) == {"tokens_per_second": None, "origin": "unknown"}
    assert rate_of(None, run, [idle, None], pilot).tokens_per_second == 25
    assert rate_of(None, run, [busy, busy, idle], pilot).tokens_per_second == 140
    # 40 answers 10 s apart, of which the first took 1.5 s.
    write_records(tmp_path, "A", [20] * 40)
    measured = rate_of(None, gather(tmp_path), [busy], pilot)
    assert measured.origin == "records"
    assert measured.tokens_per_second == pytest.approx(800 / 391.5)
    assert rate_of(9.0, gather(tmp_path), [busy], pilot).origin == "given"
    servers = [facts_of(sglang(dp_size=2)), facts_of(sglang())]
    assert kv_tokens_of(servers, [None, busy]) == 2 * 4096 + 4000
    assert kv_tokens_of([], []) is None
