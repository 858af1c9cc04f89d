"""What others log at each second of an outage becomes one line."""

import logging
import sys

from common.logs import one_line


def test_a_record_is_cut_down_to_its_first_line() -> None:
    try:
        int("x")
    except ValueError:
        caught = sys.exc_info()
    record = logging.LogRecord("celery.beat", logging.ERROR, __file__, 1, "Message Error: %s\n%s", ("why", []), caught)
    assert one_line(record)
    assert logging.Formatter("%(message)s").format(record) == "Message Error: why"


def test_an_empty_record_stays_empty() -> None:
    record = logging.LogRecord("celery.beat", logging.ERROR, __file__, 1, "", (), None)
    assert one_line(record)
    assert record.getMessage() == ""
