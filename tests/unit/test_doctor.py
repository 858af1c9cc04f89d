"""What `doctor` finds in what servers say and in the configuration: each check, for a person and for a program."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.chat_template import Tokenizer
from common.sections import TokenizerSettings
from common.settings import Settings, load_settings
from tests.conftest import REPO
from tests.unit.conftest import Write
from tests.unit.preflight_steps import INFO, paths_of, several
from workers.doctor.examine import examine
from workers.doctor.live import agreement
from workers.doctor.report import Report, lines
from workers.sglang.probe import ODD_TEXT, TextRead

IDS = 4096  # of the examples' tokenizer
TOKENIZER = REPO / "examples" / "tokenizer"
FP8_KV = {"type": "float", "num_bits": 8, "dynamic": False}
Hosts = dict[str, dict[str, Any]]
Found = dict[str, tuple[str, str, str]]


def configured(
    write: Write, *hosts: str, tokenizer: Path = TOKENIZER, server: str = "", sampling: str = "", more: str = ""
) -> Settings:
    urls = json.dumps([f"http://{host}:30000" for host in hosts])
    text = (
        f'[server]\nurls = {urls}\n{server}\n[tokenizer]\npath = "{tokenizer}"\n'
        f"[sampling]\nmax_new_tokens = 1500\n{sampling}\n{more}"
    )
    return load_settings(write(text))


def report(write: Write, hosts: Hosts, *urls: str, **settings: Any) -> Report:
    return examine(configured(write, *(urls or hosts), **settings), several(hosts), probe=False)


def of(write: Write, name: str, hosts: Hosts | None = None, **settings: Any) -> tuple[str, str, str]:
    """State, says and do of the one check of this name."""
    found = report(write, hosts or {"one": paths_of(vocab_size=IDS)}, **settings)
    [check] = [check for check in found.checks if check.name == name]
    return check.state, check.says, check.do


def not_ok(found: Report) -> list[str]:
    return [check.name for check in found.checks if check.state != "ok"]


def test_nothing_is_said_against_a_good_server(write: Write) -> None:
    found = report(write, {"one": paths_of(vocab_size=IDS)})

    assert not_ok(found) == []
    assert [check.name for check in found.checks] == [
        "reachable",
        "release",
        "model",
        "vocabulary",
        "context",
        "kv_pool",
        "kv_cache_dtype",
        "quantization",
        "hierarchical_cache",
        "auto_truncate",
        "parsers",
        "special_ids",
        "template",
        "thinking",
        "generation_config",
        "answer_length",
        "request_timeout",
    ]
    said = {check.name: check.says for check in found.checks}
    assert said["release"] == "SGLang 0.5.23; no fault of it is known"
    assert said["model"] == "models/a, weights default"
    assert said["context"] == "2,048 tokens: prompts of up to 548 beside the longest answers"
    assert said["kv_pool"] == "4,096 tokens: 2 answers of 1,500 tokens in flight, or 5 of half that"
    assert said["special_ids"] == (
        "<think> 4092, </think> 4093; end of answer <|im_end|> 4090; tools <tool_call> 4094, </tool_call> 4095; "
        "4,096 ids, ordinary ones 0 to 4087"
    )
    assert said["thinking"] == "on: the prompt ends with <think>, and the model writes </think>"
    assert list(lines(found))[-1] == "nothing is wrong, no warnings: the server can be used"


def test_the_report_is_one_object_of_two_lists_without_keys(write: Write) -> None:
    written = msgspec.json.encode(report(write, {"one": paths_of()}))

    told = json.loads(written)
    assert set(told) == {"checks", "servers"}
    assert all(set(check) == {"name", "state", "says", "do"} for check in told["checks"])
    assert told["servers"][0]["max_total_num_tokens"] == INFO["max_total_num_tokens"]
    assert b"never-to-be-stored" not in written


def test_no_line_is_longer_than_the_terminal(write: Write) -> None:
    hosts = {"one": paths_of(kv_cache_dtype="fp8_e5m2", allow_auto_truncate=True), "two": paths_of(version="0.5.9")}

    shown = list(lines(report(write, hosts, "one", "two"), 80))

    assert max(map(len, shown)) <= 80
    assert [line.split()[1] for line in shown if line.startswith("warning")] == [
        "release",
        "release",
        "kv_cache_dtype",
        "auto_truncate",
    ]
    assert shown[-1] == "nothing is wrong, 4 warnings: the 2 servers can be used"


def test_every_fault_of_every_server_is_said(write: Write) -> None:
    hosts = {"one": paths_of(version="0.5.13"), "two": paths_of(version="0.5.2"), "four": paths_of(model_path="b")}

    found = report(write, hosts, "one", "two", "three", "four")

    assert [server.url for server in found.servers] == ["http://one:30000", "http://two:30000", "http://four:30000"]
    away, old, other = found.of("wrong")
    assert (away.name, old.name, other.name) == ("reachable", "release", "model")
    assert away.says.startswith("http://three:30000 cannot be reached (Connection refused)")
    assert old.says.startswith("http://two:30000: runs SGLang 0.5.2, which puts ids of the prompt into output_ids")
    assert old.do == "upgrade it to 0.5.5 or later, or start it with --skip-tokenizer-init"
    assert other.says == "http://four:30000: serves model 'b' and http://one:30000 'models/a'"
    assert list(lines(found))[-1].startswith("3 wrong (reachable, release, model), 3 warnings: see to what is wrong")


def test_servers_that_say_the_same_share_a_line(write: Write) -> None:
    hosts = {"one": paths_of(), "two": paths_of(kv_cache_dtype="fp8_e4m3"), "three": paths_of()}

    checks = [check for check in report(write, hosts).checks if check.name in {"kv_cache_dtype", "quantization"}]

    assert [(check.state, check.says.partition(": ")[0]) for check in checks] == [
        ("ok", "http://one:30000, http://three:30000"),
        ("warning", "http://two:30000"),
        ("ok", "none set at launch"),
    ]


@pytest.mark.parametrize(
    ("told", "name", "state", "says"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype", "warning", "kv_cache_dtype is fp8_e5m2, which can make"),
        ({"kv_cache_dtype": "mxfp8"}, "kv_cache_dtype", "warning", "kv_cache_dtype is mxfp8, which can make"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype", "warning", "kv_cache_dtype is nvfp4, which can make"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype", "ok", "bfloat16"),
        ({"quantization": "awq"}, "quantization", "ok", "awq: the answers are those of the quantized model"),
        ({"allow_auto_truncate": True}, "auto_truncate", "warning", "allow_auto_truncate is on"),
        ({"reasoning_parser": "kimi_k2"}, "parsers", "ok", "reasoning_parser kimi_k2: harmless, /generate answers"),
        ({"version": "0.5.19"}, "release", "warning", "SGLang 0.5.19: a stream that its client has left"),
        ({"context_length": 1500}, "context", "wrong", "it has a context of 1,500 tokens, where max_new_tokens 1,500"),
        ({"max_total_num_tokens": 1500}, "kv_pool", "warning", "it has a KV pool of 1,500 tokens and cuts off"),
        ({"vocab_size": IDS + 64}, "vocabulary", "warning", "it knows 4,160 ids and the tokenizer in"),
        ({"preferred_sampling_params": {"top_p": 0.5}}, "preferred_sampling", "warning", "its preferred_sampling"),
    ],
)
def test_what_a_server_says_of_itself(write: Write, told: dict[str, Any], name: str, state: str, says: str) -> None:
    found = of(write, name, {"one": paths_of(**told)})

    assert found[0] == state
    assert found[1].removeprefix("http://one:30000: ").startswith(says)
    assert bool(found[2]) == (state != "ok")


@pytest.mark.parametrize(
    ("told", "state", "says"),
    [
        ({}, "warning", "--hicache-size is per rank: 100 GB on each of 8 ranks, 800 GB of a host's memory in all"),
        ({"nnodes": 2}, "warning", "--hicache-size is per rank: 100 GB on each of 4 ranks, 400 GB of"),
        ({"dp_size": 2}, "warning", "--hicache-size is per rank: 100 GB on each of 16 ranks, 1,600 GB of"),
        ({"dp_size": 8, "enable_dp_attention": True}, "warning", "--hicache-size is per rank: 100 GB on each of 8"),
        ({"tp_size": 1}, "ok", "100 GB of the host's memory (--hicache-size)"),
        ({"enable_hierarchical_cache": False}, "ok", "off"),
        (
            {
                "hicache_size": 0,
                "internal_states": [{"memory_usage": {"kvcache": 30.5}}],
            },
            "warning",
            "--hicache-ratio 2 is per rank: 61 GB on each of 8 ranks, 488 GB",
        ),
    ],
)
def test_a_hierarchical_cache_is_told_for_the_whole_host(
    write: Write, told: dict[str, Any], state: str, says: str
) -> None:
    hicache = {"enable_hierarchical_cache": True, "hicache_size": 100, "hicache_ratio": 2.0, "tp_size": 8}

    found = of(write, "hierarchical_cache", {"one": paths_of(**{**hicache, **told})})

    assert found[0] == state
    assert found[1].removeprefix("http://one:30000: ").startswith(says)


def test_the_longest_answers_of_any_dataset_count(write: Write) -> None:
    own = '[[datasets]]\nname = "A"\npath = "a"\nmax_new_tokens = 3000\n'
    cut = '[datasets.sampling]\nfit = "cut"\n'

    assert of(write, "context", more=own)[2].startswith("lower max_new_tokens of A, or start it with a longer")
    assert of(write, "context", more=own + cut)[0] == "ok"


def template_of(write: Write, folder: Path, change: tuple[str, str], kwargs: str = "") -> tuple[str, str, str]:
    """What is said of the thinking of the examples' template with a change."""
    shutil.copytree(TOKENIZER, folder)
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace(*change))
    more = f'[[datasets]]\nname = "A"\npath = "a"\nchat_template_kwargs = {{ {kwargs} }}\n' if kwargs else ""
    return of(write, "thinking", tokenizer=folder, more=more)


