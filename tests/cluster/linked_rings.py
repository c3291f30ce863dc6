"""Two pumps of this process, and rings joined by a link between them."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omni_actors.cluster.channel import Tls
from omni_actors.cluster.pump import Pump
from ringbuf import Consumer, Producer, Ring

SECRET = bytes(range(32))
WATCHDOG_S = 30.0
LONG_S = 300.0
"""A time of silence that does not pass while a test runs."""


class Losses:
    """What a pump reports as lost."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def __call__(self, link_id: int, why: str) -> None:
        self._queue.put((link_id, why))

    def next(self) -> tuple[int, str]:
        return self._queue.get(timeout=WATCHDOG_S)

    def all(self) -> list[tuple[int, str]]:
        return [self._queue.get() for _ in range(self._queue.qsize())]


class LinkedRings:
    """Records go from ``producer``, through two pumps, to ``consumer``."""

    def __init__(self, near: Pump, far: Pump, *, near_bytes: int, far_bytes: int, link_id: int = 7) -> None:
        self.near, self.far, self.link_id = near, far, link_id
        self.make_rings(near_bytes, far_bytes)

    def make_rings(self, near_bytes: int, far_bytes: int) -> None:
        self.near_ring, self.far_ring = Ring.create(near_bytes), Ring.create(far_bytes)
        self.producer: Producer = self.near_ring.claim_producer()
        self.consumer: Consumer = self.far_ring.claim_consumer()

    def receive(self) -> None:
        self.far.receive(self.link_id, self.far_ring.claim_producer())

    def send(self) -> None:
        self.near.send(self.link_id, self.near_ring.claim_consumer(), self.far.address)

    def close(self) -> None:
        self.near.close(self.link_id)
        self.far.close(self.link_id)
        self.near_ring.close()
        self.far_ring.close()


@contextmanager
def open_pump(**options: Any) -> Iterator[tuple[Pump, Losses]]:
    losses = Losses()
    pump = Pump(SECRET, "127.0.0.1", losses, **options)
    try:
        yield pump, losses
    finally:
        pump.stop()


@contextmanager
def linked_rings(
    near_bytes: int = 1 << 16,
    far_bytes: int | None = None,
    *,
    tls: Tls | None = None,
    link_id: int = 7,
    **far_options: Any,
) -> Iterator[LinkedRings]:
    """Yield rings joined by a link, which may not be lost until the block is left. far_options: of the far pump."""
    with open_pump(tls=tls) as (near, near_losses), open_pump(tls=tls, **far_options) as (far, far_losses):
        rings = LinkedRings(near, far, near_bytes=near_bytes, far_bytes=far_bytes or near_bytes, link_id=link_id)
        rings.receive()
        rings.send()
        try:
            yield rings
            lost = [*near_losses.all(), *far_losses.all()]
            assert link_id not in [lost_id for lost_id, _ in lost], lost
        finally:
            rings.close()
