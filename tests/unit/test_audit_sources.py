"""What of a folder is data: of a run, of an export, of a batch; and what an audit says of prompts among answers."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from producer.audit.audit import audit
from producer.audit.reconstruct import Allowed
from producer.audit.reconstructed import write as reconstruct
from producer.audit.show import lines
from producer.audit.sources import Source, sources_of
from producer.export.manifest import Manifest, encode, file_of
from tests.unit.audit_steps import Row, alarms, clean, looked, message, notes, tokenizer, usage, words, write

REGISTERED = {"name": "A", "path": "prompts.jsonl", "max_row_bytes": 67_108_864, "format": "auto"}


def segment(path: Path, rows: int = 3) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = random.Random(str(path))
    ids = ([rng.randrange(500, 4_000) for _ in range(40)] for _ in range(rows))
    return write(path, ({"input_ids": [5, 6, n], "output_ids": one, "index": n} for n, one in enumerate(ids)))


def run_of(output: Path) -> Path:
    """The folder of a run with two datasets, and all that lies in it beside their segments."""
    for name in ("A", "B"):
        segment(output / name / "w1-0.jsonl")
        segment(output / name / "w2-0.jsonl")
        (output / name / "dataset.json").write_text(json.dumps(REGISTERED))
        (output / name / "shuffle.json").write_text("{}")
        (output / name / "rejects.jsonl").write_text('{"index":9,"reason":"too_long","detail":"-"}\n')
    (output / "run.json").write_text("{}")
    (output / "events.jsonl").write_text('{"at":"-","what":"started"}\n')
    (output / "logs").mkdir()
    (output / "logs" / "control.log").touch()
    return output


def export_of(folder: Path, files: dict[str, list[Row]]) -> Path:
    """The folder of an export with these files of rows, and two that hold none."""
    for name, rows in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, rows)
    (folder / "token_counts.json").write_text("{}")
    (folder / next(iter(files))).with_name("state.json").write_text("{}")
    listed = [file_of(folder, path, len(files.get(str(path.relative_to(folder)), ()))) for path in folder.rglob("*.*")]
    manifest = Manifest(
        tokenmill_version="1", command=[], format="ids", made_with={}, splits={}, datasets={}, files=listed
    )
    (folder / "manifest.json").write_bytes(encode(manifest))
    return folder


def batch_of(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """The lines of a batch's input and output."""
    asked = [
        {"custom_id": row["id"], "method": "POST", "url": "/v1/chat/completions", "body": {"messages": row["messages"]}}
        for row in rows
    ]
    answered = [
        {"id": "-", "custom_id": row["id"], "response": {"status_code": 200, "body": row["response"]}} for row in rows
    ]
    return asked, answered


def batch_in(folder: Path, asked: list[Row], answered: list[Row]) -> Source:
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "train.input.jsonl", asked)
    write(folder / "train.output.jsonl", answered)
    (source,) = sources_of(str(folder))
    return source


def test_of_a_run_the_segments_of_each_dataset_are_rows(tmp_path: Path) -> None:
    output = run_of(tmp_path / "out")
    found = [audit(one) for one in sources_of(str(output))]
    assert [one.source for one in found] == [str(output / "A"), str(output / "B")]
    for one in found:
        assert (one.facts["rows"], one.facts["layouts"], alarms(one)) == (6, {"record": 6}, {})


@pytest.mark.parametrize("kept", ["run.json", "A/dataset.json"])
def test_of_a_dataset_its_segments_are_rows(tmp_path: Path, kept: str) -> None:
    """Also where its folder was copied, and where it is of a release that wrote no dataset.json."""
    output = run_of(tmp_path / "out")
    for other in {"run.json", "A/dataset.json"} - {kept}:
        (output / other).unlink()
    (one,) = sources_of(str(output / "A"))
    assert one == Source(str(output / "A"), (f"{output}/A/w1-0.jsonl", f"{output}/A/w2-0.jsonl"), ours=True)


