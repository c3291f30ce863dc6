"""Lines of the workers' stderr that an agent cannot send in time: their number is told in their place."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from omni_actors.cluster import agent, control
from omni_actors.cluster.connection import ROOM

LINE = "." * (ROOM // 20)


class Connection:
    """Takes messages, and sends them when the test says so."""

    def __init__(self) -> None:
        self.messages: list[control.LogLine] = []
        self.waiting_bytes = self._sent = 0

    def post(self, message: control.LogLine) -> None:
        self.messages.append(message)
        self.waiting_bytes += len(control.encode(message))

    def send(self, count: int) -> None:
        sent, self._sent = self._sent, min(self._sent + count, len(self.messages))
        self.waiting_bytes -= sum(len(control.encode(message)) for message in self.messages[sent : self._sent])

    @property
    def texts(self) -> list[str]:
        return [message.text.lstrip(".") for message in self.messages]


@pytest.fixture
def connection() -> Connection:
    return Connection()


@pytest.fixture
def log(connection: Any) -> Iterator[agent._Log]:
    log = agent._Log(connection)
    yield log
    log.close()


FIRST, SECOND = (logging.getLogger(f"omni_actors.worker.{name}") for name in ("first", "second"))


def test_dropped_lines_are_counted_and_told_once_there_is_room(connection: Connection, log: agent._Log) -> None:
    """Ten lines take half of ``ROOM``."""
    for number in range(12):
        FIRST.info("%s%d", LINE, number)
    SECOND.info("0")
    connection.send(3)
    FIRST.info("12")  # still dropped: a few free places would be filled at once
    log.tell_dropped()
    assert connection.texts == [*"0123456789"]
    connection.send(3)
    FIRST.info("13")
    assert [(line.logger, line.text) for line in connection.messages[10:]] == [
        (FIRST.name, "[lines dropped here, too many at once: 3]"),
        (SECOND.name, "[lines dropped here, too many at once: 1]"),
        (FIRST.name, "13"),
    ]


@pytest.mark.parametrize("size", [100, 4096, 12_000])
def test_a_flood_of_lines_leaves_room_for_other_messages(connection: Connection, log: agent._Log, size: int) -> None:
    """So no other worker of the node waits until it is over (``Connection.wait_room``)."""
    for _ in range(20):
        for _ in range(ROOM // size // 10):
            FIRST.info("%s", "." * size)
        assert connection.waiting_bytes < ROOM
        connection.send(20)
