"""Lines of the workers' stderr that an agent cannot send in time: their number is told in their place."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from omni_actors.cluster import agent, control


class Connection:
    """Takes messages, and sends them when the test says so."""

    def __init__(self) -> None:
        self.messages: list[control.LogLine] = []
        self.sent = 0

    @property
    def posted(self) -> int:
        return len(self.messages)

    def post(self, message: control.LogLine) -> None:
        self.messages.append(message)


def test_dropped_lines_are_counted_and_told_once_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "LOG_LINES", 8)
    connection: Any = Connection()
    log = agent._Log(connection)
    first, second = (logging.getLogger(f"omni_actors.worker.{name}") for name in ("first", "second"))
    try:
        for number in range(10):
            first.info("%d", number)
        second.info("0")
        connection.sent = 3
        first.info("10")  # still dropped: a few free places would be filled at once
        log.tell_dropped()
        assert [line.text for line in connection.messages] == list("01234567")
        connection.sent = 4
        first.info("11")
        assert [(line.logger, line.text) for line in connection.messages[8:]] == [
            (first.name, "[lines dropped here, too many at once: 3]"),
            (second.name, "[lines dropped here, too many at once: 1]"),
            (first.name, "11"),
        ]
        for number in range(12, 20):
            second.info("%d", number)
        connection.sent = connection.posted
        log.tell_dropped()
        assert connection.messages[-1].text == "[lines dropped here, too many at once: 7]"
    finally:
        log.close()