# A template that thinks only when it is told to, as DeepSeek's does.
UNTOLD = ("thinking is defined and thinking is false", "not (thinking is defined and thinking)")


def test_a_template_that_was_not_told_to_think_is_said(write: Write, tmp_path: Path) -> None:
    state, says, do = template_of(write, tmp_path / "t", UNTOLD)

    assert state == "warning"
    assert says == "off: the chat template was not told to think, so the model writes no reasoning"
    assert do == "set chat_template_kwargs = { thinking = true }, or false if that is meant"


@pytest.mark.parametrize(("kwargs", "says"), [("thinking = true", "on: "), ("thinking = false", "off, as chat_temp")])
def test_one_that_was_told_is_not(write: Write, tmp_path: Path, kwargs: str, says: str) -> None:
    found = template_of(write, tmp_path / "t", UNTOLD, kwargs)

    assert found[0] == "ok"
    assert found[1].startswith(says)


def test_a_template_that_never_thinks_is_said(write: Write, tmp_path: Path) -> None:
    found = template_of(write, tmp_path / "t", ("thinking is defined and thinking is false", "true"))

    assert found[:2] == ("warning", "off: the prompt ends with an empty think block (</think>)")


def test_a_model_that_writes_think_itself_is_told(write: Write, tmp_path: Path) -> None:
    found = template_of(write, tmp_path / "t", ("{{- '<|im_start|>assistant\\n<think>' -}}", "{{- '<|im_start|>a' -}}"))

    assert found[:2] == ("ok", "the prompt has no <think> at its end: a model that thinks writes it itself")


