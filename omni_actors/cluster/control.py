"""The control connection between the parent and the agent of a node: its messages and their frames.

    size 4, little-endian   tag 16   payload (a msgpack array of messages)

Rules
1. A tag is the first half of HMAC-SHA256 over the number of the frame and its payload. The key belongs to this
   connection and this direction (``handshake.Handshake.keys``). So no frame can be changed, inserted, left out or sent
   again, with or without TLS.
2. A frame whose size exceeds ``MOST_BYTES`` or whose tag is wrong ends the connection.
3. What the parent and a worker tell each other travels as packets of their own protocol (``protocol.messages``), and
   is not interpreted on the way. The agent replaces descriptors: those of its own rings and checkpoints.
4. The parent speaks first: ``Accepted``, or ``Refused`` and nothing more. The agent sends nothing before.
5. No I/O here.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Mapping
from typing import Final, Generic, Literal, TypeAlias, TypeVar

import msgspec

from omni_actors.errors import OmniError, WorkerExit
from omni_actors.protocol.messages import Address
from ringbuf import EndName

PACKAGE: Final = "omni-actors"
"""The distribution whose version both sides must have."""
MOST_BYTES: Final = 2 << 20
"""The most bytes of a frame's payload. The largest message is a packet of a worker, or the last lines of its stderr."""
BATCH_BYTES: Final = 64 << 10
"""A frame takes no more messages once it has this size."""
_SIZE, _TAG = 4, 16


class ControlCorrupted(OmniError):
    """What arrived on a control connection was not sent by the other side. why: in words."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"the control connection is not intact: {why}")


class _Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


# agent -> parent


class Hello(_Message, frozen=True, omit_defaults=True):
    """The agent's first message: it runs. links: host and port at which it accepts links.

    version: of the package omni-actors there, which must be the parent's. fault: why the agent cannot be used.
    """

    version: str
    pid: int
    links: tuple[str, int]
    fault: str | None = None


class Renew(_Message, frozen=True):
    """Ask for a renewal of the lease.

    asked_at: the agent's clock of leases, which the grant repeats. monotonic: its CLOCK_MONOTONIC, in seconds.
    """

    asked_at: float
    monotonic: float


class Spawned(_Message, frozen=True):
    """A worker was started, as this process."""

    worker: int
    pid: int


class NotSpawned(_Message, frozen=True):
    """No process could be started for a worker. There will be no ``Dead``."""

    worker: int
    error: str


class FromWorker(_Message, frozen=True):
    """A packet that a worker sent to the parent."""

    worker: int
    packet: bytes


class CheckpointKept(_Message, frozen=True):
    """A worker keeps its checkpoints of a request in this memory, which stays on the node. memory: its number."""

    worker: int
    request: int
    memory: int


class Unusable(_Message, frozen=True):
    """The parent is to kill this worker, for this reason: it does not read, sends what cannot be read, has no ring."""

    worker: int
    reason: str


class Taken(_Message, frozen=True):
    """How many messages the worker's mailbox has taken since the worker's start (``backlog``)."""

    worker: int
    count: int


class Ending(_Message, frozen=True):
    """The worker sends no more: all its packets came before. This is how it ended."""

    worker: int
    exit: WorkerExit


class Dead(_Message, frozen=True):
    """Nothing of the worker is left."""

    worker: int


class LogLine(_Message, frozen=True):
    """A line that a worker wrote to stderr. logger: whose name the parent logs it under."""

    logger: str
    text: str


class LinkLost(_Message, frozen=True):
    """The link of this ring has broken."""

    generation: int
    reason: str


class Statistics(_Message, frozen=True):
    """The counters of the agent's rings, by generation (``ringbuf.RingStatistics``)."""

    rings: Mapping[int, tuple[int, int, int, int]]


# parent -> agent


class Accepted(_Message, frozen=True):
    """The first message: the parent has started this agent, which from now on ends with this connection."""


class Refused(_Message, frozen=True):
    """The only message: the parent does not expect this agent, or not any more."""


class Granted(_Message, frozen=True):
    """The lease is renewed: it ends ``lease_s`` after ``asked_at``."""

    asked_at: float


