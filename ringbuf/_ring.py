"""The ring itself: created, attached, claimed and closed. It has no ``send``: a process claims an end first.

Rule 1: descriptors from another process are checked before they are mapped (see _descriptors), and the header before
it is used.
Rule 2: a failure in ``create`` or ``attach`` leaves no descriptor and no mapping.
Rule 3: a named ring loses its name when both ends have been claimed, and when its creator closes it (see _names).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ringbuf._claim import Waiter, claim, pid_of
from ringbuf._consumer import Consumer
from ringbuf._cuda import Registration
from ringbuf._descriptors import check_bell, check_memory, create_bell, create_memory, create_pipe_bell
from ringbuf._errors import EndName, RingError, RingMisuse, RingNotFound
from ringbuf._names import RingName, check_label, exists, find, open_descriptors, publish, remove, sweep
from ringbuf._producer import Producer
from ringbuf._words import CONSUMER, HEADER, PAGE, PRODUCER, Bell, Column, ConsumerEnd, ProducerEnd, Segment

DEFAULT_CAPACITY = 4 << 20


class RingStatistics(NamedTuple):
    """How full a ring is, and what has passed through it.

    capacity, used: bytes now; ``used`` includes headers and padding. messages, payload_bytes: since the creation. A
    message in fragments is counted when its last fragment is sent, its bytes as they are. The counts include what a
    producer that died was about to publish: at most one record for each death.
    """

    capacity: int
    used: int
    messages: int
    payload_bytes: int


class Ring:
    """A shared-memory segment and two doorbells, non-blocking and close-on-exec."""

    fds: tuple[int, int, int]
    """Memory, data doorbell, space doorbell: what ``attach`` takes in another process."""
    capacity: int
    """Bytes of the data area."""
    generation: int

    def __init__(self, fds: tuple[int, int, int], segment: Segment, generation: int) -> None:
        """Use ``create`` or ``attach``."""
        self.fds, self.capacity, self.generation = fds, segment.capacity, generation
        self._segment = segment
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._registration: Registration | None = None
        self._name: RingName | None = None
        self._is_creator = False
        self._claimed_by = 0
        """The pid of the process that claimed an end here. A forked child is another one."""
        self._closed = False

    @classmethod
    def create(cls, capacity: int = DEFAULT_CAPACITY, *, generation: int = 0, checksums: bool = False) -> Ring:
        """Make a ring of ``capacity`` data bytes, rounded up to a page.

        checksums: each message carries the CRC-32 of its bytes, and one that does not match is RingCorrupted: this
        detects a program that writes where it should not. Both ends then read all bytes once more.
        Raises OSError (no memory, no descriptors), ValueError (capacity <= 0).
        """
        return cls._create(capacity, generation, checksums, create_bell)

    @classmethod
    def _create(cls, capacity: int, generation: int, checksums: bool, bell: Callable[[], int]) -> Ring:
        if capacity <= 0:
            raise ValueError(f"capacity must be positive, not {capacity}")
        fds = [create_memory(HEADER + -(-capacity // PAGE) * PAGE)]
        try:
            fds.append(bell())
            fds.append(bell())
            segment = Segment(fds[0])
            segment.initialise(generation, checksums)
        except BaseException:
            _close_all(fds)
            raise
        return cls((fds[0], fds[1], fds[2]), segment, generation)

    @classmethod
    def create_named(
        cls, label: str | None = None, capacity: int = DEFAULT_CAPACITY, *, checksums: bool = False
    ) -> Ring:
        """Make a ring that another process of this user, and of this pid namespace, opens by its name.

        label: 1 to 64 letters, digits, "-" and "_", by which ``open`` finds the ring; None: a random one. capacity and
        checksums: as in ``create``. The ring has its name until both ends have been claimed or this process closes it.
        If this process dies, the next ``create_named``, ``open`` or ``sweep_named`` of any process removes the name.
        Raises RingNameTaken (a living process's ring has the label), ValueError, OSError.
        """
        label = secrets.token_hex(8) if label is None else label
        check_label(label)
        sweep()
        ring = cls._create(capacity, secrets.randbits(63), checksums, create_pipe_bell)
        try:
            ring._name, ring._is_creator = publish(label, ring.fds, ring.generation), True
        except BaseException:
            ring.close()
            raise
        return ring

    @classmethod
    def open(cls, name: str) -> Ring:
        """Map the ring of this name, which another process made by ``create_named``. Claim an end of it then.

        name: the ring's label, or its whole name (``Ring.name``). Does not wait for the ring to be created. While the
        other end is unclaimed, a call that blocks watches the creator, and raises PeerDied when that dies.
        Raises RingNotFound, RingNameTaken (two rings have the label; the whole name tells them apart), RingNameRefused
        (an entry of that name is not a ring's), what ``attach`` raises, PermissionError (the creator may not be
        inspected: it is not dumpable), ValueError.
        """
        sweep()
        found = find(name)
        try:
            ring = cls.attach(open_descriptors(found), generation=found.generation)
        except RingError as error:
            if exists(found):
                raise
            # It was closed meanwhile, and its descriptors' numbers mean other files.
            raise RingNotFound(name) from error
        ring._name = found
        return ring

    @staticmethod
    def sweep_named() -> list[str]:
        """Remove the names of rings whose creator is dead, or which need their name no more. Returns these names.

        ``create_named`` and ``open`` do so too. Other users' names, and those of other pid namespaces, stay.
        Raises OSError.
        """
        return sweep()

    @classmethod
    def attach(cls, fds: Sequence[int], *, generation: int) -> Ring:
        """Map a ring that another process made. The ring then owns the three fds, also if this fails.

        Raises RingCorrupted (no ring, or one of another version), WrongGeneration, OSError (no room to map it, or a
        number that is not a descriptor).
        """
        try:
            memory, data_bell, space_bell = fds
            check_memory(memory)
            for fd in fds:
                os.set_inheritable(fd, False)
            check_bell(data_bell)
            check_bell(space_bell)
            segment = Segment(memory)
            try:
                segment.validate(generation)
            except BaseException:
                segment.close()
                raise
        except BaseException:
            _close_all(fds)
            raise
        return cls((memory, data_bell, space_bell), segment, generation)

    def claim_producer(self) -> Producer:
        """Claim the sending end. The new owner continues where a dead one stopped.

        Raises AlreadyClaimed, RingClosed, RingCorrupted.
        """
        segment = self._mapped()
        memory, data_bell, space_bell = self.fds
        claim(segment, PRODUCER, memory)
        self._claimed_by = os.getpid()
        end = ProducerEnd(segment, Bell(space_bell), Bell(data_bell))
        end.wake()  # so that a waiting consumer watches this process
        self._producer = Producer(segment, end, self._waiter(CONSUMER, space_bell), space_bell)
        self._unname_if_claimed()
        return self._producer

    def claim_consumer(self) -> Consumer:
        """Claim the receiving end. Frames of the ring that a dead owner had not released come again.

        A message in fragments of which it had received some, or all, is lost, because their space was given back.
        Raises AlreadyClaimed, RingClosed, RingCorrupted.
        """
        segment = self._mapped()
        memory, data_bell, space_bell = self.fds
        claim(segment, CONSUMER, memory)
        self._claimed_by = os.getpid()
        end = ConsumerEnd(segment, Bell(data_bell), Bell(space_bell))
        end.wake()
        self._consumer = Consumer(segment, end, self._waiter(PRODUCER, data_bell), data_bell)
        self._unname_if_claimed()
        return self._consumer

    def register_cuda(self, device: int | None = None) -> None:
        """Page-lock the mapping for CUDA in this process, until ``close``.

        Copies between a device and the ring are then asynchronous DMA, with no staging copy:
        ``tensor.copy_(torch.frombuffer(frame.data[:], dtype=...), non_blocking=True)``.

        Commit a reservation, release a frame and close the ring when such copies are over (synchronize their stream):
        the ring cannot see them. Each process registers for itself; a second call does nothing.
        device: the CUDA device whose context of this process registers the memory; None: the current device.
        Raises CudaFailed (no CUDA runtime in this process, no device), RingMisuse (closed).
        """
        segment = self._mapped()
        if self._registration is None:
            self._registration = Registration(*segment.span(), device)

    @property
    def name(self) -> str | None:
        """The whole name of a named ring, which ``open`` takes while the ring has it; None for an anonymous one."""
        return None if self._name is None else str(self._name)

    @property
    def peer_pids(self) -> tuple[int | None, int | None]:
        """The pids that claimed the producer's and the consumer's end, dead or alive; None for an unclaimed end."""
        segment = self._mapped()
        return pid_of(segment.claim_of(PRODUCER)) or None, pid_of(segment.claim_of(CONSUMER)) or None

    def statistics(self) -> RingStatistics:
        """Return the ring's counters; valid in any process that mapped the ring. Raises RingMisuse (closed here)."""
        segment = self._mapped()
        return RingStatistics(self.capacity, segment.used(), *segment.counts())

    @property
    def closed(self) -> bool:
        """Whether the ring was closed here."""
        return self._closed

    def close_end(self, end: EndName) -> None:
        """Close an end whose process is dead, so that the peer neither waits nor fills up. It needs no descriptor.

        The caller knows of the death: the claim is not looked at. Raises RingMisuse (closed here).
        """
        segment = self._mapped()
        _, data_bell, space_bell = self.fds
        if end == "producer":
            ProducerEnd(segment, Bell(space_bell), Bell(data_bell)).close()
        else:
            ConsumerEnd(segment, Bell(data_bell), Bell(space_bell)).close()

    def abandon(self) -> None:
        """Give up the ends that were claimed here as the kernel does for a killed process. For simulated processes."""
        if self._producer is not None:
            self._mapped().store_claim(PRODUCER, 0)
        if self._consumer is not None:
            self._mapped().store_claim(CONSUMER, 0)

    def close(self) -> None:
        """Close the ends that this process claimed here, unmap, close the descriptors; idempotent.

        Raises FrameBorrowed, and may be called again, while a view of a frame or of a reservation is alive. CudaFailed
        (the memory could not be unregistered) is raised when everything else is done.
        """
        if self._closed:
            return
        if self._name is not None and self._is_creator and self._name.pid == os.getpid():
            # Before the descriptors, to which the name leads. A forked child is not the creator.
            remove(self._name)
        if self._claimed_by == os.getpid():
            if self._consumer is not None:
                self._consumer.close()
            if self._producer is not None:
                self._producer.close()
        registration, self._registration = self._registration, None
        try:
            if registration is not None:
                registration.close()
        finally:
            self._segment.close()
            self._closed = True
            _close_all(self.fds)

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _waiter(self, peer: Column, bell: int) -> Waiter:
        return Waiter(self._segment, peer, bell, 0 if self._name is None else self._name.creator)

    def _unname_if_claimed(self) -> None:
        """Remove the name when both ends have been claimed. Of two that claim at a time, at least one sees both.

        SYNC CLAIM: a claim's store is before the fence of ``End.wake``, and this load after it.
        """
        if self._name is not None and all(self._segment.claim_of(column) for column in (PRODUCER, CONSUMER)):
            remove(self._name)

    def _mapped(self) -> Segment:
        if self._closed:
            raise RingMisuse("the ring was closed here")
        return self._segment


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with suppress(OSError):  # not a descriptor: the others still have to be closed
            os.close(fd)
