"""A single-producer, single-consumer ring in shared memory, and bundles of arrays to put in it.

Wait-free, without a name, safe against the death of either side at any instruction.

    ring = Ring.create()                  # ring.fds go to the other process: Ring.attach(fds, generation=0)
    producer = ring.claim_producer()
    producer.send(*encode_bundle({"step": 1}, {"hidden": array}))

    with consumer.recv() as frame:        # over there
        bundle = decode_bundle(frame.data)
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