class Spawn(_Message, frozen=True, kw_only=True):
    """Start a worker. worker: its number, which no other worker of this agent has. The rest: ``Spawner.spawn``."""

    worker: int
    address: Address
    mailbox_capacity: int
    environment: dict[str, str]


class Kill(_Message, frozen=True):
    """Kill a worker. Harmless if it is dead."""

    worker: int


class ToWorker(_Message, frozen=True):
    """A packet for a worker. wakes: ``Mailbox.post``. memory: that of the checkpoints which the packet brings it."""

    worker: int
    packet: bytes
    wakes: bool = True
    memory: int | None = None


class DropCheckpoint(_Message, frozen=True):
    """Free this memory, unless a worker has it."""

    memory: int


class MakeRing(_Message, frozen=True):
    """Make a ring, or the part of one that has its other end on another node.

    link: None, if both workers are on this node. "in": a link brings the records. Host and port: a link carries them
    there.
    """

    generation: int
    capacity: int
    link: Literal["in"] | tuple[str, int] | None


class CloseRing(_Message, frozen=True):
    """Close a ring and its link, and the end of the worker that is dead; None if that one is not on this node."""

    generation: int
    dead: EndName | None


FromAgent: TypeAlias = (
    Hello
    | Renew
    | Spawned
    | NotSpawned
    | FromWorker
    | CheckpointKept
    | Unusable
    | Taken
    | Ending
    | Dead
    | LogLine
    | LinkLost
    | Statistics
)
ToAgent: TypeAlias = Accepted | Refused | Granted | Spawn | Kill | ToWorker | DropCheckpoint | MakeRing | CloseRing

_encoder = msgspec.msgpack.Encoder()
FROM_AGENT: Final = msgspec.msgpack.Decoder(list[FromAgent])
TO_AGENT: Final = msgspec.msgpack.Decoder(list[ToAgent])

M = TypeVar("M")


def encode(message: FromAgent | ToAgent) -> bytes:
    """Encode one message. Raises ValueError if it cannot be sent in a frame."""
    encoded = _encoder.encode(message)
    if len(encoded) > MOST_BYTES - 8:
        raise ValueError(f"{type(message).__name__} of {len(encoded)} bytes: a frame has at most {MOST_BYTES} bytes")
    return encoded


class Sealer:
    """Makes the frames of one direction. key: 32 bytes."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def seal(self, messages: list[bytes]) -> bytes:
        """Return the frame of some encoded messages, at most ``MOST_BYTES`` in all."""
        payload = b"\xdd" + len(messages).to_bytes(4, "big") + b"".join(messages)  # msgpack's array with a 32-bit count
        frame = len(payload).to_bytes(_SIZE, "little") + _tag(self._key, self._number, payload) + payload
        self._number += 1
        return frame


class Opener(Generic[M]):
    """Takes the frames of one direction. decoder: of its messages."""

    def __init__(self, key: bytes, decoder: msgspec.msgpack.Decoder[list[M]]) -> None:
        self._key, self._number, self._decoder = key, 0, decoder
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Take the next bytes, and yield the messages that are complete. Raises ControlCorrupted."""
        self._received += data
        while (payload := self._next()) is not None:
            try:
                yield from self._decoder.decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ControlCorrupted(f"frame {self._number - 1} is not a list of messages: {error}") from error

    def _next(self) -> bytes | None:
        """Take the payload of the next frame; None: it is not complete."""
        if len(self._received) < _SIZE:
            return None
        size = int.from_bytes(self._received[:_SIZE], "little")
        if size > MOST_BYTES:
            raise ControlCorrupted(f"frame {self._number} would have {size} bytes; at most {MOST_BYTES} are accepted")
        begin, end = _SIZE + _TAG, _SIZE + _TAG + size
        if len(self._received) < end:
            return None
        payload = bytes(self._received[begin:end])
        if not hmac.compare_digest(bytes(self._received[_SIZE:begin]), _tag(self._key, self._number, payload)):
            raise ControlCorrupted(f"the tag of frame {self._number} is wrong")
        del self._received[:end]
        self._number += 1
        return payload


def _tag(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "little") + payload, hashlib.sha256)[:_TAG]
