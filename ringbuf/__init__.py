"""A single-producer, single-consumer ring in shared memory, and bundles of arrays to put in it.

A ``Snapshot`` is shared memory too: it keeps the last message written to it, also when its writer dies.

The memory has no name, the two ends share no lock, and either process may die at any instruction. A wheel of
omni_actors contains this package as ``omni_actors.ringbuf``.

    ring = Ring.create()                  # ring.fds go to the other process: Ring.attach(fds, generation=0)
    producer = ring.claim_producer()
    producer.send(*encode_bundle({"step": 1}, {"hidden": array}))

    with consumer.recv() as frame:        # in the other process
        bundle = decode_bundle(frame.data)

A process that inherits no descriptors opens a ring by name; the name is gone once both ends have been claimed:

    ring = Ring.create_named("microphone")
    ring = Ring.open("microphone")        # in the other process

Ownership
---------
Any process of one pid namespace that has the descriptors may attach: a claim names its owner by the pid. A process
owns an end by claiming it; each end has one owner at a time, which uses it from one thread at a time. ``try_*``,
``park`` and ``fileno`` never block; the others sleep in ``poll``. A forked child inherits no end and no frame: it may
attach, and claim an end once the parent has closed its ring or has exited.

Memory ordering
---------------
Everything that the producer wrote before ``send`` or ``commit`` is visible when the consumer has the frame. Every read
of the consumer before ``release`` is complete when the producer writes to the same place again. Nothing else has an
order.

Trust
-----
Whatever the shared memory contains, neither end crashes or accesses memory outside the segment. A malicious peer can
still make the other end wait, because it can write the doorbells and the claims, and it can alter messages. A checksum
finds a program that writes where it should not, and no malice.
"""

from __future__ import annotations

from ringbuf._buffers import Deferred as Deferred
from ringbuf._buffers import SendBuffer as SendBuffer
from ringbuf._bundle import Bundle as Bundle
from ringbuf._bundle import Tensor as Tensor
from ringbuf._bundle import decode_bundle as decode_bundle
from ringbuf._bundle import encode_bundle as encode_bundle
from ringbuf._consumer import Consumer as Consumer
from ringbuf._consumer import Frame as Frame
from ringbuf._consumer import Record as Record
from ringbuf._cuda import CudaRuntime as CudaRuntime
from ringbuf._descriptors import create_memory as create_memory
from ringbuf._errors import AlreadyClaimed as AlreadyClaimed
from ringbuf._errors import BundleCorrupted as BundleCorrupted
from ringbuf._errors import CudaFailed as CudaFailed
from ringbuf._errors import EndName as EndName
from ringbuf._errors import FrameBorrowed as FrameBorrowed
from ringbuf._errors import FrameReleased as FrameReleased
from ringbuf._errors import MessageTooLarge as MessageTooLarge
from ringbuf._errors import PeerDied as PeerDied
from ringbuf._errors import RingClosed as RingClosed
from ringbuf._errors import RingCorrupted as RingCorrupted
from ringbuf._errors import RingError as RingError
from ringbuf._errors import RingMisuse as RingMisuse
from ringbuf._errors import RingNameRefused as RingNameRefused
from ringbuf._errors import RingNameTaken as RingNameTaken
from ringbuf._errors import RingNotFound as RingNotFound
from ringbuf._errors import UnsupportedMachine as UnsupportedMachine
from ringbuf._errors import WrongGeneration as WrongGeneration
from ringbuf._producer import Producer as Producer
from ringbuf._ring import DEFAULT_CAPACITY as DEFAULT_CAPACITY
from ringbuf._ring import Ring as Ring
from ringbuf._ring import RingStatistics as RingStatistics
from ringbuf._snapshot import Snapshot as Snapshot
