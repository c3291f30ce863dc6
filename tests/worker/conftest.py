"""An engine loop in a thread of this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engine_loop_harness import LoopHarness, open_harness


@pytest.fixture
def harness() -> Iterator[LoopHarness]:
    with open_harness() as harness:
        yield harness
