"""What a dry run says of a source: its layouts, prompts, lengths and rejects, with the example tokenizer."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.chat_template import Tokenizer
from common.errors import DataError
from common.sections import DatasetSettings, TokenizerSettings
from common.settings import load_settings
from producer.datasets.cursor import Cursor
from producer.datasets.fed import fed
from producer.datasets.permutation import Permutation
from producer.datasets.row_table import ShuffledReader, make_table
from producer.datasets.sample import FIRST_ROWS, PLACES, ROWS_AT_A_PLACE, first_look, sample
from producer.dry_run import DryRun, dry_run, lines
from tests.conftest import REPO

TOKENIZER = REPO / "examples" / "tokenizer"
FAR = 60.0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerSettings(path=TOKENIZER))


def write(path: Path, *rows: Any) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def looked(folder: Path, tokenizer: Tokenizer, *rows: Any, more: str = "", context_length: int | None = None) -> DryRun:
    write(folder / "a.jsonl", *rows)
    config = folder / "tokenmill.toml"
    config.write_text(
        f'[tokenizer]\npath = "{TOKENIZER}"\n[sampling]\nmax_new_tokens = 64\nfit = "cut"\n'
        f'[[datasets]]\nname = "A"\npath = "a.jsonl"\n{more}'
    )
    settings = load_settings(config)
    return dry_run(settings, settings.datasets[0], tokenizer, tokenizer.vocab_size, context_length)


def ids(*values: int) -> dict[str, Any]:
    return {"input_ids": list(values)}


def test_layouts_counts_and_lengths(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [ids(*[7] * length) for length in range(1, 101)]

    found = looked(tmp_path, tokenizer, *rows, "{", {"question": "Why?"}, ids(5000), context_length=120)

    assert found.layouts == {"input_ids": 101, "question": 1, "none": 1}
    assert (found.rows, found.all_rows, found.converted) == (103, True, 101)
    assert found.rejected == {"not_json": 1, "id_out_of_range": 1}
    assert [(one.place, one.reason) for one in found.rejects] == [
        ("row 100", "not_json"),
        ("row 102", "id_out_of_range"),
    ]
    # The question has some tokens of its own among 1 to 100.
    assert found.prompt_tokens == {"min": 1, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    # 54 tokens leave room for 64 in a context of 120, of which two stay empty.
    assert found.cut == 100 - 54
    assert [prompt.place for prompt in found.prompts] == ["row 0", "row 50", "row 101"]


def test_control_tokens_of_the_template_are_marked_and_typed_ones_are_not(tmp_path: Path, tokenizer: Tokenizer) -> None:
    name = next(iter(tokenizer.render([{"role": "user", "content": "x"}], None).partition("user")))
    found = looked(tmp_path, tokenizer, {"prompt": f"Say {name} twice.\x1b[31m"})

    (prompt,) = found.prompts
    assert f"⟦{name}⟧" in prompt.text
    assert f"Say {name} twice." in prompt.text
    assert prompt.text.endswith("⟧")
    shown = "\n".join(lines(found))
    assert "\\x1b[31m" in shown
    assert "\x1b" not in shown


def test_a_long_prompt_is_shortened_in_its_middle(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (prompt,) = looked(tmp_path, tokenizer, ids(*range(100, 1100))).prompts

    assert (prompt.prompt_tokens, prompt.left_out_tokens) == (1000, 550)
    assert "\n[... 550 of 1,000 tokens are left out here ...]\n" in prompt.text
    assert prompt.text.startswith(tokenizer.decode(range(100, 200)))
    assert prompt.text.endswith(tokenizer.decode(range(1000, 1100)))


def test_of_conversations_made_anew_the_first_turn_is_shown(tmp_path: Path, tokenizer: Tokenizer) -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]

    found = looked(tmp_path, tokenizer, {"messages": turns}, more='turns = "all"\n')

    plain = looked(tmp_path, tokenizer, {"messages": turns[:1]})
    assert [prompt.text for prompt in found.prompts] == [prompt.text for prompt in plain.prompts]
    assert any("the first turn of each conversation" in line for line in lines(found))
    assert not any("the first turn" in line for line in lines(plain))


def test_what_is_a_datasets_own_counts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    own = (
        'columns.prompt = "q"\nmax_new_tokens = 9\nchat_template_kwargs = { thinking = false }\n'
        "[datasets.sampling]\ntemperature = 0.6\n"
    )
    plain = looked(tmp_path, tokenizer, {"prompt": "a"}).prompts[0]
    found = looked(tmp_path, tokenizer, {"q": "a", "messages": "b"}, more=own)

    assert found.layouts == {"prompt": 1}
    assert found.sampling_params == {"max_new_tokens": 9, "temperature": 0.6}
    assert found.chat_template_kwargs == {"thinking": False}
    assert found.prompts[0].max_new_tokens == 9
    assert found.prompts[0].text != plain.text


def test_what_limit_and_shuffle_leave_is_what_is_shown(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """200 rows whose prompts have 1 to 200 tokens: their lengths say which of them they are."""
    rows = [ids(*[7] * length) for length in range(1, 201)]

    found = looked(tmp_path, tokenizer, *rows, more="limit = 40\nshuffle = 3\n")

    source = tmp_path / "a.jsonl"
    table = make_table(source, tmp_path, 2**20)
    order = [row.index for row in ShuffledReader(source, tmp_path, table, 3, [200]).rows(Cursor())]
    assert sorted(order) == list(range(200))
    assert (found.rows, found.fed_rows, found.all_rows, found.limit, found.shuffle) == (40, 40, True, 40, 3)
    assert [prompt.place for prompt in found.prompts] == [f"row {order[step]}" for step in (0, 20, 39)]
    assert [prompt.prompt_tokens for prompt in found.prompts] == [order[step] + 1 for step in (0, 20, 39)]
    assert found.prompt_tokens["max"] == max(order[:40]) + 1
    shown = "\n".join(lines(found))
    assert "fed        40 rows: shuffle = 3, limit = 40, of 200" in shown
    assert "looked at  40 rows: all that are fed" in shown


def test_without_a_shuffle_the_limit_leaves_the_first_rows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [ids(*[7] * length) for length in range(1, 201)]
    found = looked(tmp_path, tokenizer, *rows, more="limit = 40\n")
    assert (found.rows, found.fed_rows, found.prompt_tokens["max"]) == (40, 40, 40)
    assert [prompt.place for prompt in found.prompts] == ["row 0", "row 20", "row 39"]
    whole = looked(tmp_path, tokenizer, *rows, more="limit = 400\n")
    assert (whole.rows, whole.fed_rows, whole.prompt_tokens["max"]) == (200, 200, 200)


def test_of_many_rows_that_are_fed_some_from_all_over_are_seen(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", *(f'{{"prompt": "{index}"}}' for index in range(9000)))
    most = FIRST_ROWS + PLACES * ROWS_AT_A_PLACE

    def seen(**more: Any) -> list[int]:
        taken, rows, _ = fed(source, DatasetSettings(name="A", path=source, **more), FAR)
        assert (rows, taken.all, len(taken.rows)) == (8000, False, most)
        return [row.index for row in taken.rows]

    assert seen(limit=8000)[: FIRST_ROWS + 2] == [*range(FIRST_ROWS + 1), FIRST_ROWS + (8000 - FIRST_ROWS) // 300]
    assert seen(limit=8000, shuffle=5) == [Permutation(9000, 5)[step] for step in seen(limit=8000)]
    late = fed(source, DatasetSettings(name="A", path=source, shuffle=5), -1.0)
    assert (late.rows, late.taken.all, late.taken.places[0]) == (None, False, "row 0")
    assert late.order.startswith("shuffle = 5: which rows that is")


def test_rows_from_all_over_a_large_file_are_seen(tmp_path: Path) -> None:
    total = 100_000
    source = write(tmp_path / "a.jsonl", *(f'{{"prompt": "{index}"}}' for index in range(total)))

    taken = sample(source, 2**20, FAR)

    seen = [int(json.loads(row.value)["prompt"]) for row in taken.rows if isinstance(row.value, bytes)]
    assert len(seen) == len(set(seen)) == FIRST_ROWS + PLACES * ROWS_AT_A_PLACE == len(taken.places)
    assert seen[:FIRST_ROWS] == list(range(FIRST_ROWS))
    assert seen == sorted(seen)
    starts = seen[FIRST_ROWS::ROWS_AT_A_PLACE]
    assert all(abs(start / total - (place + 1) / 11) < 0.01 for place, start in enumerate(starts))
    assert not taken.all
    assert taken.places[:2] == ["row 0", "row 1"]
    begins = int(taken.places[-1].split()[1].replace(",", ""))
    assert source.read_bytes()[begins:].startswith(b'{"prompt": "%d"}\n' % seen[-1])


def test_rows_from_all_over_a_parquet_file_are_seen(tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": [str(index) for index in range(11_000)]}), source, row_group_size=500)

    taken = sample(source, 2**20, FAR)

    seen = [int(row.value["prompt"]) for row in taken.rows if isinstance(row.value, dict)]
    assert seen[FIRST_ROWS::ROWS_AT_A_PLACE] == [1000 * place for place in range(1, 11)]
    assert taken.places[FIRST_ROWS] == "row 1,000 of a.parquet"


def test_files_of_a_folder_are_seen(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path / f"{number}.json", json.dumps([{"prompt": f"{number}.{row}"} for row in range(400)]))

    taken = sample(tmp_path, 2**20, FAR)

    files = {json.loads(row.value)["prompt"].partition(".")[0] for row in taken.rows if isinstance(row.value, bytes)}
    assert files == {"0", *(str(int(place * 20 / 11)) for place in range(1, 11))}
    assert taken.places[FIRST_ROWS].endswith(" of 1.json")


def test_what_cannot_be_read_on_is_said_and_what_cannot_be_read_is_raised(tmp_path: Path) -> None:
    source = tmp_path / "a.json"
    source.write_text('[{"prompt": "a"}, {"prompt": "b"},')
    assert len(sample(source, 2**20, FAR).rows) == 2
    assert "a.json" in sample(source, 2**20, FAR).fault
    source.write_bytes(b"PAR1 and no end")
    with pytest.raises(DataError, match="no whole Parquet file"):
        sample(source, 2**20, FAR)


@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        ([], {}, "no rows"),
        ([{"prompt": "a"}], {}, "layout prompt"),
        ([{"x": "a"}], {}, "layout none"),
        ([{"x": "a"}], {"columns": {"prompt": "x"}}, "layout prompt"),
        ([{"prompt": "a"}] * 2 + ["{"], {}, "layouts prompt (2), none (1) of all 3 rows"),
        ([{"prompt": "a"}] * 299 + [[{"role": "user", "content": "a"}]] * 9, {},
         "layouts prompt (299), message_list (1) of the first 300 rows"),
    ],
)  # fmt: skip
def test_the_layouts_are_named(tmp_path: Path, rows: list[Any], more: dict[str, Any], said: str) -> None:
    source = write(tmp_path / "a.jsonl", *rows)
    assert first_look(source, DatasetSettings(name="A", path=source, **more))[0] == said
