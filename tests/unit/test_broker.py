"""What a message says: to the worker, which must not be misled by it, and to a person."""

from typing import Any

import pytest

from common.broker import describe, message_arguments


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([7], "B1 7"),
        ([7, 8], "B1 7-8"),
        (range(1200, 1216), "B1 1200-1215"),
        ([7, 9, 12], "B1 7, 9, 12"),
        ([3, 4, 5, 9], "B1 3, 4, 5, 9"),
        # As the ledger lists samples that were given back: by the text of their numbers.
        ([1, 10, 3], "B1 1, 10, 3"),
        ([3, 2, 1], "B1 3, 2, 1"),
    ],
)
def test_a_message_as_a_person_reads_it(indices: Any, text: str) -> None:
    assert describe("B1", indices) == text


def test_the_arguments_of_a_message() -> None:
    assert message_arguments([["B1", [0, 7, 89_478_484]], {}, {"callbacks": None}]) == ("B1", [0, 7, 89_478_484])
    assert message_arguments([["B1", []]]) == ("B1", [])


NOT_OURS: list[Any] = [
    None,
    {},
    "generate",
    [],
    [[]],
    [["B1"]],
    [["B1", 7]],
    [["B1", "7"]],
    [["B1", ["7"]]],
    [["B1", [7.0]]],
    [["B1", [True]]],
    [["B1", [None]]],
    # Redis refuses such an offset each time that it is tried: it would hold up all that come behind.
    [["B1", [-1]]],
    [["B1", [1, 2**32]]],
    [["B1", [2**70]]],
    [[7, [1]]],
    [["B1", [1], "more"]],
]


@pytest.mark.parametrize("body", NOT_OURS, ids=repr)
def test_anything_else_is_not_a_generate_message(body: Any) -> None:
    with pytest.raises(ValueError, match="not a generate message"):
        message_arguments(body)
