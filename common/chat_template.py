"""Messages to `input_ids`: the model's own tokenizer and chat template, loaded once."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from common.errors import TokenizerUnavailable
from common.sections import TokenizerSettings

_PROBE = [{"role": "user", "content": "1 + 1 = ?"}]
# What makes a tokenizer what it is; a change of any of these changes the ids.
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tiktoken.model", "tokenizer.model")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


class Tokenizer:
    """Renders conversations and encodes them; ids are those that `apply_chat_template(tokenize=True)` gives."""

    def __init__(self, settings: TokenizerSettings) -> None:
        """Load the folder `settings.path`; raises TokenizerUnavailable if it is none, or makes no prompt."""
        self._settings = settings
        self._tokenizer = _load(settings)
        self._fast = self._tokenizer.backend_tokenizer if self._tokenizer.is_fast else None
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        self._plain_encode = False
        self._check()
        self.vocab_size = settings.vocab_size or _model_vocab_size(settings.path) or self._largest_id() + 1

    def _check(self) -> None:
        """The quick way to ids must give what the library's own way gives, or it is not taken."""
        try:
            text = self.render(_PROBE, None)
            wanted = self._tokenizer.apply_chat_template(
                _PROBE,
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,
                **self._settings.chat_template_kwargs,
            )
        except Exception as error:
            raise TokenizerUnavailable(
                f"the tokenizer in {self._settings.path} makes no prompt of a simple question ({_reason(error)}); "
                "check its chat template and [tokenizer] chat_template_kwargs"
            ) from error
        if self._fast is None:
            # Keyword arguments lead tiktoken-based tokenizers to a path four times as slow.
            self._plain_encode = list(self._tokenizer.encode(text)) == list(wanted)
        if self.encode([text])[0] != list(wanted):
            raise TokenizerUnavailable(
                f"the tokenizer in {self._settings.path} gives different ids for the same text in two ways; "
                "use another version of transformers"
            )

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """The prompt as text, ending where the model's answer begins; raises whatever the template raises."""
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **self._settings.chat_template_kwargs
        )
        return str(text)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of rendered prompts; control tokens written by the template become control ids."""
        if self._fast is not None:
            return [encoding.ids for encoding in self._fast.encode_batch_fast(list(texts), add_special_tokens=False)]
        if self._plain_encode:
            return [list(self._tokenizer.encode(text)) for text in texts]
        return [list(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def fingerprint(self) -> dict[str, str]:
        """sha256 of what makes the ids: the tokenizer's files, and the chat template."""
        folder = self._settings.path
        files = hashlib.sha256()
        for name in _FILES:
            if (folder / name).is_file():
                files.update(name.encode() + b"\0" + (folder / name).read_bytes())
        template = self._tokenizer.chat_template
        text = template if isinstance(template, str) else msgspec.json.encode(template, order="sorted").decode()
        return {"tokenizer_sha256": files.hexdigest(), "template_sha256": hashlib.sha256(text.encode()).hexdigest()}

    def _largest_id(self) -> int:
        # A vocabulary may have holes: len() of Kimi's is far below its largest id.
        return int(max(self._tokenizer.get_vocab().values()))


def _load(settings: TokenizerSettings) -> Any:
    if not settings.path.is_dir():
        raise TokenizerUnavailable(f"[tokenizer] path {settings.path} is not a folder; name the model's own folder")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that PyTorch is not there is no news here
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes a second; only what tokenizes pays for it

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            settings.path, trust_remote_code=settings.trust_remote_code, local_files_only=True
        )
    except Exception as error:
        cure = "set [tokenizer] path to the model's own folder, with all of its tokenizer's files"
        if "trust_remote_code" in str(error):
            cure = "its tokenizer is Python code: if you trust that, set [tokenizer] trust_remote_code = true"
        raise TokenizerUnavailable(
            f"the tokenizer in {settings.path} does not load ({_reason(error)}); {cure}"
        ) from error
    if not tokenizer.chat_template:
        raise TokenizerUnavailable(
            f"the tokenizer in {settings.path} has no chat template; copy chat_template.jinja from the model there"
        )
    return tokenizer


def _reason(error: Exception) -> str:
    """What the library says, on one line: its own messages go on for paragraphs."""
    first = next(iter(str(error).strip().splitlines()), "").rstrip(" .:")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _model_vocab_size(folder: Path) -> int | None:
    """The model's own vocabulary size, from the config.json beside the tokenizer."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes())
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (OSError, msgspec.DecodeError, AttributeError):
        return None
    return size if isinstance(size, int) and size > 0 else None
