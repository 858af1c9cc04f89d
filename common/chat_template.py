"""Messages to `input_ids`: the model's own tokenizer and chat template, loaded once."""

import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from common.control_tokens import ControlTokens, Piece, Rendered
from common.encoding import Encoder, FastEncoder, SlowEncoder, is_refusal
from common.errors import TokenizerUnavailable
from common.messages import BadPrompt, check_messages, joined_parts
from common.quick_template import is_plain, quick_render
from common.sections import DatasetSettings, TokenizerSettings
from common.special_ids import added_tokens, control_marks, find_special_ids
from common.template_kwargs import PROBES, TEMPLATE_ERRORS, unread_kwargs
from common.token_bytes import PROBE, token_bytes
from common.tokenizer_file import follow_file

_QUESTION = [{"role": "user", "content": "1 + 1 = ?"}]
_ANSWER = "It is the number 2."
_ANSWERED = [*_QUESTION, {"role": "assistant", "content": _ANSWER}, *_QUESTION]
# What some tokenizers change, by a normalizer or on the way back.
_ODD = "a  b\t\r\n\n  ü ﬁ漢🙂 e\u0301 .\u2028 <x> 's"
# What makes a tokenizer what it is; a change of any of these changes the ids.
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tiktoken.model", "tokenizer.model")


