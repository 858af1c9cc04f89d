"""What others log at each second of an outage becomes one line."""

import logging
import subprocess
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


def test_what_our_own_modules_have_to_tell_is_told() -> None:
    lines = (
        "import logging",
        "from common.logs import _log_to_stderr",
        "_log_to_stderr()",
        "logging.getLogger('workers.sglang.steering').info('52 of at most 54 answers in flight')",
        "logging.getLogger('celery.worker').info('a task')",
    )
    told = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=9, check=True
    )
    assert told.stderr.splitlines()[0].endswith("INFO workers.sglang.steering: 52 of at most 54 answers in flight")
    assert len(told.stderr.splitlines()) == 1
