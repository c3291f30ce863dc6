"""Rings that a GPU reads and writes by DMA. Tests with the marker gpu need one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ringbuf import CudaFailed, Ring
from tests.ringbuf.descriptors import descriptors

torch = pytest.importorskip("torch", reason="torch is not installed")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch brings a CUDA runtime")
def test_without_cuda_registering_is_a_clear_error_and_the_ring_works_on(ring: Ring) -> None:
    with pytest.raises(CudaFailed, match="no CUDA runtime is loaded") as caught:
        ring.register_cuda()
    assert caught.value.code is None
    producer, consumer = ring.claim_producer(), ring.claim_consumer()
    producer.send(b"payload")
    with consumer.recv() as frame:
        assert bytes(frame.data) == b"payload"


def test_a_failure_to_unregister_is_raised_after_all_else_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        def __init__(self, address: int, size: int, device: int | None) -> None:
            pass

        def close(self) -> None:
            raise CudaFailed("cudaHostUnregister", 4, "driver shutting down")

    monkeypatch.setattr("ringbuf._ring.Registration", Stuck)
    before = descriptors()
    ring = Ring.create()
    ring.register_cuda()
    with pytest.raises(CudaFailed, match="shutting down"):
        ring.close()
    assert descriptors() == before
    ring.close()


class Runtime:
    """Stands for CUDA's runtime: notes each call with its thread. failing: the function that fails."""

    def __init__(self, failing: str | None = None) -> None:
        self.calls: list[tuple[str, bool]] = []
        self._failing = failing

    def __getattr__(self, name: str) -> Callable[..., int | bytes]:
        def function(*arguments: object) -> int | bytes:
            self.calls.append((name, threading.current_thread() is threading.main_thread()))
            return b"no such device" if name == "cudaGetErrorString" else 101 * (name == self._failing)

        return function


@pytest.mark.parametrize("device", [None, 1])
def test_a_device_is_current_only_in_the_thread_that_registers_and_unregisters(
    monkeypatch: pytest.MonkeyPatch, device: int | None
) -> None:
    runtime = Runtime()
    monkeypatch.setattr("ringbuf._cuda._loaded_runtime", lambda: runtime)
    with Ring.create() as ring:
        ring.register_cuda(device)
    names = ["cudaHostRegister", "cudaHostUnregister"]
    expected = [(name, True) for name in names]
    if device is not None:
        expected = [(called, False) for name in names for called in ("cudaSetDevice", name)]
    assert runtime.calls == expected


def test_a_device_that_is_not_there_is_an_error_and_nothing_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime("cudaSetDevice")
    monkeypatch.setattr("ringbuf._cuda._loaded_runtime", lambda: runtime)
    with Ring.create() as ring, pytest.raises(CudaFailed, match="no such device") as caught:
        ring.register_cuda(7)
    assert caught.value.code == 101
    assert "cudaHostUnregister" not in dict(runtime.calls)


@pytest.mark.gpu
@on_gpu
def test_what_a_device_writes_arrives_and_what_arrives_goes_to_a_device() -> None:
    values = torch.arange(1 << 18, dtype=torch.float32, device="cuda")
    with Ring.create() as ring:
        ring.register_cuda()
        ring.register_cuda()
        producer, consumer = ring.claim_producer(), ring.claim_consumer()
        space = producer.try_reserve(values.nbytes)
        assert space is not None
        into = torch.frombuffer(space[:], dtype=torch.float32)
        assert into.is_pinned()
        into.copy_(values, non_blocking=True)
        torch.cuda.synchronize()
        del into
        producer.commit()
        with consumer.recv() as frame:
            arrived = torch.frombuffer(frame.data[:], dtype=torch.float32)
            assert arrived.is_pinned()
            back = torch.empty_like(values).copy_(arrived, non_blocking=True)
            torch.cuda.synchronize()
            assert torch.equal(back, values)
            del arrived


@pytest.mark.gpu
@on_gpu
def test_a_copy_does_not_wait_for_the_device() -> None:
    with Ring.create() as ring:
        ring.register_cuda()
        producer = ring.claim_producer()
        space = producer.try_reserve(1 << 20)
        assert space is not None
        into = torch.frombuffer(space[:], dtype=torch.uint8)
        values = torch.ones(1 << 20, dtype=torch.uint8, device="cuda")
        done = torch.cuda.Event()
        torch.cuda._sleep(1 << 30)  # keeps the stream busy: what waits for it would find the event done
        into.copy_(values, non_blocking=True)
        done.record()
        assert not done.query()
        torch.cuda.synchronize()
        assert bool((into == 1).all())
        del into
        producer.abandon()
