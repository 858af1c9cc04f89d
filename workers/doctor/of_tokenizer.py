"""Checks of the tokenizer's folder and of what the configuration asks for."""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from common.answer_layout import THINK, THINK_END
from common.chat_template import Tokenizer
from common.messages import BadPrompt
from common.sections import DatasetSettings, SamplingSettings
from common.special_ids import end_ids
from common.template_kwargs import TEMPLATE_ERRORS, template_variables
from workers.doctor.found import Found
from workers.doctor.report import Said

Check = Callable[[Found], Iterator[Said]]
_QUESTION = [{"role": "user", "content": "1 + 1 = ?"}]
# The arguments by which templates are told to think, as the models' makers name them.
_SWITCHES = ("thinking", "enable_thinking")
# What /generate takes for what is not sent: generation_config.json is read by the OpenAI routes alone.
_SERVER_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
# max_new_tokens of a request that has none.
_SERVER_LENGTH = 128
_SHORT_THINKING = 1024
# What a busy server gives each of its answers; slower ones were measured at 9 to 17.
_SLOW_TOKENS_PER_SECOND = 10.0


def _special_ids(found: Found) -> Iterator[Said]:
    if found.tokenizer is None:
        return
    ids = found.tokenizer.special_ids
    names = {token_id: name for name, token_id in found.tokenizer.control_ids.items()}
    marks = [f"{name} {one}" for name, one in ((THINK, ids.think), (THINK_END, ids.think_end)) if one is not None]
    end = ", ".join(f"{names.get(one, '?')} {one}" for one in ids.end) or "none"
    tools = ", ".join(f"{name} {one}" for name, one in ids.tools.items())
    first, last = _ordinary(found.tokenizer)
    parts = [", ".join(marks) or "no think marks", f"end of answer {end}", *([f"tools {tools}"] if tools else [])]
    yield Said("ok", f"{'; '.join(parts)}; {found.tokenizer.vocab_size:,} ids, ordinary ones {first} to {last}")


def _ordinary(tokenizer: Tokenizer) -> tuple[int, int]:
    """The first and the last of the most ids in a row that are no control tokens: what `simulate` may answer with."""
    bounds = sorted({-1, *tokenizer.control_ids.values(), tokenizer.vocab_size})
    before, behind = max(pairwise(bounds), key=lambda pair: pair[1] - pair[0])
    return before + 1, behind - 1


def _template(found: Found) -> Iterator[Said]:
    if found.tokenizer is None:
        return
    unread = (found.tokenizer.unread(dataset) for dataset in found.datasets)
    for sentence in (*found.tokenizer.warnings, *(one for sentences in unread for one in sentences)):
        yield Said.of("warning", sentence)
    prints = found.tokenizer.fingerprint()
    yield Said("ok", f"template {prints['template_sha256'][:16]}, tokenizer {prints['tokenizer_sha256'][:16]} (sha256)")


def _thinking(found: Found) -> Iterator[Said]:
    if found.tokenizer is None:
        return
    asked: dict[bytes, tuple[dict[str, Any], list[str]]] = {}
    for dataset in found.datasets:
        kwargs = found.settings.template_kwargs_of(dataset)
        asked.setdefault(msgspec.json.encode(kwargs, order="sorted"), (kwargs, []))[1].append(dataset.name)
    if not asked:
        asked[b""] = (found.settings.tokenizer.chat_template_kwargs, [])
    for kwargs, names in asked.values():
        said = _thinks(found.tokenizer, kwargs)
        yield said if len(asked) == 1 else said._replace(says=f"{', '.join(names)}: {said.says}")


def _thinks(tokenizer: Tokenizer, kwargs: Mapping[str, Any]) -> Said:
    prompt = _rendered(tokenizer, kwargs)
    switches = [name for name in _SWITCHES if name in template_variables(tokenizer.template_text)]
    told = {name: kwargs[name] for name in switches if name in kwargs}
    off = any(value is False for value in told.values())
    tail = prompt[-40:].rstrip()
    if tail.endswith(THINK):
        return Said("ok", f"on: the prompt ends with {THINK}, and the model writes {THINK_END}")
    if off:
        return Said("ok", f"off, as chat_template_kwargs say ({_listed(told)})")
    for name in switches:
        on = _rendered(tokenizer, {**kwargs, name: True})
        if on != prompt:
            return Said(
                "warning",
                "off: the chat template was not told to think, so the model writes no reasoning",
                f"set chat_template_kwargs = {{ {name} = true }}, or false if that is meant",
            )
    if tail.endswith(THINK_END):
        return Said(
            "warning",
            f"off: the prompt ends with an empty think block ({THINK_END})",
            "use the chat template of the reasoning model, if its reasoning is wanted",
        )
    if tokenizer.special_ids.think is not None or THINK in tokenizer.template_text:
        return Said("ok", f"the prompt has no {THINK} at its end: a model that thinks writes it itself")
    return Said("ok", "neither the tokenizer nor the chat template knows of a think block")


def _rendered(tokenizer: Tokenizer, kwargs: Mapping[str, Any]) -> str:
    try:
        return tokenizer.render(_QUESTION, None, kwargs)
    except (BadPrompt, *TEMPLATE_ERRORS):  # it may want other conversations
        return ""


