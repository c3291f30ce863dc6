"""The thread that reads media while the engine's steps go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing

import pytest

from omni_actors.errors import InvalidRequest
from omni_actors.stages.base import RequestId
from omni_actors.stages.omni.media_thread import MediaThread


@pytest.fixture
def thread() -> Iterator[MediaThread]:
    with closing(MediaThread()) as thread:
        yield thread


def next_results(thread: MediaThread) -> list[tuple[RequestId, Future[str]]]:
    """Wait until there are results; take them."""
    while not (found := list(thread.take())):
        thread.wait()
    return found


def test_a_result_is_taken_once(thread: MediaThread) -> None:
    assert not thread.pending
    thread.begin(7, lambda: threading.current_thread().name)
    assert thread.pending
    [(request, future)] = next_results(thread)
    assert request == 7
    assert future.result().startswith("media")
    assert not thread.pending
    assert list(thread.take()) == []


def test_an_exception_belongs_to_its_own_request(thread: MediaThread) -> None:
    def unreadable() -> str:
        raise InvalidRequest("no picture")

    thread.begin(1, unreadable)
    thread.begin(2, lambda: "read")
    found = dict(next_results(thread))
    while len(found) < 2:
        found |= dict(next_results(thread))
    assert isinstance(found[1].exception(), InvalidRequest)
    assert found[2].result() == "read"


def test_the_result_of_a_forgotten_request_is_dropped(thread: MediaThread) -> None:
    begun, may_end, ran_second = threading.Event(), threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert may_end.wait(60)
        return "dropped"

    thread.begin(1, slow)
    thread.begin(2, lambda: str(ran_second.set()))
    assert begun.wait(60)
    thread.forget(1)
    thread.forget(2)
    thread.forget(3)  # unknown
    assert not thread.pending
    may_end.set()
    thread.submit(int).result()
    assert not ran_second.is_set()
    assert list(thread.take()) == []
