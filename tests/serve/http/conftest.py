"""A listener in this process, for the tests that look at single bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.http_listener import Server, listening


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with listening() as running:
        yield running