def _generation_config(found: Found) -> Iterator[Said]:
    folder = found.settings.tokenizer.path
    path = folder / "generation_config.json"
    told = _json(path)
    if told is None:
        if path.exists():
            yield Said("warning", f"{path} cannot be read as a JSON object", "get the model's own file anew")
        elif folder.is_dir():  # where there is no folder another check says so
            yield Said("ok", "there is none beside the tokenizer, so no sampling is recommended")
        return
    fine = True
    for where, sampling in _samplings(found):
        if differs := list(_differences(told, sampling)):
            fine = False
            yield Said(
                "warning",
                f"its makers recommend {', '.join(differs)}; /generate does not take that by itself",
                f"set these in {where} if the data shall be as the model is meant to be used",
            )
    _, ends = end_ids(folder)
    model = _ends(_json(folder / "config.json") or {})
    if missing := [one for one in model if one not in ends]:
        fine = False
        yield Said(
            "warning",
            f"config.json ends an answer at {_ids(missing)} too, which generation_config.json does not list "
            f"({_ids(ends)}); SGLang stops at either",
            "see that both files are the model's own",
        )
    if fine:
        yield Said("ok", "asks for no other sampling than is sent, and for the same end ids")


def _samplings(found: Found) -> list[tuple[str, SamplingSettings]]:
    """Each sampling that is asked for, with the place where it stands."""
    many: dict[bytes, tuple[str, SamplingSettings]] = {}
    for dataset in found.datasets or [DatasetSettings(name="none", path=Path())]:
        sampling = found.settings.sampling_of(dataset)
        own = sampling != found.settings.sampling.model_copy(update={"max_new_tokens": sampling.max_new_tokens})
        where = f"the sampling of {dataset.name}" if own else "[sampling]"
        key = msgspec.json.encode({**sampling.params(), "max_new_tokens": 0}, order="sorted")
        many.setdefault(key, (where, sampling))
    return list(many.values())


def _differences(told: Mapping[str, Any], sampling: SamplingSettings) -> Iterator[str]:
    sent = sampling.params()
    for name, default in _SERVER_DEFAULTS.items():
        wanted = told.get(name)
        if isinstance(wanted, bool) or not isinstance(wanted, (int, float)):
            continue
        if name == "top_k" and wanted <= 0:
            wanted = -1
        used = sent.get(name, default)
        if wanted != used:
            yield f"{name} {wanted:g} (here {used:g}{'' if name in sent else ', by default'})"


def _answer_length(found: Found) -> Iterator[Said]:
    said: dict[Said, None] = {}
    for asked, where, kwargs in found.lengths():
        thinks = found.tokenizer is not None and _rendered(found.tokenizer, kwargs).rstrip().endswith(THINK)
        if asked <= _SERVER_LENGTH or (thinks and asked < _SHORT_THINKING):
            why = "a reasoning model seldom ends its thoughts within that" if thinks else "few answers end within that"
            says = f"{where} is {asked:,}: {why}, and what is cut off has no end"
            said[Said("warning", says, "raise it, as to 10,240")] = None
    yield from said or [Said("ok", f"up to {found.most_asked[0]:,} tokens")]


def _request_timeout(found: Found) -> Iterator[Said]:
    seconds = found.settings.server.request_timeout_seconds
    if seconds is None:
        yield Said("ok", "none set: an answer is waited for as long as its server is at work")
        return
    asked, _ = found.most_asked
    needed = asked / seconds
    if needed > _SLOW_TOKENS_PER_SECOND:
        yield Said(
            "warning",
            f"an answer of {asked:,} tokens must come at {needed:,.0f} tokens/s to end within {seconds:g} s, and a "
            "busy server gives each some 10 to 20: the longest answers would be dropped, and they alone",
            f"leave [server] request_timeout_seconds out, or raise it to {asked / _SLOW_TOKENS_PER_SECOND:.0f} or more",
        )
    else:
        yield Said("ok", f"{seconds:g} s, enough at {needed:,.1f} tokens/s")


def fp8_kv_file(folder: Path) -> str:
    """The file of a model's folder by which SGLang makes its KV cache fp8 unless told otherwise; "" if none does.

    Its /server_info says "auto" then. As srt/mem_cache/kv_cache_dtype.py and layers/quantization/modelopt_quant.py of
    0.5.23 have it: a kv_cache_scheme counts in ModelOpt's files alone, which have a quant_algo.
    """
    for name, key in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        told = (_json(folder / name) or {}).get(key)
        if not isinstance(told, dict):
            continue
        scheme = told.get("kv_cache_scheme") if told.get("quant_algo") else None
        if isinstance(scheme, dict):
            is_fp8 = (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
        else:
            is_fp8 = str(told.get("kv_cache_quant_algo")).upper() == "FP8"
        if is_fp8:
            return name
    return ""


def _json(path: Path) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _ends(config: Mapping[str, Any]) -> list[int]:
    text = config.get("text_config")
    ends = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
    return [one for one in (ends if isinstance(ends, list) else [ends]) if isinstance(one, int)]


def _ids(ids: Any) -> str:
    return ", ".join(map(str, ids))


def _listed(told: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {str(value).lower()}" for name, value in told.items())


OWN_CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "special_ids": _special_ids,
        "template": _template,
        "thinking": _thinking,
        "generation_config": _generation_config,
        "answer_length": _answer_length,
        "request_timeout": _request_timeout,
    }
)
