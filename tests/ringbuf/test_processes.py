"""Two real processes, one of which may die at the worst instant."""

from __future__ import annotations

import signal
import subprocess
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from ringbuf import AlreadyClaimed, Frame, PeerDied, Ring, RingClosed

WATCHDOG_S = 60.0

Peer = Callable[[Ring, str], "subprocess.Popen[str]"]

PRODUCE = """
import random, zlib
producer = ring.claim_producer()
rng = random.Random(int(sys.stdin.readline()))
for number in range(3000):
    size = rng.choice((rng.randrange(200), rng.randrange(8000), rng.randrange(60000)))
    payload = rng.randbytes(size)
    check = zlib.crc32(payload).to_bytes(4, "little")
    producer.send(number.to_bytes(4, "little"), check, payload, timeout=60)
producer.close()
"""

WAIT_UNTIL_CONSUMER_SLEEPS = """
def wait_until_consumer_sleeps():
    while not ring._segment.words[CONSUMER.waits]:
        time.sleep(0.001)
"""


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    assert process.wait(WATCHDOG_S) == -signal.SIGKILL


@pytest.mark.parametrize("capacity", [4 << 10, 64 << 10])
def test_soak_of_random_sizes_keeps_every_byte_and_the_order(capacity: int, peer: Peer) -> None:
    with Ring.create(capacity, generation=3) as ring:
        consumer = ring.claim_consumer()
        child = peer(ring, PRODUCE)
        tell(child, str(capacity))
        rng = np.random.default_rng(1)
        held: list[Frame] = []
        for number in range(3000):
            frame = consumer.try_recv()
            if frame is None:
                while held:
                    held.pop(int(rng.integers(len(held)))).release()
                frame = consumer.recv(WATCHDOG_S)
            data = bytes(frame.data)
            assert int.from_bytes(data[:4], "little") == number
            assert int.from_bytes(data[4:8], "little") == zlib.crc32(data[8:])
            held.append(frame)
            if len(held) > 3:
                held.pop(int(rng.integers(len(held)))).release()
        with pytest.raises(RingClosed):
            consumer.recv(WATCHDOG_S)
        for frame in held:
            frame.release()
        assert child.wait(WATCHDOG_S) == 0
        statistics = ring.statistics()
        assert (statistics.used, statistics.messages) == (0, 3000)


def test_ping_pong_loses_no_wake_up(peer: Peer) -> None:
    with Ring.create(4096) as there, Ring.create(4096) as back:
        script = """
back = Ring.attach([int(fd) for fd in sys.stdin.readline().split()], generation=0)
consumer, producer = ring.claim_consumer(), back.claim_producer()
try:
    while True:
        with consumer.recv(60) as frame:
            producer.send(frame.data)
except RingClosed:
    back.close()
    ring.close()
"""
        child = Passing(peer).start(there, back, script)
        producer, consumer = there.claim_producer(), back.claim_consumer()
        for number in range(5000):
            producer.send(number.to_bytes(8, "little"))
            with consumer.recv(WATCHDOG_S) as frame:
                assert int.from_bytes(frame.data, "little") == number
        producer.close()
        assert child.wait(WATCHDOG_S) == 0


class Passing:
    """A second ring reaches the child by inheritance too."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def start(self, first: Ring, second: Ring, script: str) -> subprocess.Popen[str]:
        class Both:
            fds = (*first.fds, *second.fds)
            generation = 0

        raise NotImplementedError
