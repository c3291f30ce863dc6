"""Linked rings whose large records NIXL carries, and a node that is a process of its own.

python -m tests.cluster.nixl_rings send HOST PORT SIZE    sends records of SIZE bytes on link 7
python -m tests.cluster.nixl_rings receive                prints its port, then the hash of each record of link 7
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from omni_actors.cluster.pump import Pump
from omni_actors.cluster.transfers import PACKAGE, Transfers
from ringbuf import Ring
from tests.cluster.linked_rings import SECRET, WATCHDOG_S, LinkedRings, Losses, open_pump

ROOT = Path(__file__).parent.parent.parent
RING_BYTES = 1 << 26


def why_no_nixl() -> str | None:
    return None if importlib.util.find_spec(PACKAGE) else "the package nixl-cu12 is not installed"


class NixlRings(LinkedRings):
    """Records go from ``producer`` to ``consumer``. transfers: those of the near pump and the far one, or None."""

    near_losses: Losses
    far_losses: Losses

    def __init__(
        self, pumps: tuple[Pump, Pump], transfers: tuple[Transfers | None, Transfers | None], link_id: int = 7
    ) -> None:
        super().__init__(*pumps, near_bytes=RING_BYTES, far_bytes=RING_BYTES, link_id=link_id)
        self.transfers = transfers

    def renew(self, *, near_bytes: int = RING_BYTES, far_bytes: int = RING_BYTES) -> None:
        """Close the link and its rings, and make new ones."""
        self.close()
        self.make_rings(near_bytes, far_bytes)
        self.receive()
        self.send()

    def negotiate(self) -> None:
        """Wait until large records travel by reference."""
        link = self.near._links[self.link_id]
        wait_until(lambda: getattr(link, "_is_loaded", False))

    def by_reference(self) -> tuple[int, int]:
        """Return how many records each end has moved by reference."""
        each = [pump.statistics()[self.link_id].by_reference for pump in (self.near, self.far)]
        return each[0], each[1]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WATCHDOG_S
    while not condition():
        assert time.monotonic() < deadline, "the watchdog"
        time.sleep(0.001)


@contextmanager
def nixl_rings(*, near: bool = True, far: bool = True, far_bytes: int = RING_BYTES) -> Iterator[NixlRings]:
    """Yield rings joined by a link. near, far: whether that pump has NIXL."""
    with ExitStack() as stack:
        transfers = (Transfers() if near else None, Transfers() if far else None)
        near_pump, near_losses = stack.enter_context(open_pump(transfers=transfers[0]))
        far_pump, far_losses = stack.enter_context(open_pump(transfers=transfers[1]))
        rings = NixlRings((near_pump, far_pump), transfers)
        rings.near_losses, rings.far_losses = near_losses, far_losses
        rings.renew(far_bytes=far_bytes)
        try:
            yield rings
        finally:
            rings.close()


def main(action: str, host: str = "127.0.0.1", port: str = "0", size: str = "0") -> None:
    transfers = Transfers()
    pump = Pump(SECRET, "127.0.0.1", lambda link_id, why: print(f"lost: {why}", flush=True), transfers=transfers)
    with Ring.create(RING_BYTES) as ring:
        if action == "send":
            producer = ring.claim_producer()
            pump.send(7, ring.claim_consumer(), (host, int(port)))
            print(transfers._process.pid, flush=True)
            while True:
                producer.send(bytes(int(size)))
        consumer = ring.claim_consumer()
        pump.receive(7, ring.claim_producer())
        print(pump.address[1], transfers._process.pid, flush=True)
        while True:
            with consumer.recv() as frame:
                digest = hashlib.sha256(frame.data).hexdigest()
            print(digest, pump.statistics()[7].by_reference, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
