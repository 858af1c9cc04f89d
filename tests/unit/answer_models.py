"""Small models for the tests that read answers: a vocabulary of single bytes with a family's marks and a template."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from common.chat_template import Tokenizer as ChatTokenizer
from common.sections import TokenizerSettings

END = "<|im_end|>"
# A few tokens of several bytes, so that the marks of plain text begin and end within one.
_MERGES = [("<", "t"), ("<t", "h"), (">", "Ċ"), (".", "<"), ("Ċ", "Ċ"), ("l", "l")]


def make(folder: Path, template: str, marks: Sequence[str], control: Sequence[str] = ()) -> ChatTokenizer:
    """A model whose `marks` and `control` tokens have ids, and whose `template` is for ChatML's END."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in _MERGES)]
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, _MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(one, special=True, normalized=False) for one in ("<|im_start|>", END, *control)]
    )
    made.add_tokens([AddedToken(one, special=False, normalized=False) for one in marks])
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return ChatTokenizer(TokenizerSettings(path=folder))


def template(answer: str, prompt: str = "") -> str:
    """A ChatML template; `answer` renders the assistant's `message`, `prompt` stands at the end of the prompt."""
    header = "{{ '<|im_start|>assistant\\n' }}"
    return (
        "{%- for message in messages -%}"
        "{%- if message.role == 'assistant' -%}" + header + answer + END + "{{ '\\n' }}"
        "{%- else -%}{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '" + END + "\\n' }}{%- endif -%}"
        "{%- endfor -%}{%- if add_generation_prompt -%}" + header + prompt + "{%- endif -%}"
    )


def ids_of(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """The ids of an answer whose marks are marks."""
    return tokenizer.encode([text])[0]


def typed(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """The ids of a text whose marks are text, as a model spells them out."""
    return [one for letter in text for one in tokenizer.encode([letter])[0]]
