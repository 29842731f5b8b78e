"""The rate of log lines."""

from __future__ import annotations

import logging
import threading

from finetune.commands.serve.connections import LineLimit


def test_lines_beyond_the_rate_are_counted():
    written: list[str] = []
    said = threading.Event()

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(record.getMessage())
            if record.name == "test.report":
                said.set()

    noisy, report, handler = (
        logging.getLogger("test.noisy"),
        logging.getLogger("test.report"),
        Keep(),
    )
    limit = LineLimit(report, lines=3, seconds=0.2)
    for logger in (noisy, report):
        logger.addHandler(handler)
    noisy.addFilter(limit)
    try:
        for number in range(50):
            noisy.warning("line %d", number)
        assert written == ["line 0", "line 1", "line 2"]
        assert said.wait(30)
        assert written[3:] == ["47 more lines about clients' requests were left out in 0.2 seconds"]
        noisy.warning("after")
        assert written[4:] == ["after"]
    finally:
        noisy.removeFilter(limit)
        for logger in (noisy, report):
            logger.removeHandler(handler)
