"""The scripts of the soak's two children. The test kills either at any time and starts a successor."""

from __future__ import annotations

import random
import struct
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from ringbuf import Frame, PeerDied, Ring, RingClosed
from tests.ringbuf.child_processes import WATCHDOG_S, Report

T = TypeVar("T")

CAPACITY = 16 << 10
FRAGMENTED = CAPACITY // 2 - 64
"""Payload bytes above which a message travels in fragments."""
FRONT = "<QII"
"""The start of a message: its number, the life of the producer that sent it, and the checksum of the rest."""
_NOISE = np.random.default_rng(0).bytes(3 * CAPACITY)


def payload_of(number: int) -> memoryview:
    """0 bytes to three times the ring; often small, so that the ring holds many."""
    rng = random.Random(number)
    size = rng.choice(
        (rng.randrange(64), rng.randrange(2000), rng.randrange(FRAGMENTED + 1), rng.randrange(3 * CAPACITY))
    )
    begin = rng.randrange(3 * CAPACITY - size + 1)
    return memoryview(_NOISE)[begin : begin + size]


def is_fragmented(number: int) -> bool:
    return struct.calcsize(FRONT) + len(payload_of(number)) > FRAGMENTED


def retried(ring: Ring, call: Callable[[], T]) -> T:
    """Until the peer lives through it."""
    while True:
        try:
            return call()
        except PeerDied as error:
            while error.pid in ring.peer_pids:
                time.sleep(0.0005)  # the test sees to its successor


def produce(ring: Ring, report: Report, life: int, first: int, last: int) -> None:
    """Sends messages ``first`` to ``last``, each in a way that its number decides, and closes."""
    producer = ring.claim_producer()
    for number in range(first, last + 1):
        payload = payload_of(number)
        front = struct.pack(FRONT, number, life, zlib.crc32(payload))
        rng = random.Random(-number)
        if rng.random() < 0.1:
            unsent = producer.sending(struct.pack(FRONT, 0, 0, 0), bytes(2 * CAPACITY))
            next(unsent, None)
            unsent.close()  # given up at the first wait, unless the consumer was so fast that there was none
        if not is_fragmented(number) and rng.random() < 0.5:
            view = retried(ring, partial(producer.reserve, len(front) + len(payload), WATCHDOG_S))
            view[: len(front)], view[len(front) :] = front, payload
            producer.commit()
        else:
            retried(ring, partial(producer.send, front, payload, timeout=WATCHDOG_S))
        report(f"sent {number}")
    producer.close()


def consume(ring: Ring, report: Report, seed: int) -> None:
    """Until the producer closes: holds up to six, releases them in any order."""
    consumer = ring.claim_consumer()
    rng = random.Random(seed)
    held: list[tuple[str, Frame]] = []

    def release() -> None:
        which, frame = held.pop(rng.randrange(len(held)))
        frame.release()
        report(f"released {which}")

    try:
        while True:
            if (frame := consumer.try_recv()) is None:
                while held:
                    release()
                frame = retried(ring, partial(consumer.recv, WATCHDOG_S))
            number, life, checksum = struct.unpack_from(FRONT, frame.data)
            if not number:
                frame.release()
                continue
            with frame.data[struct.calcsize(FRONT) :] as payload:
                assert checksum == zlib.crc32(payload)
                assert payload == payload_of(number)
            report(f"got {number} {life}")
            held.append((f"{number} {life}", frame))
            while len(held) > rng.randrange(7):
                release()
    except RingClosed:
        while held:
            release()
    consumer.close()


def live(ring: Ring, report: Report, end: str, *arguments: int) -> None:
    try:
        (produce if end == "producer" else consume)(ring, report, *arguments)
    except RingClosed as error:
        if error.end != end:
            raise
        # The one before it was killed between its close and its end.
