"""The thread that reads media while the engine's steps go on."""

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
def reader() -> Iterator[MediaReader]:
    with closing(MediaReader()) as reader:
        yield reader


def next_results(reader: MediaReader) -> list[tuple[RequestId, Future[str]]]:
    """Wait until there are results; take them."""
    while not (found := list(reader.take())):
        reader.wait()
    return found


def test_a_result_is_taken_once(reader: MediaReader) -> None:
    assert not reader.pending
    reader.read(7, lambda: threading.current_thread().name)
    assert reader.pending
    [(request, future)] = next_results(reader)
    assert request == 7
    assert future.result().startswith("reader")
    assert not reader.pending
    assert list(reader.take()) == []


def test_an_exception_belongs_to_its_own_request(reader: MediaReader) -> None:
    def unreadable() -> str:
        raise InvalidRequest("no picture")

    reader.read(1, unreadable)
    reader.read(2, lambda: "read")
    found = dict(next_results(reader))
    while len(found) < 2:
        found |= dict(next_results(reader))
    assert isinstance(found[1].exception(), InvalidRequest)
    assert found[2].result() == "read"


def test_the_result_of_a_forgotten_request_is_dropped(reader: MediaReader) -> None:
    begun, may_end, ran_second = threading.Event(), threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert may_end.wait(60)
        return "dropped"

    reader.read(1, slow)
    reader.read(2, lambda: str(ran_second.set()))
    assert begun.wait(60)
    reader.forget(1)
    reader.forget(2)
    reader.forget(3)  # unknown
    assert not reader.pending
    may_end.set()
    reader.submit(int).result()
    assert not ran_second.is_set()
    assert list(reader.take()) == []
