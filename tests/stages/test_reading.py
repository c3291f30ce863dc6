"""The thread that reads beside the steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing

import pytest

from omni_actors.errors import InvalidRequest
from omni_actors.stages.base import RequestId
from omni_actors.stages.omni.media_reader import MediaReader


@pytest.fixture
def reader() -> Iterator[MediaReader[str]]:
    with closing(MediaReader[str]()) as reader:
        yield reader


def taken(reader: MediaReader[str]) -> list[tuple[RequestId, Future[str]]]:
    """All that was read, as soon as there is some."""
    while not (found := list(reader.take())):
        reader.wait()
    return found


def test_what_was_read_is_taken_once(reader: MediaReader[str]) -> None:
    assert not reader.pending
    reader.read(7, lambda: threading.current_thread().name)
    assert reader.pending
    [(request, reading)] = taken(reader)
    assert request == 7
    assert reading.result().startswith("reader")
    assert not reader.pending
    assert list(reader.take()) == []


def test_an_error_is_its_own_requests(reader: MediaReader[str]) -> None:
    def unreadable() -> str:
        raise InvalidRequest("no picture")

    reader.read(1, unreadable)
    reader.read(2, lambda: "read")
    found = dict(taken(reader))
    while len(found) < 2:
        found |= dict(taken(reader))
    assert isinstance(found[1].exception(), InvalidRequest)
    assert found[2].result() == "read"


def test_one_that_is_forgotten_while_it_is_read_is_never_given(reader: MediaReader[str]) -> None:
    begun, goes_on, never = threading.Event(), threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert goes_on.wait(60)
        return "nobody's"

    reader.read(1, slow)
    reader.read(2, lambda: str(never.set()))
    assert begun.wait(60)
    reader.forget(1)
    reader.forget(2)
    reader.forget(3)  # never known
    assert not reader.pending
    goes_on.set()
    reader.submit(int).result()
    assert not never.is_set()
    assert list(reader.take()) == []
