"""Servers for realtime sessions: the pipeline "studio", which has the shape of "voice" without its models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.http_server import Server, Start
from tests.support.realtime import Session, session


@pytest.fixture
def talk(studio: Server) -> Iterator[Session]:
    """A session on the pipeline "studio"."""
    with session(studio) as talk:
        yield talk


@pytest.fixture(scope="session")
def far_ahead(start: Start) -> Iterator[Server]:
    """As ``studio``, but an answer of up to 30 s has left, and so has ended, long before it is played."""
    with start(module="tests.support.far_ahead_server") as server:
        yield server
        assert server.stderr == ""


@pytest.fixture
def talk_ahead(far_ahead: Server) -> Iterator[Session]:
    """A session in which an answer that has ended plays on for as long as a slow machine needs."""
    with session(far_ahead) as talk:
        yield talk