class Tokenizer:
    """Renders conversations and encodes them; ids are those that `apply_chat_template(tokenize=True)` gives.

    Control tokens in the texts of a conversation are the exception: the library makes control ids of what a user typed,
    and here it is text. `special_ids` are the tokens that steer an answer, `warnings` sentences for whoever starts a
    job.
    """

    def __init__(self, settings: TokenizerSettings) -> None:
        """Load the folder `settings.path`, and see that it is what its files say; raises TokenizerUnavailable."""
        self._settings = settings
        self._tokenizer = _load(settings)
        unlike = follow_file(self._tokenizer, settings.path)
        self._added = added_tokens(settings.path, self._tokenizer)
        self._control = ControlTokens(self._added, self._template_text(), every=not self._tokenizer.is_fast)
        self._encoder = self._make_encoder()
        self._quick = quick_render(self._tokenizer, self._apply, settings.chat_template_kwargs)
        self._check_control_ids()
        # What this tokenizer keeps as it is: where it does not, a prompt with such in it is rejected.
        self._keeps_text = self.decode(self._probed(_ODD)) == _ODD
        self._keeps_nul = "\0" in self.decode(self._probed("a\0b"))
        self._takes_typed = self._cuts_at_control_tokens()
        self.special_ids, self.warnings = find_special_ids(
            settings.path, self._control.ids, self._turn_end(), self._tokenizer.eos_token_id
        )
        self.warnings += unread_kwargs(self._apply, self._template_text(), settings.chat_template_kwargs)
        self.warnings += [unlike] if unlike else []
        self.vocab_size = settings.vocab_size or _model_vocab_size(settings.path) or self._largest_id() + 1

    # Rendering and encoding

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        own_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The prompt as text, ending where the model's answer begins; `own_kwargs` go over those of [tokenizer].

        Raises BadPrompt where the conversation has no right prompt, and whatever the template raises.
        """
        plain = is_plain(messages)
        if not plain or tools is not None:
            check_messages(messages, tools)
        kwargs = self._settings.chat_template_kwargs
        if own_kwargs:
            kwargs = {**kwargs, **own_kwargs}
        try:
            conversation = msgspec.json.encode((messages, tools))
        except UnicodeEncodeError as error:
            raise BadPrompt(
                "bad_text", f"half of a surrogate pair ({error.object[error.start]!a}) is no text"
            ) from None
        for parts in () if plain else joined_parts(messages):
            if len(self._control.found("".join(parts))) > sum(len(self._control.found(part)) for part in parts):
                raise BadPrompt("bad_text", "the parts of a content make a control token when they are joined")
        if self._control.within(conversation):
            if not self._control.can_hide(conversation):
                raise BadPrompt(
                    "bad_text", "it holds a control token and characters of plane 16, which stand for these"
                )
            text = self._render_typed(messages, tools, kwargs)
        else:
            text = Rendered((self._quick or self._apply)(messages, tools, kwargs))
        if not self._keeps_nul and "\0" in text:
            raise BadPrompt("bad_text", "it holds a NUL character, which this tokenizer loses")
        return text

    def _render_typed(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> Rendered:
        try:
            hidden = self._control.hide(messages), self._control.hide(tools)
        except KeyError:
            raise BadPrompt(
                "bad_text", "the name of an argument or of a field of a schema is a control token"
            ) from None
        text = self._control.restore(self._apply(*hidden, kwargs))
        if text is None:
            raise BadPrompt("bad_text", "the chat template changes the text of a control token that stands in it")
        if text.typed and not self._takes_typed:
            raise BadPrompt("bad_text", "it holds a control token, which this tokenizer cannot read as text")
        return text

    def _apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
        )
        return str(text)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of rendered prompts; control tokens written by the template become control ids, typed ones text.

        Raises BadPrompt if one cannot be encoded, or not without a change; the others are then to be given again.
        """
        try:
            encoded = self._encode(texts)
        except BadPrompt:
            raise
        except BaseException as error:
            if not is_refusal(error):
                raise
            raise BadPrompt("bad_text", f"the tokenizer cannot encode it: {_reason(error)}") from None
        for text, ids in zip(texts, encoded, strict=True):
            if self._encoder.may_cut(text):
                self._check_long(text, ids)
        return encoded

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if any(isinstance(text, Rendered) and text.typed for text in texts):
            many = [self._encode_typed(text) if isinstance(text, Rendered) and text.typed else None for text in texts]
            rest = iter(self._encoder.encode([text for text, ids in zip(texts, many, strict=True) if ids is None]))
            return [next(rest) if ids is None else ids for ids in many]
        return self._encoder.encode(texts)

    def _encode_typed(self, text: Rendered) -> list[int]:
        ids: list[int] = []
        for piece in self._control.pieces(text):
            ids += self._encode_piece(piece)
        return ids

    def _encode_piece(self, piece: Piece) -> list[int]:
        if not piece.plain:
            return self._encoder.encode([piece.text])[0]
        ids = self._encoder.encode_plain([piece.text])[0]
        if control_marks(ids, self._control.ids):
            raise BadPrompt("bad_text", "it holds a control token, which this tokenizer does not read as text")
        return ids

    def _check_long(self, text: str, ids: list[int]) -> None:
        typed = len(text.typed) if isinstance(text, Rendered) else 0
        if len(control_marks(ids, self._control.ids)) != len(self._control.found(text)) - typed:
            raise BadPrompt(
                "bad_text", f"at {len(text):,} characters the tokenizer breaks the template's control tokens"
            )
        if self._keeps_text and self.decode(ids) != text:
            raise BadPrompt("bad_text", f"at {len(text):,} characters the tokenizer does not keep it as it is")

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        return str(self._tokenizer.decode(list(ids)))

    def token_bytes(self) -> list[bytes] | None:
        """The bytes of each id; None if the library does not tell them (common/token_bytes.py)."""
        (probe,) = self._encoder.encode_plain([PROBE])
        return token_bytes(self._tokenizer, self._added, self._largest_id() + 1, probe)

    @property
    def at_once(self) -> int:
        """How many batches are best encoded side by side: while the ids of one are taken over, another uses the cores.

        Threads of Python code only wait for each other.
        """
        return 2 if self._tokenizer.is_fast else 1

    @property
    def template_text(self) -> str:
        """The chat template, or all that there are."""
        return self._template_text()

    @property
    def control_ids(self) -> Mapping[str, int]:
        """The control tokens by name."""
        return self._control.ids

    def pieces(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """The text of ids in stretches, and whether each is a control token."""
        control = set(self._control.ids.values())
        groups = itertools.groupby(enumerate(ids), key=lambda one: one[0] if one[1] in control else -1)
        return [(self.decode([one for _, one in group]), number >= 0) for number, group in groups]

    def unread(self, dataset: DatasetSettings) -> list[str]:
        """A sentence for each of the dataset's own chat_template_kwargs that changes no prompt."""
        own = dataset.chat_template_kwargs
        merged = {**self._settings.chat_template_kwargs, **own}
        return unread_kwargs(self._apply, self._template_text(), merged, own, f"dataset {dataset.name}")

    # What is looked at once

    def _make_encoder(self) -> Encoder:
        """The quick way to ids must give what the library's own way gives, or it is not taken."""
        kwargs = self._settings.chat_template_kwargs
        try:
            text = self._apply(_QUESTION, None, kwargs)
            wanted: list[int] = self._tokenizer.apply_chat_template(
                _QUESTION, tokenize=True, add_generation_prompt=True, return_dict=False, **kwargs
            )
        except Exception as error:
            raise TokenizerUnavailable(
                f"the tokenizer in {self._settings.path} makes no prompt of a simple question ({_reason(error)}); "
                "check its chat template and [tokenizer] chat_template_kwargs"
            ) from error
        encoder: Encoder
        if self._tokenizer.is_fast:
            encoder = FastEncoder(self._tokenizer, self._control)
        else:
            encoder = SlowEncoder(self._tokenizer, text, wanted)
        if encoder.encode([text])[0] != list(wanted):
            raise TokenizerUnavailable(
                f"the tokenizer in {self._settings.path} gives different ids for the same text in two ways; "
                "use another version of transformers"
            )
        return encoder

    def _check_control_ids(self) -> None:
        """Every control token of known prompts must come out as its own id, in its place, and no other."""
        for messages, tools in PROBES:
            try:
                text = self._apply(messages, tools, self._settings.chat_template_kwargs)
            except TEMPLATE_ERRORS:  # it may refuse tools, or a system prompt
                continue
            written = self._control.found(text)
            ids = self._probed(text)
            if control_marks(ids, self._control.ids) != [self._control.ids[name] for name in written]:
                raise TokenizerUnavailable(
                    f"the tokenizer in {self._settings.path} gives other ids than its files say to {_listed(written)}; "
                    "use another version of transformers"
                )

    def _probed(self, text: str) -> list[int]:
        """The ids of a text that any tokenizer can encode."""
        try:
            return self.encode([text])[0]
        except BadPrompt as bad:
            raise TokenizerUnavailable(
                f"the tokenizer in {self._settings.path} makes no ids of a simple text ({bad.detail}); "
                "copy its files from the model's folder anew"
            ) from bad

    def _cuts_at_control_tokens(self) -> bool:
        """Whether a text may be encoded in pieces, cut at control tokens; SentencePiece may look across them."""
        others = [one.content for one in self._control.others]
        if others and self._encoder.encode(others) != self._encoder.encode_plain(others):
            return False
        before, behind = "x y", "z q"
        for name in self._control.found(self._apply(_QUESTION, None, self._settings.chat_template_kwargs)):
            token_id = self._control.ids[name]
            whole = self._encoder.encode([f"{before}{name}{behind}{name}{behind}"])[0]
            first, other = self._encoder.encode_plain([before, behind])
            if whole != [*first, token_id, *other, token_id, *other]:
                return False
        return True

    def _turn_end(self) -> str | None:
        """The control token that the template writes behind an answer."""
        try:
            text = self._apply(_ANSWERED, None, self._settings.chat_template_kwargs)
        except TEMPLATE_ERRORS:  # it may want other conversations
            return None
        _, answer, behind = text.partition(_ANSWER)
        found = self._control.found(behind)
        return found[0] if answer and found and behind.lstrip().startswith(found[0]) else None

    def _template_text(self) -> str:
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else "\n".join(map(str, template.values()))

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


def _reason(error: BaseException) -> str:
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


def _listed(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names)) or "a text without control tokens"
