"""Our transports, those of the standard library, and memcpy as the limit.

Each is used as its documentation advises for speed, and holds about as much in flight as our default ring.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue

import trio

from bench.ring.measure import Check, Notes, Sink, fork
from ringbuf import DEFAULT_CAPACITY, Consumer, Frame, Producer, Ring

SPIN_S = 50e-6


def in_flight(size: int) -> int:
    """How many messages may be in flight in a transport that counts messages: a ring's worth, from 2 to 1,000."""
    return min(1000, max(2, DEFAULT_CAPACITY // size))


class Memcpy:
    """One process copies into warm shared memory of a ring's capacity or a message's size. No process reads it."""

    name = "memcpy"

    def takes(self, size: int) -> bool:
        return True

    def capacity(self, size: int) -> int:
        return max(size, DEFAULT_CAPACITY)

    def open(self, size: int) -> None:
        self._size, self._capacity = size, self.capacity(size)
        fd = os.memfd_create("memcpy")
        os.ftruncate(fd, self._capacity)
        self._map = mmap.mmap(fd, self._capacity, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.close(fd)

    def run(self, messages: Iterable[memoryview], sink: Sink, consumer_core: int) -> Notes:
        size, check, place, last = self._size, sink.check, 0, self._capacity - self._size
        with memoryview(self._map) as memory:
            for message in messages:
                memory[place : place + size] = message
                check(memory[place : place + size])
                place = place + size if place + size <= last else 0
        return sink.notes._replace(cpu_ns=0)  # one process: count its CPU time once

    def close(self) -> None:
        self._map.close()


class MemcpyOverTwo(Memcpy):
    """Copies to two places in turn: the limit for a transport that writes one message while another is read."""

    name = "memcpy, over two places"

    def takes(self, size: int) -> bool:
        return self.capacity(size) > super().capacity(size)

    def capacity(self, size: int) -> int:
        return max(2 * size, DEFAULT_CAPACITY)


class OurSend:
    """``send`` copies a message into a ring of the default capacity. ``recv`` sleeps while the ring is empty."""

    name = "ours: send"
    spin_s = 0.0

    def takes(self, size: int) -> bool:
        return True

    def capacity(self, size: int) -> int:
        return DEFAULT_CAPACITY

    def open(self, size: int) -> None:
        self._size = size
        self._ring = Ring.create(self.capacity(size))

    def produce(self, messages: Iterable[memoryview]) -> None:
        producer, spin_s = self._ring.claim_producer(), self.spin_s
        send = producer.send
        for message in messages:
            send(message, spin_s=spin_s)

    def consume(self, check: Check) -> None:
        consumer, spin_s = self._ring.claim_consumer(), self.spin_s
        recv = consumer.recv
        last = False
        while not last:
            with recv(spin_s=spin_s) as frame:
                last = check(frame.data)

    def close(self) -> None:
        self._ring.close()


class OurSendTuned(OurSend):
    """Tuned for throughput: the ring holds two whole messages, and both ends spin for a moment before they sleep."""

    name = "ours: send, tuned"
    spin_s = SPIN_S

    def capacity(self, size: int) -> int:
        return max(DEFAULT_CAPACITY, 2 * size + (4 << 10))


class OurReserveTuned(OurSendTuned):
    """The producer writes into the ring itself: it copies its source into the reservation."""

    name = "ours: reserve in place, tuned"

    def produce(self, messages: Iterable[memoryview]) -> None:
        producer, size, spin_s = self._ring.claim_producer(), self._size, self.spin_s
        reserve, commit = producer.reserve, producer.commit
        for message in messages:
            reserve(size, spin_s=spin_s)[:] = message
            commit()


class OurTrio(OurSend):
    """Both ends run in ``trio.run`` and wait for their doorbells."""

    name = "ours: send, trio"

    def produce(self, messages: Iterable[memoryview]) -> None:
        trio.run(self._send_all, self._ring.claim_producer(), messages)

    async def _send_all(self, producer: Producer, messages: Iterable[memoryview]) -> None:
        for message in messages:
            await send(producer, message)

    def consume(self, check: Check) -> None:
        trio.run(self._receive_all, self._ring.claim_consumer(), check)

    async def _receive_all(self, consumer: Consumer, check: Check) -> None:
        last = False
        while not last:
            with await receive(consumer) as frame:
                last = check(frame.data)


async def receive(consumer: Consumer, spin_s: float = 0.0) -> Frame:
    until = time.monotonic() + spin_s
    while (frame := consumer.try_recv()) is None:
        if time.monotonic() >= until and consumer.park():
            await trio.lowlevel.wait_readable(consumer.fileno())
    return frame


async def send(producer: Producer, message: memoryview) -> None:
    if producer.try_send(message) if len(message) <= producer.max_reserve else False:
        return
    for _ in producer.sending(message):
        await trio.lowlevel.wait_readable(producer.fileno())


class MpQueue:
    """``multiprocessing.Queue``: its thread pickles later, so each message must be a bytes object of its own."""

    name = "multiprocessing.Queue"
    _queue: Queue[bytes]

    def takes(self, size: int) -> bool:
        return True

    def open(self, size: int) -> None:
        self._queue = fork.Queue(in_flight(size))

    def produce(self, messages: Iterable[memoryview]) -> None:
        for message in messages:
            self._queue.put(bytes(message))

    def consume(self, check: Check) -> None:
        while not check(self._queue.get()):
            pass

    def close(self) -> None:
        self._queue.close()


class MpPipe:
    """``multiprocessing.Pipe``: ``send_bytes`` and ``recv_bytes_into`` a reused buffer."""

    name = "multiprocessing.Pipe"
    _ends: tuple[Connection, Connection]

    def takes(self, size: int) -> bool:
        return True

    def open(self, size: int) -> None:
        self._size = size
        self._ends = fork.Pipe(duplex=False)

    def produce(self, messages: Iterable[memoryview]) -> None:
        for message in messages:
            self._ends[1].send_bytes(message)

    def consume(self, check: Check) -> None:
        buffer = bytearray(self._size)
        last = False
        while not last:
            self._ends[0].recv_bytes_into(buffer)
            last = check(buffer)

    def close(self) -> None:
        for end in self._ends:
            end.close()


class UnixSocket:
    """A stream socket: eight bytes of length, then the message, into a reused buffer."""

    name = "Unix socket"

    def takes(self, size: int) -> bool:
        return True

    def open(self, size: int) -> None:
        self._size = size
        self._ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    def produce(self, messages: Iterable[memoryview]) -> None:
        end = self._ends[0]
        length = self._size.to_bytes(8, "little")
        for message in messages:
            sent = end.sendmsg([length, message])
            if sent < 8 + len(message):
                end.sendall(message[sent - 8 :])

    def consume(self, check: Check) -> None:
        end = self._ends[1]
        length, buffer = bytearray(8), memoryview(bytearray(self._size))
        last = False
        while not last:
            end.recv_into(length, 8, socket.MSG_WAITALL)
            message = buffer[: int.from_bytes(length, "little")]
            end.recv_into(message, len(message), socket.MSG_WAITALL)
            last = check(message)

    def close(self) -> None:
        for end in self._ends:
            end.close()
