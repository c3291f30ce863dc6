"""The reader of a worker's stderr, with a writer that is as fast as the reader."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import trio
import trio.lowlevel

from omni_actors.supervisor.stderr_tail import StderrTail

ENOUGH = 10_000
NAME = "omni_actors.worker.fast"


class FastWriter(logging.Handler):
    """Writes the next line when one has been read, up to ``ENOUGH``."""

    def __init__(self) -> None:
        super().__init__()
        self.read_fd, self.write_fd = os.pipe()
        self.lines = 0
        os.write(self.write_fd, b"line\n")

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += 1
        if self.lines < ENOUGH:
            os.write(self.write_fd, b"line\n")


@pytest.fixture
def writer() -> Iterator[FastWriter]:
    handler, log = FastWriter(), logging.getLogger(NAME)
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)
    os.close(handler.read_fd)
    os.close(handler.write_fd)


async def test_a_worker_that_writes_without_end_leaves_turns_to_other_tasks(writer: FastWriter) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(StderrTail(writer.read_fd, NAME).follow)
        while not writer.lines:
            await trio.lowlevel.checkpoint()
        assert writer.lines < ENOUGH
        nursery.cancel_scope.cancel()


def test_the_last_lines_are_those_that_are_there_although_a_child_writes_on(writer: FastWriter) -> None:
    os.write(writer.write_fd, b"line\n" * 9 + b"end")
    tail = StderrTail(writer.read_fd, NAME)
    tail.drain()
    assert list(tail.lines) == ["line"] * 10 + ["end"]