def generation_config(write: Write, folder: Path, told: dict[str, Any], **more: Any) -> tuple[str, str, str]:
    shutil.copytree(TOKENIZER, folder)
    (folder / "generation_config.json").write_text(json.dumps(told))
    return of(write, "generation_config", tokenizer=folder, **more)


@pytest.mark.parametrize(
    ("name", "told", "state"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}, "warning"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, "ok"),
        ("config.json", {"quantization_config": {"quant_algo": "FP8", "kv_cache_scheme": FP8_KV}}, "warning"),
        ("config.json", {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": None}}, "ok"),
    ],
)
def test_a_kv_cache_in_fp8_by_the_models_files_is_said(
    write: Write, tmp_path: Path, name: str, told: dict[str, Any], state: str
) -> None:
    """SGLang says "auto" of it."""
    folder = tmp_path / "t"
    shutil.copytree(TOKENIZER, folder)
    before = json.loads((folder / name).read_bytes()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps(before | told))
    found, says, _ = of(
        write, "kv_cache_dtype", {"one": paths_of(vocab_size=IDS, kv_cache_dtype="auto")}, tokenizer=folder
    )
    assert (found, f"{name} beside the tokenizer asks for fp8" in says) == (state, state == "warning")


def test_sampling_that_generate_ignores_is_said(write: Write, tmp_path: Path) -> None:
    told = {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "do_sample": True, "eos_token_id": 4090}

    state, says, do = generation_config(write, tmp_path / "t", told)

    assert state == "warning"
    assert says == (
        "its makers recommend temperature 0.6 (here 1), top_p 0.95 (here 1, by default); /generate does not take that "
        "by itself"
    )
    assert do == "set these in [sampling] if the data shall be as the model is meant to be used"


