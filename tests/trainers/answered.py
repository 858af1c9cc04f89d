"""Real texts in the place of the demo's answers, which are random ids: python -m tests.trainers.answered DEMO FOLDER.

The text formats leave random ids out, since no text has them. A prompt is the demo's own; every third answer calls a
tool.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec

from common.chat_template import Tokenizer
from common.run_file import read_run_file, write_run_file
from common.segments import records
from common.settings import load_settings

_ANSWER = "Which of them is it?\nThe second.</think>It is number {n}, as you said.\n\n- one\n- two \U0001f642"
_CALL = 'I look.</think><tool_call>{{"id": "call{n:05d}", "name": "look", "arguments": {{"at":{n}}}}}</tool_call>'


def write(demo: Path, folder: Path) -> None:
    """`folder` gets the configuration, run.json and records of `demo`, answered anew."""
    settings = load_settings(demo / "tokenmill.toml")
    tokenizer = Tokenizer(settings.tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenmill.toml").write_bytes((demo / "tokenmill.toml").read_bytes())
    write_run_file(folder, read_run_file(demo) or {})
    for dataset in settings.datasets:
        lines = []
        for record in records(settings.output, dataset.name):
            text = (_ANSWER if record.index % 3 else _CALL).format(n=record.index) + "<|im_end|>"
            (output_ids,) = tokenizer.encode([text])
            made: dict[str, Any] = msgspec.to_builtins(record) | {
                "output_ids": output_ids,
                "completion_tokens": len(output_ids),
                "finish_reason": "stop",
                "flags": [],
            }
            lines.append(msgspec.json.encode(made) + b"\n")
        place = folder / dataset.name
        place.mkdir(exist_ok=True)
        (place / "w1-0.jsonl").write_bytes(b"".join(lines))


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