def test_others_have_files_of_these_names_too(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text(json.dumps(clean(3)))
    (tmp_path / "run.json").write_text(json.dumps(clean(3)))
    (tmp_path / "manifest.json").write_text(json.dumps({"version": 1}))
    assert sources_of(str(tmp_path)) == [Source(str(tmp_path))]


def test_of_an_export_the_files_are_rows_that_its_manifest_lists(tmp_path: Path) -> None:
    folder = export_of(tmp_path, {"messages/train.jsonl": clean(3), "messages-eval/eval.jsonl": clean(2)})
    found = {one.name: one.files() for one in sources_of(str(folder))}
    assert found == {
        f"{folder}/messages": [f"{folder}/messages/train.jsonl"],
        f"{folder}/messages-eval": [f"{folder}/messages-eval/eval.jsonl"],
    }


def test_damage_in_what_was_ids_came_from_no_stream(tmp_path: Path) -> None:
    rows = clean(20)
    for row in rows:
        message(row)["content"] += "\ufffd"
    folder = export_of(tmp_path / "export", {"messages/train.jsonl": rows})
    for named in (folder, folder / "messages", folder / "messages" / "train.jsonl"):
        (found,) = map(audit, sources_of(str(named)))
        assert "random ids" in found.verdict
        assert "stream" not in found.verdict
    assert "A stream was decoded token by token" in looked(tmp_path, rows).verdict


def test_the_answers_of_a_batch_are_read_with_their_requests(tmp_path: Path) -> None:
    asked, answered = batch_of(clean(60))
    random.Random(1).shuffle(answered)
    found = audit(batch_in(tmp_path / "batch", asked, answered))
    assert (found.facts["rows"], found.facts["answers"], found.findings) == (60, 60, [])
    answered[7] = answered[8] | {"custom_id": answered[7]["custom_id"]}
    found = audit(batch_in(tmp_path / "batch", asked, answered))
    assert notes(found) | set(alarms(found)) == {"same_answers"}  # to other prompts, which are known


def test_requests_without_an_answer_and_answers_without_a_request(tmp_path: Path) -> None:
    asked, answered = batch_of(clean(60))
    found = audit(batch_in(tmp_path / "batch", asked[1:], answered[:-3]))
    assert alarms(found) == {"unanswered": "warning", "no_request": "warning"}
    said = {one.name: one.says for one in found.findings}
    assert said["unanswered"].startswith("3 requests ")
    assert said["no_request"].startswith("1 of 57 rows ")


def test_a_broken_line_of_a_batch_is_a_row(tmp_path: Path) -> None:
    source = batch_in(tmp_path / "batch", *batch_of(clean(9)))
    for part in ("input", "output"):
        with (tmp_path / "batch" / f"train.{part}.jsonl").open("a") as file:
            file.write('{"custom_id"\n7\n')
    found = audit(source)
    assert (found.facts["rows"], found.facts["broken_rows"]) == (11, 2)
    assert "unanswered" not in alarms(found)


def test_files_that_are_named_alike_need_be_no_batch(tmp_path: Path) -> None:
    write(tmp_path / "train.input.jsonl", ({"question": f"q{n}"} for n in range(3)))
    write(tmp_path / "train.output.jsonl", ({"question": f"q{n}", "answer": "a"} for n in range(3)))
    found = audit(tmp_path)
    assert (found.facts["rows"], alarms(found)) == (6, {})


def test_the_input_of_a_batch_alone_is_prompts(tmp_path: Path) -> None:
    asked, _ = batch_of(clean(9))
    asked[3]["body"] = {"input": "What is 1 + 1?"}
    asked[4]["body"] = {"prompt": "What is 1 + 2?"}
    asked[5]["body"] = {"input": [{"role": "user", "content": "What is 1 + 3?"}]}
    found = looked(tmp_path, asked)
    assert (alarms(found), notes(found)) == ({}, {"prompts"})
    assert found.facts["layouts"] == {"messages": 7, "prompt": 2}


def test_ids_are_made_of_a_batch(tmp_path: Path) -> None:
    of = tokenizer()
    rows = clean(5, of)
    for row in rows:
        usage(row)["prompt_tokens"] = len(of.encode([of.render(row["messages"], None)])[0])
    asked, answered = batch_of(rows)
    source = batch_in(tmp_path / "batch", asked, answered[::-1])
    done = reconstruct([source], tmp_path / "ids.jsonl", of, Allowed())
    assert (done.rows, done.made, dict(done.refused)) == (5, 5, {})


def talk(rng: random.Random, *roles: str) -> Row:
    return {"conversations": [{"from": role, "value": words(rng, 20)} for role in roles]}


def test_prompts_are_told_by_layout_and_file(tmp_path: Path) -> None:
    """A file, or a layout, of which no row has an answer has lost none."""
    rng = random.Random(3)
    answered = [talk(rng, "human", "gpt") for _ in range(40)]
    write(tmp_path / "a.jsonl", [*answered, *({"prompt": words(rng, 20)} for _ in range(30))])
    write(tmp_path / "b.jsonl", [talk(rng, "human") for _ in range(30)])
    found = audit(tmp_path)
    assert (alarms(found), notes(found)) == ({}, {"plain_answers", "prompts"})
    (says,) = (one.says for one in found.findings if one.name == "prompts")
    assert says.startswith("60 of 100 rows (60 %) are prompts")
    assert "(prompt 30, conversations 30)" in says
    write(tmp_path / "a.jsonl", [*answered, *(talk(rng, "human") for _ in range(30))])
    found = audit(tmp_path)
    assert alarms(found) == {"no_answer": "wrong"}
    (finding,) = (one for one in found.findings if one.name == "no_answer")
    assert (finding.says[:19], finding.examples) == ("30 of 100 rows (30 ", ("row 40", "row 41", "row 42"))


def test_a_file_of_no_rows_was_not_broken_by_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("# A page\n\nof some lines\n")
    assert "no file of rows" in audit(path).verdict
    whole = write(tmp_path / "rows.jsonl", clean(99))
    whole.write_bytes(whole.read_bytes() + b'{"id": "row-99"')
    assert "a writer died within a line" in audit(whole).verdict


IMAGE = {"type": "image_url", "image_url": {"url": "x.png"}}
MEDIA: dict[str, Row] = {
    "part": {"messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "What is it?"}]}]},
    "part without type": {"messages": [{"role": "user", "content": [{"text": "What is it?"}, {"image": "x.png"}]}]},
    "list": {"messages": [{"role": "user", "content": "<image>What is it?"}], "images": ["x.png"]},
    "marked": {"prompt": "<image>What is it?", "image": "x.png"},
}


@pytest.mark.parametrize("kind", MEDIA)
def test_media_are_told(tmp_path: Path, kind: str) -> None:
    found = looked(tmp_path, [MEDIA[kind], {"prompt": "What?", "image": "not meant"}])
    assert notes(found) == {"media", "prompts"}
    (finding,) = (one for one in found.findings if one.name == "media")
    assert finding.says.startswith("1 of 2 rows (50 %)")


def masked(rng: random.Random, ids: int, learnt: int, **more: Any) -> Row:
    made = [rng.randrange(500, 4_000) for _ in range(ids)]
    return {"input_ids": made, "loss_mask": [0] * (ids - learnt) + [1] * learnt, "completion_tokens": learnt, **more}


def test_what_an_export_has_cut_is_a_note(tmp_path: Path) -> None:
    """Cut at one length, counted as the whole answer, and by --too-long split without its prompt and its end."""
    of, rng = tokenizer(), random.Random(2)
    think, end = of.special_ids.think, min(of.special_ids.end)
    assert think is not None
    whole = [masked(rng, 100 + n, 60 + n, finish_reason="stop", flags="") for n in range(60)]
    for row in whole:
        row["input_ids"][-1] = end
        row["input_ids"][-2] = of.special_ids.think_end
    cut = [masked(rng, 100, 80, finish_reason="length", flags="truncated,cut") for _ in range(20)]
    for row in cut:
        row["input_ids"][19] = think  # the last id of the prompt
        row["completion_tokens"] += 100
    parts = [masked(rng, 100, 100, finish_reason="length", flags="split", part=2, parts=3) for _ in range(20)]
    found = looked(tmp_path, [*whole, *cut, *parts], of)
    assert (set(alarms(found)), notes(found)) == ({"replacement"}, {"cut"})  # which random ids are full of
    assert found.facts["finish_reasons"] == {"stop": 60, "cut": 40}
    for row in (*cut, *parts):
        row["flags"] = "truncated"
    found = looked(tmp_path, [*whole, *cut, *parts], of)
    wrong = {"ids_not_as_counted", "unclosed", "mask_learns_prompt", "truncated", "one_length"}
    assert wrong <= alarms(found).keys()


def test_of_ids_it_is_said_whether_they_are_as_many_as_claimed(tmp_path: Path) -> None:
    rows = [masked(random.Random(n), 100 + n, 60) for n in range(20)]
    rows[3]["completion_tokens"] = 7
    del rows[4]["completion_tokens"]
    told = "\n".join(lines(looked(tmp_path, rows, tokenizer())))
    assert "as many as are claimed in 18 of 19 rows; 1 more claim no number" in told
    assert "claim no tokens" not in told


def test_the_means_of_a_report_are_of_the_same_rows(tmp_path: Path) -> None:
    """Equal answers, and a mean of 154.53 that is 154.5 and then 154."""
    of = tokenizer()
    rows = clean(30, of)
    rows += [rows[0]] * 30
    tokens = [usage(row)["completion_tokens"] for row in rows]
    usage(rows[1])["completion_tokens"] += (27 - sum(tokens)) % 60 + 4  # 60 rows: a mean of n + 31/60
    found = looked(tmp_path, rows, of)
    (said,) = (line for line in lines(found) if "rows tokenized" in line)
    claimed, text = (found.lengths[f"answer, tokens {name}"]["mean"] for name in ("claimed", "of the sample"))
    assert said.endswith(f"usage claims {claimed:,} tokens a row and the text has {text:,}")
    assert text == round(sum(tokens) / 60)