def test_a_damaged_generation_config_is_not_taken_for_none(write: Write, tmp_path: Path) -> None:
    shutil.copytree(TOKENIZER, tmp_path / "t")
    (tmp_path / "t" / "generation_config.json").write_text('{"temperature": 0.6')
    state, says, _ = of(write, "generation_config", tokenizer=tmp_path / "t")
    assert (state, says) == ("warning", f"{tmp_path}/t/generation_config.json cannot be read as a JSON object")


def test_sampling_as_recommended_is_fine(write: Write, tmp_path: Path) -> None:
    told = {"temperature": 0.6, "top_p": 0.95, "eos_token_id": [4090]}

    found = generation_config(write, tmp_path / "t", told, sampling="temperature = 0.6\ntop_p = 0.95")

    assert found[:2] == ("ok", "asks for no other sampling than is sent, and for the same end ids")


def test_end_ids_that_differ_are_said(write: Write, tmp_path: Path) -> None:
    state, says, _ = generation_config(write, tmp_path / "t", {"eos_token_id": [4091]})

    assert state == "warning"
    assert says.startswith("config.json ends an answer at 4090 too, which generation_config.json does not list (4091)")


@pytest.mark.parametrize(
    ("tokens", "state", "says"),
    [
        (128, "warning", "max_new_tokens of A is 128: a reasoning model seldom ends its thoughts within that"),
        (1023, "warning", "max_new_tokens of A is 1,023: a reasoning model seldom"),
        (1024, "ok", "up to 1,024 tokens"),
    ],
)
def test_short_answers_of_a_model_that_thinks_are_said(write: Write, tokens: int, state: str, says: str) -> None:
    more = f'[[datasets]]\nname = "A"\npath = "a"\nmax_new_tokens = {tokens}\n'

    found = of(write, "answer_length", more=more)

    assert found[0] == state
    assert found[1].startswith(says)


