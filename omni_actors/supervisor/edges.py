"""The rings between live workers, and between them and the parent, which is the client's end.

Rules
1. An edge joins two stages; it has one ring per pair of producer replica and consumer replica.
2. A ring lives exactly as long as both its workers. Each incarnation of either gets a new one, so nothing that a dead
   worker left half-written is read, and nothing that its peer still had for it reaches its successor.
3. The parent keeps every ring mapped, for its statistics. It moves bytes only through the client's ends.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias

import trio

from omni_actors.protocol.messages import CLIENT, CLIENT_ADDRESS, Address, Connect, ControlMessage, WorkerSpec
from omni_actors.supervisor.devices import same_memory
from omni_actors.supervisor.process import EdgeRing, Spawner
from ringbuf import Consumer, Frame, MessageTooLarge, Producer, RingClosed, RingCorrupted, RingError, RingStatistics

Post: TypeAlias = Callable[[ControlMessage, Sequence[int]], None]
Kill: TypeAlias = Callable[[str], None]
"""Kills a worker, for the given reason."""


FRAMES_A_TURN, BYTES_A_TURN = 16, 32 * 1024
"""After so many frames or bytes of one worker's output, the parent's other tasks run. Requests whose outputs arrive
together are answered together, so the next requests of these clients share a packet, a wake-up and a step."""


@dataclass(frozen=True)
class EdgeSpec:
    """An edge between two stages, either of which may be ``CLIENT``. ring_bytes: the capacity of each of its rings."""

    producer: str
    consumer: str
    ring_bytes: int


class InputEdge:
    """The client's end of an edge into a stage. One task at a time sends (``orchestrator.inputs`` has one)."""

    def __init__(self, producer: Producer, kill: Kill) -> None:
        self._producer, self._kill = producer, kill

    def try_send(self, buffers: Sequence[memoryview]) -> int | None:
        """Send one message if there is room now. Return its bytes; None: it is not sent.

        A message that passes in fragments is not sent. Raises as ``send`` does.
        """
        size = sum([buffer.nbytes for buffer in buffers])
        if size > self._producer.max_reserve:
            return None
        try:
            return size if self._producer.try_send(*buffers) else None
        except (RingClosed, RingCorrupted) as error:
            raise self._closed(error) from error

    async def send(self, buffers: Sequence[memoryview]) -> int:
        """Send one message, waiting for room. Return its bytes.

        Cancellation: the message is sent whole or not at all. A worker that has corrupted the ring is killed. Raises
        trio.ClosedResourceError when the worker dies, ValueError (no ring takes a message of this size).
        """
        try:
            with closing(self._producer.sending(*buffers)) as sending:
                for _ in sending:
                    await trio.lowlevel.wait_readable(self._producer.fileno())
        except (RingClosed, RingCorrupted) as error:
            raise self._closed(error) from error
        except MessageTooLarge as error:
            raise ValueError(str(error)) from error
        return sum(buffer.nbytes for buffer in buffers)

    def _closed(self, error: RingError) -> trio.ClosedResourceError:
        """Return the error of a ``send`` to a worker that is dying, and kill one that has corrupted the ring."""
        if isinstance(error, RingCorrupted):
            self._kill(f"RingCorrupted: {error}")
        return trio.ClosedResourceError()

    def close(self) -> None:
        """Close the ring's end; a ``send`` that waits raises trio.ClosedResourceError."""
        trio.lowlevel.notify_closing(self._producer.fileno())
        self._producer.close()


async def receive_frames(consumer: Consumer) -> AsyncGenerator[Frame, None]:
    """Yield frames until the producer closes; the caller releases each. It waits for the doorbell and never polls.

    Other tasks run after ``FRAMES_A_TURN`` frames or ``BYTES_A_TURN`` bytes.
    """
    frames = nbytes = 0
    while True:
        try:
            frame = consumer.try_recv()
        except RingClosed:
            return
        if frame is not None:
            frames, nbytes = frames + 1, nbytes + frame.data.nbytes
            yield frame
            if frames == FRAMES_A_TURN or nbytes >= BYTES_A_TURN:
                await trio.lowlevel.checkpoint()
                frames = nbytes = 0
        elif consumer.park():
            await trio.lowlevel.wait_readable(consumer.fileno())
            frames = nbytes = 0


class Edges:
    """Keeps one ring per pair of live replicas that an edge joins.

    spawner: creates the rings.
    """

    def __init__(self, specs: Sequence[EdgeSpec], spawner: Spawner) -> None:
        self._specs, self._spawner = tuple(specs), spawner
        self._posts: dict[Address, Post] = {}
        self._workers: dict[Address, WorkerSpec] = {}
        self._rings: dict[tuple[Address, Address], EdgeRing] = {}
        self._generation = 0
        self.inputs: dict[Address, InputEdge] = {}
        """The client's edge into each live replica that takes input from it."""

    def connect_worker(self, worker: WorkerSpec, post: Post, kill: Kill) -> Consumer | None:
        """Connect a new worker with every live replica that it shares an edge with.

        worker: what it runs. post: queues a message, with descriptors, for the worker. kill: ends the worker. Returns
        the client's end of its output edge, if it has one. Raises OSError (no memory, no descriptors).
        """
        address = worker.address
        self._posts[address], self._workers[address] = post, worker
        output: Consumer | None = None
        for spec in self._specs:
            for producer, consumer in itertools.product(self._live(spec.producer), self._live(spec.consumer)):
                if address not in (producer, consumer):
                    continue
                self._generation += 1
                ring = self._spawner.create_ring(producer, consumer, spec.ring_bytes, self._generation)
                self._rings[producer, consumer] = ring
                shared = CLIENT_ADDRESS not in (producer, consumer) and same_memory(
                    self._workers[producer], self._workers[consumer]
                )
                for end in (producer, consumer):
                    if end != CLIENT_ADDRESS:
                        self._posts[end](Connect(producer, consumer, self._generation, shared), ring.fds)
                if consumer == CLIENT_ADDRESS:
                    output = ring.claim_consumer()
                elif producer == CLIENT_ADDRESS:
                    self.inputs[address] = InputEdge(ring.claim_producer(), kill)
        return output

    def close_input(self, address: Address) -> None:
        """Close the client's edge into a dying worker, if it has one: no ``send`` waits for room there any longer."""
        if client_end := self.inputs.pop(address, None):
            client_end.close()

    def disconnect_worker(self, address: Address) -> None:
        """Close every ring of a dead worker, its own ends too, so that its peers neither wait nor fill up."""
        self._posts.pop(address, None)
        self._workers.pop(address, None)
        self.close_input(address)
        for pair in [pair for pair in self._rings if address in pair]:
            ring = self._rings.pop(pair)
            ring.close_end("producer" if address == pair[0] else "consumer")
            ring.close()

    def statistics(self) -> dict[tuple[Address, Address], RingStatistics]:
        """Return the counters of every live ring, by producer and consumer."""
        return {pair: ring.statistics() for pair, ring in self._rings.items()}

    def _live(self, stage: str) -> list[Address]:
        if stage == CLIENT:
            return [CLIENT_ADDRESS]
        return [address for address in self._posts if address.stage == stage]
