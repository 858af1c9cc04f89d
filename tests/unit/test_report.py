"""The report: its figures are those of the files, whatever is in them is escaped, and it needs no network."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
from click.testing import CliRunner

from common.records import Void, Voided, Written, encode_line
from common.registered import Steering, keep_registered
from common.rejects import Reject, append_rejects
from common.sections import DatasetSettings
from producer.cli.main import cli
from producer.report.gather import gather
from producer.report.page import render

START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


def write(
    output: Path,
    name: str,
    lengths: Sequence[int],
    cap_tokens: int | None = None,
    count: str = "completion",
    start: float = START,
) -> None:
    """Records of these lengths, ten seconds apart; each third is truncated, and one is written twice and taken back."""
    folder = output / name
    folder.mkdir(parents=True)
    lines = []
    for index, length in enumerate(lengths):
        cut = index % 3 == 2
        record = Written(
            dataset=name,
            index=index,
            sample_id=f"{name}-{index}",
            attempt=index + 1,
            input_ids=msgspec.Raw(b"[1,2,3]"),
            output_ids=[7] * length,
            finish_reason="length" if cut else "stop",
            prompt_tokens=3,
            completion_tokens=length,
            cached_tokens=0,
            latency_seconds=1.5,
            server="http://gpu1:30000",
            created_at=datetime.fromtimestamp(start + 10 * index, UTC).isoformat(),
            flags=("truncated",) if cut else (),
            meta={},
        )
        lines.append(encode_line(record))
    lines += [lines[0].replace(b'"attempt":1,', b'"attempt":99,'), encode_line(Void(Voided(index=0, attempt=99)))]
    (folder / "w-1.jsonl").write_bytes(b"".join(lines))
    asked = DatasetSettings.model_validate({"name": name, "path": "x.jsonl", "cap_tokens": cap_tokens, "count": count})
    keep_registered(output, asked, Steering())


def test_a_break_is_no_time_of_work(tmp_path: Path) -> None:
    """Two sessions, of 30 s and of 20 s, with ten minutes between them in which nothing was at work."""
    write(tmp_path, "A", [10] * 4)
    write(tmp_path, "B", [10] * 3)
    assert gather(tmp_path).work_seconds == 31.5  # they were at work together
    write(tmp_path, "C", [10] * 3, start=START + 630)
    assert gather(tmp_path).work_seconds == 31.5 + 21.5


def test_the_figures_are_those_of_the_files(tmp_path: Path) -> None:
    write(tmp_path, "A", [10, 20, 30, 40], cap_tokens=125)
    write(tmp_path, "B", [100, 200], count="total")
    append_rejects(
        tmp_path, "A", [Reject(index=9, reason="too_long", detail="x"), Reject(index=8, reason="too_long", detail="")]
    )
    run = gather(tmp_path)
    a, b = run.datasets
    assert (a.name, a.samples, a.spent_tokens, a.cap_tokens) == ("A", 4, 100, 125)
    assert (b.name, b.samples, b.spent_tokens) == ("B", 2, 306)
    assert dict(a.finish_reasons) == {"stop": 3, "length": 1}
    assert dict(a.flags) == {"truncated": 1}
    assert dict(a.rejects) == {"too_long": 2}
    assert dict(a.servers) == {"http://gpu1:30000": 4}
    assert [a.percentile(share) for share in (0.5, 0.95, 1.0)] == [20, 40, 40]
    assert run.work_seconds == 31.5  # the first took 1.5 s
    assert np.array_equal(a.at, START + 10 * np.arange(4))
    page = render(run)
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr.*?</tr>", page)]
    assert ["A", "125", "100", "80.00%", "4", "2", "25", "20", "40", "40", "25.00%", "12"] in cells
    assert ["B", "", "306 (with prompts)", "", "2", "0", "150", "100", "200", "200", "0.00%", "6"] in cells
    assert ["all", "", "400", "", "6", "2", "67", "30", "200", "200", "16.67%", "18"] in cells
    assert page.count("<svg") == 4


def test_one_page_without_network_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    write(tmp_path, "A", [10, 20, 3000], cap_tokens=5000)
    (tmp_path / "run.json").write_bytes(
        msgspec.json.encode({"model_path": "<script>alert(1)</script>", "sampling_params": {"max_new_tokens": 4096}})
    )
    page = render(gather(tmp_path))
    assert page == render(gather(tmp_path))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "max_new_tokens 4,096" in page
    # Namespaces are names, and are not fetched.
    links = set(re.findall(r"https?://[^\s\"'<]+", page)) - {"http://gpu1:30000"}
    assert links <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"(src|href)=\"(?!#)", page.replace("xlink:href", "href"))


def test_an_empty_run_and_a_dataset_without_answers_have_a_page(tmp_path: Path) -> None:
    keep_registered(tmp_path, DatasetSettings(name="A", path="x"), Steering())
    page = render(gather(tmp_path))
    assert "No answer has been written yet." in page
    assert "<svg" not in page


def test_the_command_writes_the_page_and_names_the_near(tmp_path: Path) -> None:
    write(tmp_path / "out", "A", [10, 20])
    config = tmp_path / "tokenmill.toml"
    config.write_text('output = "out"\n[tokenizer]\npath = "t"\n[[datasets]]\nname = "A"\npath = "x"\n')
    page = tmp_path / "r.html"
    done = CliRunner().invoke(cli, ["report", "-c", str(config), "-o", str(page)])
    assert (done.exit_code, done.stderr) == (0, f"{page}: 2 answers of 1 dataset\n")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    wrong = CliRunner().invoke(cli, ["report", "A1", "-c", str(config)])
    assert "did you mean A?" in str(wrong.exception)
