"""Servers for realtime sessions: the pipeline "studio", which has the shape of "voice" without its models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.http_server import Server
from tests.support.realtime import Session, session


@pytest.fixture
def talk(studio: Server) -> Iterator[Session]:
    """A session on the pipeline "studio"."""
    with session(studio) as talk:
        yield talk
