"""Sequences of chunks: each is accepted once, and a deterministic source must send the same content again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omni_actors.protocol import chunks
from omni_actors.protocol.chunks import ChunkHeader, ChunkSequence, ReplayDiverged
from omni_actors.protocol.messages import Decided

TENSOR = np.arange(20_000, dtype=np.int32)


def accept(
    sequence: ChunkSequence, seq: int, tensor: np.ndarray[Any, Any] = TENSOR, *, last: bool = False, **header: Any
) -> bool:
    sent = ChunkHeader(1, "stage", seq, last=last, data={"text": "a"}, **header)
    buffers = chunks.encode(sent, {"codes": tensor})
    return sequence.accept(*chunks.decode(memoryview(b"".join(buffers))))


def test_what_a_chunk_passes_on_from_upstream_may_differ_in_a_replay() -> None:
    """How much a deterministic stage had received before its output depends on time."""
    sequence = ChunkSequence(1, "stage")
    assert accept(sequence, 0, upstream=(Decided("above", 0, ((1,), (2,))),))
    assert not accept(sequence, 0, upstream=(Decided("above", 0, ((1,),)),))
    assert not accept(sequence, 0)


@pytest.mark.parametrize(
    "changed",
    [slice(0, 1), slice(5_000, 15_000), slice(7_000, 7_170), slice(7_085, 7_255), slice(-1, None)],
    ids=("first", "most", "few", "others", "last"),
)
def test_a_chunk_of_a_deterministic_stage_that_differs_is_refused(changed: slice) -> None:
    sequence, other = ChunkSequence(1, "stage"), TENSOR.copy()
    assert accept(sequence, 0)
    other[changed] += 1
    with pytest.raises(ReplayDiverged):
        accept(sequence, 0, other)


@pytest.mark.parametrize("shape", [(256, 1024, 1), (1024, 1024, 3), (512, 512, 3), (1280, 720, 3), (256, 588, 1)])
def test_the_columns_of_a_large_tensor_are_compared(shape: tuple[int, int, int]) -> None:
    picture = np.zeros(shape, np.uint8 if shape[2] == 3 else np.float32)
    sequence, other = ChunkSequence(1, "stage"), picture.copy()
    assert accept(sequence, 0, picture)
    other[8:-8, 8:] += 1
    with pytest.raises(ReplayDiverged):
        accept(sequence, 0, other)


def test_a_chunk_of_a_resumable_stage_is_not_compared() -> None:
    sequence = ChunkSequence(1, "stage")
    assert accept(sequence, 0, decisions=(1,))
    assert not accept(sequence, 0, TENSOR + 1, decisions=(1,))
    assert sequence.received == 1


def test_what_comes_after_the_last_chunk_is_dropped() -> None:
    sequence = ChunkSequence(1, "stage")
    assert accept(sequence, 0)
    assert not sequence.complete
    assert accept(sequence, 1, last=True)
    assert sequence.complete
    assert not accept(sequence, 2)
    assert not accept(sequence, 0, TENSOR + 1), "it is not compared any more"
    assert sequence.received == 2
