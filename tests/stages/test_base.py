from __future__ import annotations

import doctest

from omni_actors.stages import base


def test_the_example_engine_of_the_protocol_runs() -> None:
    result = doctest.testmod(base)
    assert result.attempted
    assert not result.failed
