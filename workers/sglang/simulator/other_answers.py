"""What a model says that is not well, or is another one: whole answers, which only who looks at many of them doubts.

The names are those of faults.OF_THE_MODEL.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

from workers.sglang.simulator.answers import Answer, Stream
from workers.sglang.simulator.config import SimulatorConfig
from workers.sglang.simulator.faults import Fault
from workers.sglang.simulator.faulty import Altered
from workers.sglang.simulator.requests import GenerateRequest

_LOOP_TOKENS = 20


def other_answer(name: str, fault: Fault, answer: Answer, asked: GenerateRequest, config: SimulatorConfig) -> Answer:
    """The answer that is given in place of `answer`."""
    think_end, ordinary = config.think_end_token_id, config.ordinary_last_id
    match name:
        case "no_think_end":
            return _altered(answer, lambda ids: [ordinary if one == think_end else one for one in ids])
        case "no_thinking":
            return _altered(answer, functools.partial(_think_at_once, think_end, ordinary))
        case "loop":
            reason = {"type": "length", "length": asked.max_new_tokens}
            looped = replace(answer, completion_tokens=asked.max_new_tokens, finish_reason=reason)
            return _altered(looped, functools.partial(_loop, answer.completion_tokens // 2))
        case "other_model":
            return _scaled(answer, fault.factor, asked.max_new_tokens, config)
    return answer


def _altered(answer: Answer, alter: Callable[[list[int]], list[int]]) -> Answer:
    return replace(answer, stream=Altered(answer.stream, alter))


def _think_at_once(think_end: int | None, ordinary: int, ids: list[int]) -> list[int]:
    if think_end is None or len(ids) < 2:
        return ids
    return [think_end, *(ordinary if one == think_end else one for one in ids[1:])]


def _loop(start: int, ids: list[int]) -> list[int]:
    stretch = ids[max(0, start - _LOOP_TOKENS) : start] or ids[:1]
    return (ids[:start] + stretch * (len(ids) // len(stretch) + 1))[: len(ids)]


def _scaled(answer: Answer, factor: float, max_new_tokens: int, config: SimulatorConfig) -> Answer:
    """Longer or shorter by `factor`, and with other ids."""
    stream = answer.stream
    if not isinstance(stream, Stream):
        return answer
    scaled = ((round(factor * (place + 1)) - 1, token) for place, token in stream.special)
    # Each behind the one before it, also where a short answer is made shorter.
    special = tuple((max(number, place + number), token) for number, (place, token) in enumerate(scaled))
    tokens = special[-1][0] + 1
    other = replace(answer, stream=Stream(stream.table, stream.start + 1000, special))
    if tokens >= max_new_tokens:
        reason = {"type": "length", "length": max_new_tokens}
        return replace(other, completion_tokens=max_new_tokens, finish_reason=reason)
    return replace(other, completion_tokens=tokens, finish_reason={"type": "stop", "matched": config.end_token_id})