def test_short_answers_of_a_dataset_that_does_not_think_are_no_news(write: Write) -> None:
    """Two datasets of one length, of which one was told not to think: docs/doctor.md says how short is too short."""
    own = '[[datasets]]\nname = "{}"\npath = "a"\nmax_new_tokens = {}\nchat_template_kwargs = {{ thinking = {} }}\n'
    assert of(write, "answer_length", more=own.format("A", 512, "false")) == ("ok", "up to 512 tokens", "")
    state, says, _ = of(write, "answer_length", more=own.format("A", 128, "false"))
    assert state == "warning"
    assert says.startswith("max_new_tokens of A is 128: few answers end within that")
    both = own.format("A", 512, "false") + own.format("B", 512, "true")
    state, says, _ = of(write, "answer_length", more=both)
    assert state == "warning"
    assert says.startswith("max_new_tokens of B is 512: a reasoning model seldom")


def test_a_timeout_that_drops_the_long_answers_is_said(write: Write) -> None:
    state, says, do = of(write, "request_timeout", server="request_timeout_seconds = 60")

    assert state == "warning"
    assert says.startswith("an answer of 1,500 tokens must come at 25 tokens/s to end within 60 s")
    assert do == "leave [server] request_timeout_seconds out, or raise it to 150 or more"
    assert of(write, "request_timeout", server="request_timeout_seconds = 600")[0] == "ok"


def test_arguments_of_the_template_that_change_nothing_are_said(write: Write) -> None:
    own = "chat_template_kwargs = { enable_thinking = true, thinking = false }\n"
    found = report(write, {"one": paths_of(vocab_size=IDS)}, more=f'[[datasets]]\nname = "A"\npath = "a"\n{own}')

    (warning,) = [check for check in found.of("warning") if check.name == "template"]
    assert warning.says.startswith("dataset A chat_template_kwargs: enable_thinking = True changes no prompt")


def test_a_tokenizer_that_does_not_load_is_wrong_and_the_servers_are_shown(write: Write, tmp_path: Path) -> None:
    found = report(write, {"one": paths_of(vocab_size=5)}, tokenizer=tmp_path / "none")

    assert [server.version for server in found.servers] == ["0.5.23"]
    (wrong,) = found.of("wrong")
    assert wrong.name == "tokenizer_files"
    assert wrong.says == f"[tokenizer] path {tmp_path / 'none'} is not a folder"


@pytest.mark.parametrize(
    ("before", "behind", "changed", "wanted"),
    [
        ([], [], 0, "same"),
        ([4090], [], 0, "same"),  # as Llama's begin of text
        ([], [4090], 0, "same"),
        ([4090], [4091], 0, "same"),
        ([], [], 1, "other"),
        ([5000], [], 1, "other"),
    ],
)
def test_a_text_read_by_the_server_is_compared(before: list[int], behind: list[int], changed: int, wanted: str) -> None:
    tokenizer = Tokenizer(TokenizerSettings(path=TOKENIZER))
    (ours,) = tokenizer.encode([ODD_TEXT])
    ids = [*before, ours[0] + changed, *ours[1:], *behind]

    assert agreement(TextRead(len(ids), ids, added=True), tokenizer) == wanted


def test_the_number_of_ids_is_compared_where_there_is_no_more() -> None:
    tokenizer = Tokenizer(TokenizerSettings(path=TOKENIZER))
    (ours,) = tokenizer.encode([ODD_TEXT])

    assert agreement(TextRead(len(ours)), tokenizer) == "same"
    assert agreement(TextRead(len(ours) + 1, added=True), tokenizer) == "same"
    assert agreement(TextRead(len(ours) + 1), tokenizer) == "other"


def test_the_same_text_in_other_ids_is_no_other_vocabulary() -> None:
    tokenizer = Tokenizer(TokenizerSettings(path=TOKENIZER))
    ids = [one for character in ODD_TEXT for one in tokenizer.encode([character])[0]]

    assert agreement(TextRead(len(ids), ids), tokenizer) == "cut"
