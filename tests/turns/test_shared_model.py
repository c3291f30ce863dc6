"""A model is loaded once, also if several threads need it at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from omni_actors.stages import assets
from omni_actors.turns.shared_model import SharedModel

THREADS = 4


@pytest.mark.voice
def test_threads_that_begin_together_get_one_session() -> None:
    model, barrier = SharedModel("silero-vad", "silero_vad_v6.onnx"), threading.Barrier(THREADS)

    def load(_: int) -> object:
        barrier.wait(60)
        return model.session()

    with ThreadPoolExecutor(THREADS) as pool:
        sessions = list(pool.map(load, range(THREADS)))
    assert len({id(session) for session in sessions}) == 1


@pytest.mark.voice
def test_a_model_that_is_not_there_is_looked_for_again() -> None:
    model = SharedModel("nowhere", "nothing.onnx")
    for _ in range(2):
        with pytest.raises(assets.ModelNotFound):
            model.session()
