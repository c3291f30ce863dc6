"""The control plane's vocabulary: one frozen tagged union, one encoder, one decoder.

Control carries names, numbers and small parameters; tensors travel through the rings. Messages are msgpack-encoded, and
travel as packets of a SOCK_SEQPACKET socket, with file descriptors (SCM_RIGHTS) where it says so.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

CLIENT = "client"
"""The stage name of the user's side: the parent process feeds every input edge and reads every output edge."""


class Address(msgspec.Struct, frozen=True):
    """A replica of a stage."""

    stage: str
    replica: int

    def __str__(self) -> str:
        return f"{self.stage}.{self.replica}"


CLIENT_ADDRESS = Address(CLIENT, 0)


class _Control(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


# parent -> worker


class Configure(_Control, frozen=True):
    """First message to a worker: what it is."""

    address: Address
    generation: int
    factory: str
    model: str | None
    options: dict[str, Any]
    threads: int
    nice: int
    device: str
    spins: bool
    """Whether native threads may wait awake for a moment (see ``Pipeline.spins``)."""
    fence: int
    """Requests up to this number belong to an earlier generation: what arrives of them is dropped."""


class Connect(_Control, frozen=True):
    """An edge, new or replaced. Carries three descriptors (see ``ringbuf.Ring.fds``)."""

    producer: Address
    consumer: Address
    generation: int


class Start(_Control, frozen=True):
    """A request begins here. Numbers reach a worker in increasing order, replayed ones aside."""

    request: int
    sources: tuple[str, ...]
    targets: tuple[Address, ...]
    params: msgspec.Raw
    """A mapping, encoded with msgpack. The engine loop decodes it for the engine."""
    downstream: bool = False
    """Whether stages below take part, among ``targets`` or not yet (one that starts again comes by ``Resend``)."""
    retain_bytes: int = 0
    """How much of its outputs is kept until its end, to be sent again."""
    replayed: bool = False
    """It has run before, in a worker that died: say ``Started``, so that its input is sent no sooner."""
    worker_retain_bytes: int = 0
    """How much of the outputs of all requests this worker keeps."""


class Resend(_Control, frozen=True):
    """Send the outputs of a request to ``target`` from the first one on: what is retained, then what is to come."""

    request: int
    target: Address


class Pause(_Control, frozen=True):
    """The client does not keep up: compute nothing for this request until ``Resume``. Its input is still taken in."""

    request: int


class Resume(_Control, frozen=True):
    """Go on with a request that was paused."""

    request: int


class Abort(_Control, frozen=True):
    """A request has ended, in whatever way: let go of all that is here of it."""

    request: int


class Ping(_Control, frozen=True):
    """Asks the engine loop for a sign of life: its next turn answers with ``Pong``."""

    number: int


class Stop(_Control, frozen=True):
    """Finish within ``grace_s``; what runs is dropped."""

    grace_s: float


# worker -> parent


class Loading(_Control, frozen=True):
    note: str


class Ready(_Control, frozen=True):
    load_s: float


class Pong(_Control, frozen=True):
    """The engine loop took a turn after the ``Ping`` of this number."""

    number: int
    gauges: dict[str, float] = {}
    """What the engine measures of itself (see ``stages.base.Measured``)."""


class LoadFailed(_Control, frozen=True):
    """The engine's own exception; the process ends after this."""

    error: str


class EngineFailed(_Control, frozen=True):
    """The engine raised; the process ends after this.

    request: the one for which the engine was called (``start``, ``feed``); None after a step, which serves many.
    """

    request: int | None


class StageStats(msgspec.Struct, frozen=True):
    """What one stage did for one request. Times are CLOCK_MONOTONIC seconds, comparable between processes."""

    stage: str
    started: float
    first_input: float | None
    first_output: float | None
    finished: float
    step_s: float
    """Time spent in the engine's steps while the request was active here (shared by all requests of the batch)."""
    chunks: int
    sent_bytes: dict[str, int]
    """Bytes put into each outgoing edge, by consumer."""


class Finished(_Control, frozen=True):
    request: int
    stats: StageStats


class Started(_Control, frozen=True):
    """A replayed request is active here: what comes of it from now on is taken in."""

    request: int


class InputComplete(_Control, frozen=True):
    """This stage has the last chunk of ``source``, another stage, and so all of them: it needs that one no more."""

    request: int
    source: str


class Unreplayable(_Control, frozen=True):
    """This stage can take no part in a replay of the request, and why.

    needed: a replay that is under way has just asked for it.
    """

    request: int
    reason: str
    needed: bool


class Refused(_Control, frozen=True):
    """The engine raised ``InvalidRequest`` for this request."""

    request: int
    message: str
    param: str | None
    code: str


ToWorker: TypeAlias = Configure | Connect | Start | Resend | Pause | Resume | Abort | Ping | Stop
RequestNotice: TypeAlias = Started | InputComplete | Finished | Refused | Unreplayable
FromWorker: TypeAlias = Loading | Ready | Pong | LoadFailed | EngineFailed | RequestNotice
ControlMessage: TypeAlias = ToWorker | FromWorker

MAX_BYTES = 128 * 1024
"""Largest encoded message: under the default socket buffer, so that a packet is never refused for its size."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)
_unpacker: msgspec.msgpack.Decoder[list[ControlMessage]] = msgspec.msgpack.Decoder(list[ControlMessage])
_HEADER = struct.Struct(">BH")
_ARRAY_16 = 0xDC
MAX_PACKET_BYTES = _HEADER.size + MAX_BYTES


def encode(message: ControlMessage) -> bytes:
    """Raises ValueError past ``MAX_BYTES``."""
    packet = _encoder.encode(message)
    if len(packet) > MAX_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(packet)} bytes: control messages end at {MAX_BYTES}")
    return packet


def decode(packet: bytes) -> ControlMessage:
    """Raises msgspec.ValidationError or msgspec.DecodeError on anything that is not exactly one message."""
    return _decoder.decode(packet)


def pack(encoded: Sequence[bytes]) -> bytes:
    """Messages of ``MAX_BYTES`` in all as one packet: an array of msgpack, the one with a count of 16 bits."""
    return _HEADER.pack(_ARRAY_16, len(encoded)) + b"".join(encoded)


def unpack(packet: bytes) -> list[ControlMessage]:
    """Raises as ``decode``."""
    return _unpacker.decode(packet)
