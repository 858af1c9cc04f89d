"""Why a row is rejected before it is sent: a fixed list, which `rejects.jsonl` and `status` speak."""

from typing import Any

import msgspec

# What decoding a foreign text raises. A row that a library has read may hold half a surrogate pair.
NOT_JSON = (msgspec.DecodeError, UnicodeError, RecursionError)
# Every reason for which a row is rejected before it is sent, with what it means.
REASONS = {
    "not_json": "the row is not JSON, or JSON that is neither an object nor a list of messages",
    "line_too_long": "the row has more bytes than max_row_bytes allows",
    "not_csv": "the record is not CSV, or has not the fields that the header names",
    "no_prompt": "the row has no column of a layout that is known, or not the one that the configuration names",
    "bad_messages": "the messages are not a list of turns with a known role and content",
    "no_user_turn": "no user or tool turn to answer is left once the final assistant turns are cut off",
    "not_text": "images, audio or video are in what would be sent (drop_media = true sends the text that remains)",
    "bad_tools": "the tools, or a tool call in an earlier turn, cannot be read, or a schema is beyond repair",
    "bad_input_ids": "input_ids is not a list of whole numbers with at least one in it",
    "id_out_of_range": "an id is outside the model's vocabulary; it would kill the server",
    "bad_text": "the tokenizer or the template would change the text: half a surrogate pair, a NUL, and the like",
    "template_error": "the chat template cannot render the messages",
    "duplicate": "its prompt was fed before, as the sample that the detail names (dedupe)",
    "too_long": "the prompt and max_new_tokens together exceed the model's context",
}
# A detail may quote the row, and a row may be a megabyte long.
_DETAIL_CHARACTERS = 500


class BadRow(Exception):
    """A row that cannot become a prompt; `reason` is a key of REASONS."""

    def __init__(self, reason: str, detail: str = "", row_id: Any = None) -> None:
        self.reason = reason
        self.detail = (detail or REASONS[reason])[:_DETAIL_CHARACTERS]
        super().__init__(f"{reason}: {self.detail}")
        self.row_id = row_id


def quoted(value: Any) -> str:
    """A value of the row as a detail shows it: short, however long the value is."""
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, int | float | None):
        return repr(value)[:80]
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else type(value).__name__
