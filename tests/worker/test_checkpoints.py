"""Checkpoints in an engine loop: their memory, its bounds, and what a successor makes of whatever it contains."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_actors.protocol.messages import Abort, Bounds, Call, CallAnswer, CheckpointMemory, Finished, Started
from omni_actors.worker.control import AttachCheckpoint
from ringbuf import Consumer, FrameBorrowed, Producer, Snapshot, decode_bundle, encode_bundle
from tests.support.checkpointing_engine import CheckpointingEngine, after, first_state, steps_done
from tests.support.engine_loop_harness import AMPLE, LoopHarness, open_harness, receive, send
from tests.support.stage_context import stage_context

PLENTY = 1 << 20
SIZE, STEPS = 1000, 6
MEMORY_BYTES = Snapshot.needed_bytes(8 * SIZE + 1200)

Begin = Callable[..., tuple[LoopHarness, Producer, Consumer]]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "log").touch()
    return tmp_path / "log"


@pytest.fixture
def begin(log: Path) -> Iterator[Begin]:
    """Return a harness that runs the checkpointing engine, and its rings."""
    with ExitStack() as opened:

        def run(bounds: Bounds = AMPLE, **options: Any) -> tuple[LoopHarness, Producer, Consumer]:
            harness = opened.enter_context(open_harness(resumable=True, bounds=bounds))
            context = stage_context({"log": str(log), "steps": STEPS, "size": SIZE, **options})
            harness.run(CheckpointingEngine(context))
            return harness, harness.input(), harness.output()

        yield run


def state(steps: int) -> np.ndarray[Any, Any]:
    value = first_state(SIZE)
    for step in range(1, steps + 1):
        value = after(value, step)
    return value


def memory_with(*buffers: memoryview) -> tuple[Snapshot, int]:
    memory, fd = Snapshot.create(10_000)
    if buffers:
        memory.write(*buffers)
    return memory, fd


def attach(harness: LoopHarness, request: int, fd: int) -> None:
    harness.post(AttachCheckpoint(request, os.dup(fd)))


def finish(harness: LoopHarness, into: Producer, out: Consumer, request: int = 1) -> list[int]:
    """Send the input of a request, and return the steps of its outputs."""
    send(into, request, 0, last=True)
    outputs = [receive(out)]
    while not outputs[-1].last:
        outputs.append(receive(out))
    return [output.data["step"] for output in outputs]


def messages_until_finished(harness: LoopHarness) -> list[Any]:
    found: list[Any] = [harness.next_message()]
    while not isinstance(found[-1], Finished):
        found.append(harness.next_message())
    return found[:-1]


def test_one_descriptor_and_no_other_message(begin: Begin) -> None:
    harness, into, out = begin(Bounds(MEMORY_BYTES, PLENTY))
    harness.start(1, checkpointed=True)
    assert finish(harness, into, out) == [2, 4, 6]
    assert messages_until_finished(harness) == [CheckpointMemory(1)]
    with closing(Snapshot.attach(os.dup(harness.memories[0]))) as memory:
        frame = memory.read()
        assert frame is not None
        with frame:
            checkpoint = decode_bundle(frame.data)
            assert checkpoint.meta == {"step": STEPS - 1}
            assert np.array_equal(checkpoint.tensors["state"].numpy(), state(STEPS - 1))


def test_a_successor_goes_on_in_the_same_memory(begin: Begin, log: Path) -> None:
    harness, into, out = begin()
    memory, fd = memory_with(*encode_bundle({"step": 3}, {"state": state(3)}))
    attach(harness, 1, fd)
    harness.start(1, replayed=True, checkpointed=True, needed_from=(0,))
    assert finish(harness, into, out) == [4, 6]
    assert steps_done(log) == [(1, 4), (1, 5), (1, 6)]
    assert messages_until_finished(harness) == [Started(1)]
    frame = memory.read()
    assert frame is not None
    with frame:
        assert frame.data[:8] == encode_bundle({"step": 3}, {"state": state(3)})[0][:8]
    memory.close()
    with closing(Snapshot.attach(fd)) as written, written.read() as last:  # type: ignore[union-attr]
        assert decode_bundle(last.data).meta == {"step": 5}


def test_a_checkpoint_that_grows_gets_new_memory(begin: Begin) -> None:
    harness, into, out = begin(growing=True)
    harness.start(1, checkpointed=True)
    finish(harness, into, out)
    assert messages_until_finished(harness) == [CheckpointMemory(1)] * (STEPS - 1)
    with closing(Snapshot.attach(os.dup(harness.memories[-1]))) as memory, memory.read() as last:  # type: ignore[union-attr]
        assert decode_bundle(last.data).meta == {"step": STEPS - 1}
    largest = os.fstat(harness.memories[-1]).st_size
    harness, into, out = begin(Bounds(PLENTY, largest), growing=True)
    harness.start(1, checkpointed=True)
    finish(harness, into, out)
    assert messages_until_finished(harness) == [CheckpointMemory(1)] * (STEPS - 1), "it takes the place of the last one"


@pytest.mark.parametrize(
    ("bounds", "setting"),
    [
        (AMPLE, None),
        (Bounds(MEMORY_BYTES // 2, PLENTY), "limits.retain_bytes"),
        (Bounds(PLENTY, MEMORY_BYTES // 2), "limits.worker_retain_bytes"),
    ],
)
def test_a_checkpoint_beyond_a_bound_is_not_kept(
    begin: Begin, bounds: Bounds, setting: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    harness, into, out = begin(bounds)
    for request in (1, 2):
        harness.start(request, checkpointed=setting is not None)
        assert finish(harness, into, out, request) == [2, 4, 6]
        assert messages_until_finished(harness) == []
    errors = capfd.readouterr().err
    assert errors.count("is not kept, or not used") == (setting is not None)
    assert setting is None or f"{MEMORY_BYTES // 2} are left ({setting})" in errors


def test_the_bound_of_the_worker_is_over_its_active_requests(begin: Begin) -> None:
    harness, into, out = begin(Bounds(PLENTY, 2 * MEMORY_BYTES - 1))
    harness.post(Call(1, "freeze", {"frozen": True}))  # so that neither ends before the other has begun
    assert harness.next_message() == CallAnswer(1)
    for request in (1, 2):
        harness.start(request, checkpointed=True)
        send(into, request, 0, last=True)
    harness.wait_asleep()
    harness.post(Call(2, "freeze", {"frozen": False}))
    assert harness.next_message() == CallAnswer(2)
    for _ in range(6):
        receive(out)
    assert messages_until_finished(harness) == [CheckpointMemory(1)]
    messages_until_finished(harness)
    harness.start(3, checkpointed=True)
    finish(harness, into, out, 3)
    assert messages_until_finished(harness) == [CheckpointMemory(3)]


def test_no_memory_is_no_failure(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_memory(capacity: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(Snapshot, "create", no_memory)
    harness, into, out = begin()
    harness.start(1, checkpointed=True)
    assert finish(harness, into, out) == [2, 4, 6]
    assert "Cannot allocate memory" in capfd.readouterr().err


GARBAGE = {
    "nothing": (),
    "noise": (memoryview(np.random.default_rng(0).bytes(9000)),),
    "a header of noise": (memoryview((100).to_bytes(8, "little") + b"\xc1" * 200),),
    "data that is no mapping": tuple(encode_bundle([1, 2], {})),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_memory_without_a_checkpoint_starts_over(
    begin: Begin, log: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    harness, into, out = begin()
    memory, fd = memory_with(*GARBAGE[name])
    attach(harness, 1, fd)
    harness.start(1, replayed=True, checkpointed=True, needed_from=(0,))
    assert finish(harness, into, out) == [2, 4, 6]
    assert len(steps_done(log)) == STEPS
    expected = [Started(1)] if name == "nothing" else [Started(1), CheckpointMemory(1)]
    assert messages_until_finished(harness) == expected
    assert ("a checkpoint of request 1 is not kept, or not used" in capfd.readouterr().err) == (name != "nothing")
    memory.close()
    os.close(fd)


@pytest.mark.parametrize("place", [0, 16, 64, 4096, 4104, 4112, 4200, 20_000])
def test_a_stranger_that_writes_into_the_memory_costs_the_checkpoint_only(
    begin: Begin, log: Path, place: int, capfd: pytest.CaptureFixture[str]
) -> None:
    harness, into, out = begin()
    memory, fd = memory_with(*encode_bundle({"step": 3}, {"state": state(3)}))
    memory.write(*encode_bundle({"step": 4}, {"state": state(4)}))
    memory.data[place : place + 8] = b"\xff" * 8
    memory.close()
    attach(harness, 1, fd)
    harness.start(1, replayed=True, checkpointed=True, needed_from=(0,))
    assert finish(harness, into, out)[-1] == STEPS
    assert len(steps_done(log)) in (STEPS, 2)
    if place == 0:  # it is not recognised as memory of checkpoints
        assert "a checkpoint of request 1 is not kept, or not used" in capfd.readouterr().err
    os.close(fd)


def test_a_view_that_the_engine_keeps_stops_the_worker(begin: Begin) -> None:
    harness, *_ = begin(keeps_view=True)
    memory, fd = memory_with(*encode_bundle({"step": 3}, {"state": state(3)}))
    memory.close()
    attach(harness, 1, fd)
    os.close(fd)
    harness.start(1, replayed=True, checkpointed=True, needed_from=(0,))
    assert isinstance(harness.wait_ended(), FrameBorrowed)
    harness.error = None  # its traceback has the engine, and so the view
    gc.collect()
    harness.loop.close()


def test_an_abort_frees_the_memory(begin: Begin) -> None:
    harness, _, _ = begin()
    memory, fd = memory_with(*encode_bundle({"step": 3}, {"state": state(3)}))
    attach(harness, 1, fd)
    harness.start(1, checkpointed=True)
    harness.wait_asleep()
    mapped = Path("/proc/self/maps").read_text().count("memfd:ringbuf")
    harness.post(Abort(1))
    harness.wait_asleep()
    assert Path("/proc/self/maps").read_text().count("memfd:ringbuf") == mapped - 1
    memory.close()
    os.close(fd)
