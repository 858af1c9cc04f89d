"""A tokenizer as its tokenizer.json says, where a class of transformers has made something else of it."""

from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from common.errors import TokenizerUnavailable

# Contractions, digits, blanks, marks: what pre-tokenizers and normalizers treat in ways of their own.
_PROBE = "I'd say  1234 + 5.678\t= x_y\r\n\n  ü ﬁ漢字🙂 e\u0301 l'été.\u2028 <x> 's ABCdef"


class _Parts(msgspec.Struct):
    """What cuts and changes a text; the vocabulary, which is most of the file, is passed over."""

    pre_tokenizer: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None


def follow_file(tokenizer: Any, folder: Path) -> str:
    """Give a fast tokenizer the pre-tokenizer and decoder of `folder`/tokenizer.json; answers a warning, or "".

    Since transformers 5 some classes (Qwen2Tokenizer in 5.24; LlamaTokenizer in earlier ones, which DeepSeek-V3 names)
    put a pre-tokenizer of their own in place of the file's, and the ids are then none that the model was trained on.
    SGLang 0.5 restores pre-tokenizer and decoder where their kind is another one, and here it is done by the same rule:
    what the class changes within a kind (add_prefix_space, a pattern), and its normalizer, may come from
    tokenizer_config.json, and is only told, where it makes other ids.
    """
    file = folder / "tokenizer.json"
    if not tokenizer.is_fast or not file.is_file():
        return ""
    try:
        parts = msgspec.json.decode(file.read_bytes(), type=_Parts)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TokenizerUnavailable(f"{file} cannot be read ({error}); copy it from the model's folder anew") from error
    backend = tokenizer.backend_tokenizer
    loaded = _Parts(_state(backend.pre_tokenizer), _state(backend.normalizer))
    if loaded == parts:
        return ""
    whole = tokenizers.Tokenizer.from_file(str(file))
    if _kind(parts.pre_tokenizer) and _kind(loaded.pre_tokenizer) not in {"", _kind(parts.pre_tokenizer)}:
        backend.pre_tokenizer = whole.pre_tokenizer
        backend.decoder = whole.decoder
    if _ids(whole) == _ids(backend):
        return ""
    return (
        f"{type(tokenizer).__name__} of transformers has a normalizer or a pattern of its own, so that some texts get "
        f"other ids than {file} says (SGLang does the same to texts): see that tokenizer_class in "
        "tokenizer_config.json is the model's own"
    )


def _state(part: Any) -> dict[str, Any] | None:
    state = None if part is None else msgspec.json.decode(part.__getstate__())
    return state if isinstance(state, dict) else None


def _kind(state: dict[str, Any] | None) -> str:
    return str(state.get("type", "")) if state else ""


def _ids(backend: Any) -> list[int]:
    return list(backend.encode(_PROBE, add_special_tokens=False).ids)
