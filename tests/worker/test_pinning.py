"""Which rings a worker page-locks, and what it does where that fails."""

from __future__ import annotations

import pytest

from omni_actors.worker.incoming import Incoming
from omni_actors.worker.outgoing import Outgoing, Output
from omni_actors.worker.pinning import Pinning
from ringbuf import CudaFailed, Ring


class Registrations:
    """Stands for ``ringbuf._cuda.Registration``: no GPU takes part. error: raised by ``close``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: CudaFailed | None = None) -> None:
        self.devices: list[int | None] = []
        self.closed = 0
        outer = self

        class Registration:
            def __init__(self, address: int, size: int, device: int | None) -> None:
                outer.devices.append(device)

            def close(self) -> None:
                outer.closed += 1
                if error is not None:
                    raise error

        monkeypatch.setattr("ringbuf._ring.Registration", Registration)


@pytest.mark.parametrize(
    ("device", "enabled", "expected"),
    [("cuda", True, [None, None]), ("cuda:1", True, [1, 1]), ("cuda:1", False, []), ("cpu", True, [])],
)
def test_both_edges_of_a_worker_on_a_device_are_pinned_until_they_close(
    monkeypatch: pytest.MonkeyPatch, device: str, enabled: bool, expected: list[int | None]
) -> None:
    registrations, warnings = Registrations(monkeypatch), list[str]()
    pinning = Pinning(device, enabled=enabled, warn=warnings.append)
    edges = [Incoming(Ring.create(4096), pinning), Outgoing(Ring.create(4096), pinning)]
    assert registrations.devices == expected
    for edge in edges:
        edge.close()
    assert registrations.closed == len(expected)
    assert not warnings


def test_a_failure_is_one_line_in_the_log_and_the_edges_work() -> None:
    """No CUDA runtime is loaded in this process, or there is no such device."""
    warnings: list[str] = []
    pinning = Pinning("cuda:99", enabled=True, warn=warnings.append)
    edges = [Outgoing(Ring.create(4096), pinning) for _ in range(2)]
    assert len(warnings) == 1
    assert "not page-locked" in warnings[0]
    for edge in edges:
        edge.send(1, Output([memoryview(b"sent")], 4))
        with edge.ring.claim_consumer().recv(timeout=0) as frame:
            assert frame.data == b"sent"
        edge.close()


def test_a_failure_to_unregister_ends_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    Registrations(monkeypatch, CudaFailed("cudaHostUnregister", 4, "driver shutting down"))
    warnings: list[str] = []
    edge = Outgoing(Ring.create(4096), Pinning("cuda", enabled=True, warn=warnings.append))
    edge.close()
    assert edge.ring.closed
    assert "driver shutting down" in warnings[0]
