"""What the flags of an answer take, in ms of CPU for 1,000 ids, on texts and on random ids.

    nice python -m tests.benchmarks.flags [--tokenizer FOLDER] [--answers 200]

Random ids of a large vocabulary are the worst case: the bytes of hardly one of them are in the processor's cache.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from common.answers import parse
from common.chat_template import Tokenizer
from common.flagging import flags_of, prompt_end
from common.loops import copied_share, find_loop
from common.reading import Reading, pack
from common.sections import TokenizerSettings

_REPO = Path(__file__).parents[2]
_ROUNDS = 5
Answers = Sequence[tuple[list[int], bytes]]


def texts(tokenizer: Tokenizer, answers: int) -> Answers:
    """Pieces of this project's own pages: reasoning, and an answer."""
    page = "".join(path.read_text(encoding="utf-8") for path in sorted((_REPO / "docs").glob("*.md")))
    page = page.replace("<think>", "").replace("</think>", "")
    made: list[tuple[list[int], bytes]] = []
    draw = random.Random(1)
    for number in range(answers):
        at, size = draw.randrange(len(page) // 2), draw.randrange(400, 16_000)
        text = f"{page[at : at + size]}</think>{page[at + size : at + 2 * size]}"
        (prompt,) = tokenizer.encode([tokenizer.render([{"role": "user", "content": f"{number} {page[:4000]}"}], None)])
        ids = tokenizer.encode([text])[0] + [*tokenizer.special_ids.end[:1]]
        made.append((ids, msgspec.json.encode(prompt)))
    return made


def random_ids(tokenizer: Tokenizer, answers: int) -> Answers:
    draw = random.Random(2)
    (prompt,) = tokenizer.encode([tokenizer.render([{"role": "user", "content": "Hm?"}], None)])
    control = set(tokenizer.control_ids.values())
    ordinary = [one for one in range(tokenizer.vocab_size) if one not in control]
    return [(draw.choices(ordinary, k=draw.randrange(100, 4000)), msgspec.json.encode(prompt)) for _ in range(answers)]


def ms_per_1000_ids(what: Callable[[list[int], bytes], object], answers: Answers) -> float:
    """The best of some rounds."""
    best = float("inf")
    for _ in range(_ROUNDS):
        since = time.process_time()
        for ids, prompt in answers:
            what(ids, prompt)
        best = min(best, time.process_time() - since)
    return 1e6 * best / sum(len(ids) for ids, _ in answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=_REPO / "examples" / "tokenizer")
    parser.add_argument("--answers", type=int, default=200)
    asked = parser.parse_args()
    tokenizer = Tokenizer(TokenizerSettings(path=asked.tokenizer))
    packed = pack(tokenizer)
    since = time.process_time()
    reading = Reading(packed, tokenizer.vocab_size)
    print(f"a worker reads {len(packed):,} bytes in {1000 * (time.process_time() - since):.0f} ms")
    parts: dict[str, Callable[[list[int], bytes], object]] = {
        "all flags": lambda ids, prompt: flags_of(ids, prompt, reading, truncated=False, asked_to_think=True),
        "  parts": lambda ids, prompt: reading.parts(ids, prompt_end(prompt), truncated=False),
        "  loops": lambda ids, _: find_loop(ids),
        "  copies": copied_share,
        "read whole": lambda ids, prompt: reading.read(ids, prompt_end(prompt)),
        "by the tokenizer": lambda ids, _: parse(ids, tokenizer),
    }
    for name, answers in (("texts", texts(tokenizer, asked.answers)), ("random", random_ids(tokenizer, asked.answers))):
        for part, what in parts.items():
            print(f"{name:8} {part:20} {ms_per_1000_ids(what, answers):.3f} ms for 1,000 ids")


if __name__ == "__main__":
    main()
