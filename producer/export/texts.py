"""The text formats: conversations as trainers and servers of OpenAI's kind take them, one JSON object a row."""

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from producer.export.conversations import Conversation, Conversations
from producer.export.rows import Row
from producer.export.writers import columns

_BUFFER_BYTES = 1024 * 1024
_encode = msgspec.json.Encoder().encode
Made = list[dict[str, Any]] | str
Shape = Callable[[Row, Conversation], Made]


def request_of(run: Mapping[str, Any], dataset: str) -> dict[str, Any]:
    """What run.json says of the model, and of the sampling of a dataset, in the words of a chat completion.

    What OpenAI's API does not know (top_k, chat_template_kwargs) is left out, since it refuses such a request.
    """
    names = {"max_new_tokens": "max_completion_tokens"}
    known = {"temperature", "top_p", "presence_penalty", "frequency_penalty", "stop", "logit_bias", "max_new_tokens"}
    facts = run.get("datasets", {}).get(dataset, run)
    sampling = facts.get("sampling_params") or {}
    own = {names.get(key, key): value for key, value in sampling.items() if key in known and value is not None}
    return {"model": run.get("model_path") or "model", **own}


class Texts:
    """Reads rows as conversations, and writes what a format has of them.

    `Check` of export.py and the writers below ask the same object, so that a row is read once.
    """

    def __init__(self, conversations: Conversations, layout: str, requests: Mapping[str, Mapping[str, Any]]) -> None:
        """`requests` are the model and the sampling parameters of each dataset, for requests of OpenAI's kind."""
        self._conversations = conversations
        self._layout = layout
        self._requests = requests

    def check(self, row: Row) -> tuple[str, str]:
        """Why the format cannot have a row, and what is counted of one that it has; each is "" where there is none."""
        made = self.objects(row)
        if isinstance(made, str):
            return made, ""
        found = self._conversations.of(row)
        assert isinstance(found, Conversation)
        return "", "" if found.survival == "whole" else found.survival

    def objects(self, row: Row) -> Made:
        """The row in this format, one object for each of its files, or the reason why it is left out."""
        found = self._conversations.of(row)
        if isinstance(found, str):
            return found
        if self._layout == "messages":
            return _messages(row, found)
        return _sharegpt(row, found) if self._layout == "sharegpt" else self._batch(row, found)

    def _batch(self, row: Row, found: Conversation) -> Made:
        """A line of a batch's input and the line of its output, joined by `custom_id`."""
        tools = {"tools": found.tools} if found.tools else {}
        asked = self._requests[row.dataset]
        body = {**asked, "messages": [_openai(one) for one in found.messages], **tools}
        request = {"custom_id": row.id, "method": "POST", "url": "/v1/chat/completions", "body": body}
        ended = "tool_calls" if found.answer.get("tool_calls") else row.finish_reason
        usage = {
            "prompt_tokens": row.prompt_tokens,
            "completion_tokens": row.completion_tokens,
            "total_tokens": row.prompt_tokens + row.completion_tokens,
        }
        completion = {
            "id": row.id,
            "object": "chat.completion",
            "created": 0,
            "model": asked["model"],
            "choices": [{"index": 0, "message": _openai(found.answer), "logprobs": None, "finish_reason": ended}],
            "usage": usage,
        }
        response = {"status_code": 200, "request_id": row.id, "body": completion}
        return [request, {"id": row.id, "custom_id": row.id, "response": response, "error": None}]

    def writer(self, folder: Path, split: str) -> "Files":
        """The files of a split: `<folder>/<format>/train.jsonl`, and with a folder of its own each other split."""
        place = folder / (self._layout if split == "train" else f"{self._layout}-{split}")
        place.mkdir()
        if self._layout == "sharegpt":
            return Files([_Array(place / f"{split}.json")], self)
        if self._layout == "messages":
            return Files([_Lines(place / f"{split}.jsonl")], self)
        return Files([_Lines(place / f"{split}.{part}.jsonl") for part in ("input", "output")], self)


def _messages(row: Row, found: Conversation) -> Made:
    """For Model-Optimizer. Tools are one text: a trainer's columns have one type, and schemas are of any shape."""
    flat = columns(row)
    return [
        {
            "conversation_id": flat.pop("id"),
            "messages": [*found.messages, found.answer],
            "tools": json.dumps(found.tools or [], ensure_ascii=False),
            **flat,
            "survival": found.survival,
        }
    ]


def _sharegpt(row: Row, found: Conversation) -> Made:
    """For EAGLE, whose script takes a person and the model in turns, and loses a part of all answers but the last."""
    if found.tools or found.answer.get("tool_calls"):
        return "has_tools"
    if [message["role"] for message in found.messages] != ["user"]:
        return "not_a_single_turn"
    asked = found.messages[0]["content"]
    if not (asked.strip() and found.said.strip()):
        return "empty_text"
    turns = [{"from": "human", "value": asked}, {"from": "gpt", "value": found.said}]
    return [{"id": row.id, "conversations": turns}]


def _openai(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as OpenAI has it: the arguments of a call are a text."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_with_text(call) for call in calls]} if calls else dict(message)


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


class _Lines:
    """A file of JSON lines."""

    begin, between, end = b"", b"\n", b"\n"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        self._file: BinaryIO = path.open("wb", buffering=_BUFFER_BYTES)

    def add(self, value: Mapping[str, Any]) -> None:
        self._file.write((self.between if self.rows else self.begin) + _encode(value))
        self.rows += 1

    def close(self) -> None:
        if self.rows or self.begin:
            self._file.write((b"" if self.rows else self.begin) + self.end)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # what is left in the buffer may find the disk full
            self._file.close()


class _Array(_Lines):
    """A file that is one JSON array."""

    begin, between, end = b"[\n", b",\n", b"\n]\n"


class Files:
    """The writer of a text format: the objects of a row go to one file each."""

    def __init__(self, files: Sequence[_Lines], texts: Texts) -> None:
        self._files, self._texts = files, texts

    def add(self, row: Row) -> str:
        """Write a row, or answer why the format cannot have it."""
        made = self._texts.objects(row)
        if isinstance(made, str):
            return made
        for file, value in zip(self._files, made, strict=True):
            file.add(value)
        return ""

    def close(self) -> list[tuple[Path, int]]:
        """Force the files to disk."""
        for file in self._files:
            file.close()
        return [(file.path, file.rows) for file in self._files]

    def abandon(self) -> None:
        """Let go of the files."""
        for file in self._files:
            file.abandon()
