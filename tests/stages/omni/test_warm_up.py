"""A thinker or a talker computes a prompt and a further position before its first request, and keeps nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from omni_actors.stages.base import WarmsUp
from tests.support.forwards import record_forwards

pytestmark = pytest.mark.voice  # it needs the libraries of the extra; the weights are random


@pytest.mark.parametrize("name", ["qwen3_thinker", "qwen3_talker", "qwen2_5_thinker", "qwen2_5_talker"])
def test_warming_up_runs_the_model_and_leaves_nothing(
    name: str, shared_engines: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = shared_engines(name)
    forwards = record_forwards(engine, monkeypatch)
    assert isinstance(engine, WarmsUp)
    engine.warm_up()
    assert forwards[0] > 1, "a prompt"
    assert forwards[-1] == 1, "a further position"
    assert not engine.busy
    assert not engine._requests
    assert not engine._cache.lengths
