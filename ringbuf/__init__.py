"""A single-producer, single-consumer ring in shared memory, and bundles of arrays to put in it.

Without a name, without locks between the two, safe against the death of either at any instruction.

    ring = Ring.create()                  # ring.fds go to the other process: Ring.attach(fds, generation=0)
    producer = ring.claim_producer()
    producer.send(*encode_bundle({"step": 1}, {"hidden": array}))

    with consumer.recv() as frame:        # over there
        bundle = decode_bundle(frame.data)

Who may call what
-----------------
Any process that has the descriptors may attach. One at a time owns each end, by claiming it, and uses it from one
thread at a time. ``try_*``, ``park`` and ``fileno`` never block; the others sleep in ``poll``. A fork does not pass an
end on: the child may attach, and claim an end once the parent has closed its ring or is gone.

What crosses
------------
All that the producer wrote before ``send`` or ``commit`` is there when the consumer has the frame; all that the
consumer read before ``release`` is over when the producer writes there again. Nothing else is ordered.

What is not trusted
-------------------
Whatever the shared memory holds, neither end crashes, nor touches what is outside of it. A peer that means harm can
still keep the other waiting (it owns the doorbells and the claims as well), and without checksums alter what it says.
"""

from __future__ import annotations

from ringbuf._bundle import Bundle as Bundle
from ringbuf._bundle import Tensor as Tensor
from ringbuf._bundle import decode_bundle as decode_bundle
from ringbuf._bundle import encode_bundle as encode_bundle
from ringbuf._consumer import Consumer as Consumer
from ringbuf._consumer import Frame as Frame
from ringbuf._errors import AlreadyClaimed as AlreadyClaimed
from ringbuf._errors import BundleCorrupted as BundleCorrupted
from ringbuf._errors import CudaFailed as CudaFailed
from ringbuf._errors import FrameBorrowed as FrameBorrowed
from ringbuf._errors import FrameReleased as FrameReleased
from ringbuf._errors import MessageTooLarge as MessageTooLarge
from ringbuf._errors import PeerDied as PeerDied
from ringbuf._errors import RingClosed as RingClosed
from ringbuf._errors import RingCorrupted as RingCorrupted
from ringbuf._errors import RingError as RingError
from ringbuf._errors import RingMisuse as RingMisuse
from ringbuf._errors import UnsupportedMachine as UnsupportedMachine
from ringbuf._errors import WrongGeneration as WrongGeneration
from ringbuf._producer import Producer as Producer
from ringbuf._ring import DEFAULT_CAPACITY as DEFAULT_CAPACITY
from ringbuf._ring import Ring as Ring
from ringbuf._ring import RingStatistics as RingStatistics
