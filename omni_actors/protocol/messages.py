"""The control messages between parent and worker: one frozen tagged union, one encoder, one decoder.

Control messages carry names, numbers and small parameters; tensors travel through the rings. A message is encoded with
msgpack. Messages travel as packets of a SOCK_SEQPACKET socket, with file descriptors (SCM_RIGHTS) where a message's
docstring mentions them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

CLIENT = "client"
"""The stage name of the client: the parent feeds every input edge and reads every output edge under this name."""
NODE_VARIABLE = "OMNI_ACTORS_NODE"
"""The environment variable of a worker that has the name of its node, on a cluster."""
FIRST_VERSION = "0"
"""The version of the weights that an engine has loaded at its start."""


class Address(msgspec.Struct, frozen=True):
    """The name of a replica: its stage and its number within the stage."""

    stage: str
    replica: int

    def __str__(self) -> str:
        return f"{self.stage}.{self.replica}"


CLIENT_ADDRESS = Address(CLIENT, 0)

Decisions: TypeAlias = tuple[int, ...]
"""What a resumable engine decided for one output: sampled tokens, codes, places in its input, encoded texts. 64-bit
integers."""


class Decided(msgspec.Struct, frozen=True, array_like=True):
    """Entries of the journal of ``stage`` for one request, from number ``first`` on (see ``protocol.journal``)."""

    stage: str
    first: int
    entries: tuple[Decisions, ...]


class Desired(msgspec.Struct, frozen=True, array_like=True):
    """A part of the desired state of a stage: the capability that establishes it, and the call's arguments."""

    capability: str
    arguments: dict[str, Any]


class Bounds(msgspec.Struct, frozen=True):
    """Bounds, in bytes, of what a worker keeps: of one request, and of all requests together.

    They are ``limits.retain_bytes`` and ``limits.worker_retain_bytes``. They hold for the outputs that it retains, for
    the memory of its checkpoints, and for the input that it gathers: for each of these apart.
    """

    request_bytes: int
    worker_bytes: int


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a worker process needs to know to run one replica of a stage.

    It is made of the stage's configuration once and is the same for all incarnations of the replica.
    """

    address: Address
    factory: str
    """Import path of the engine's factory, "package.module:callable"."""
    model: str | None = None
    """Directory of the model, if the engine needs one."""
    tokenizer: str | None = None
    """Directory of the tokenizer, if it is not the model's."""
    options: dict[str, Any] = {}
    """The engine's options, validated and complete."""
    threads: int = 1
    """The most native threads that the engine may compute with."""
    nice: int = 0
    """Priority of the engine's threads, from 0 (highest) to 19, as in ``nice(1)``."""
    device: str = "cpu"
    """The engine's device, as its worker names it: "cuda:0" is the first of ``devices``."""
    devices: tuple[str, ...] = ()
    """The devices that the worker sees, as in CUDA_VISIBLE_DEVICES; empty on the CPU."""
    pin_rings: bool = True
    """Whether a worker on a CUDA device page-locks its rings."""
    device_handles: str = "none"
    """The kind of memory in which workers hand tensors to one another by handle: "none", "cuda" or "host"."""
    resumable: bool = False
    """Whether the engine names its decisions, which then travel with its chunks (``stages.base``, rule 6)."""
    bounds: Bounds
    """How much the worker may retain or gather."""
    gathers: bool = False
    """Whether the engine gets the input of a request whole. If not: chunk by chunk, as it arrives."""
    spins: bool = True
    """Whether idle native threads may wait by spinning, as their library has it. If not, they sleep at once."""
    shares_cores: bool = False
    """Whether a worker that loads behind another one of its stage leaves the cores to those that serve."""


class _Control(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


# parent -> worker


class Configure(_Control, frozen=True):
    """The first message to a worker: which replica it runs."""

    spec: WorkerSpec
    fence: int
    """The newest request number: the worker drops chunks of requests up to this number that it did not start."""
    desired: tuple[Desired, ...] = ()
    """The desired state of its stage. The worker establishes it, in this order, before it is ready."""
    behind: bool = False
    """Whether another worker serves the stage while this one loads."""


class Connect(_Control, frozen=True):
    """A new ring for an edge; it replaces the edge's earlier ring. Carries three descriptors (``ringbuf.Ring.fds``).

    same_memory: whether the consumer opens the producer's arena.
    """

    producer: Address
    consumer: Address
    generation: int
    same_memory: bool = False


class Start(_Control, frozen=True, kw_only=True):
    """Start a request. Request numbers reach a worker in increasing order, except those of replays."""

    request: int
    sources: tuple[str, ...]
    targets: tuple[Address, ...]
    params: msgspec.Raw
    """A mapping, encoded with msgpack. The engine loop decodes it for the engine."""
    downstream: bool = False
    """Whether downstream stages take part in the request. One that is restarting is not among ``targets``: it is added
    by ``Resend``."""
    retained: bool = False
    """Whether the worker retains this request's outputs for a replay."""
    replayed: bool = False
    """Whether this is a replay. The worker answers ``Started``, and the request's sources send nothing before that."""
    checkpointed: bool = False
    """Whether the worker keeps the checkpoints of this request."""
    needed_from: tuple[int, ...] = ()
    """For each target, the number of the first chunk that it lacks; empty: 0 for all. Its journal comes before."""
    computed_from: int = 0
    """The number of the first output that the engine has to compute. If an earlier one is partial, or still to come at
    a ``Resend``, none is retained: the stage computes all of them again for a consumer that lacks them later."""


class JournalPart(_Control, frozen=True):
    """Decisions of a resumable stage for a request (see ``protocol.journal``).

    To a worker: those of its own stage, for the ``Start`` that follows. From a worker: a part of the answer to
    ``Switch``.
    """

    request: int
    decided: Decided


class Switch(_Control, frozen=True):
    """From now on, take a request's chunks only from the replicas that hold the request now, and answer.

    The answer is the journals of all stages upstream, as ``JournalPart``, and then ``Switched``. question: a number
    that the answer repeats. producers: by source; None: no replica holds the request. known: how many entries the
    parent has of each stage's journal. The answer has the others.
    """

    request: int
    question: int
    producers: dict[str, Address | None]
    known: dict[str, int]


class CheckpointMemory(_Control, frozen=True):
    """The memory of a request's checkpoints in one stage. Carries its descriptor (``ringbuf.Snapshot``).

    From a worker: memory that it writes from now on. To a worker: memory that an earlier incarnation wrote, for the
    ``Start`` that follows. Without a descriptor, because the receiver could have no more, it has no effect.
    """

    request: int


class Resend(_Control, frozen=True):
    """Send all outputs of a request to ``target``: first the retained ones, then those to come."""

    request: int
    target: Address


class Pause(_Control, frozen=True):
    """Compute nothing for a request until ``Resume``, because its client does not keep up. Its input is still fed."""

    request: int


class Resume(_Control, frozen=True):
    """Continue a paused request."""

    request: int


class Abort(_Control, frozen=True):
    """A request has ended, with whatever outcome: free everything that belongs to it."""

    request: int


class Ping(_Control, frozen=True):
    """Ask the engine loop whether it makes progress: its next turn answers with ``Pong``."""

    number: int


class Call(_Control, frozen=True):
    """Use a capability of the engine, between two steps. The engine loop answers with ``CallAnswer``."""

    number: int
    capability: str
    arguments: dict[str, Any] = {}


class Stop(_Control, frozen=True):
    """Close the engine and end the process. Running requests are dropped."""


# worker -> parent


class Loading(_Control, frozen=True):
    """Progress of loading, in a few words."""

    note: str


class Ready(_Control, frozen=True):
    """The engine is loaded and warm; loading took ``load_s`` seconds."""

    load_s: float


class Pong(_Control, frozen=True):
    """The engine loop completed a turn after the ``Ping`` with the same number."""

    number: int
    gauges: dict[str, float] = {}
    """The engine's own measurements (``stages.base.Measured``)."""


class CallRefusal(msgspec.Struct, frozen=True):
    """Why a call has no value: the facts of ``InvalidRequest`` or ``Unsupported``."""

    message: str
    unsupported: str | None = None
    """The capability that is missing, for the reason ``message``."""
    param: str | None = None
    code: str = "invalid_value"


class CallAnswer(_Control, frozen=True):
    """The answer to the ``Call`` with the same number: a value, encoded with msgpack, or a refusal."""

    number: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    refusal: CallRefusal | None = None


class LoadFailed(_Control, frozen=True):
    """The engine raised ``error`` while loading. The process ends after this message.

    part: which part of ``Configure.desired`` it raised at, counted from 0; None if it had not come to them.
    """

    error: str
    part: int | None = None


class EngineFailed(_Control, frozen=True):
    """The engine raised while serving. The process ends after this message.

    request: the request that ``start`` or ``feed`` was called for; None after ``step``, which serves many requests.
    capability: the capability that was called, if the engine raised in a call. No request is then to blame.
    """

    request: int | None
    capability: str | None = None


class StageStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one stage did for one request.

    Times are CLOCK_MONOTONIC seconds: of the worker's machine, and in the parent of the parent's.
    """

    stage: str
    started: float
    first_input: float | None = None
    first_output: float | None = None
    finished: float
    step_s: float
    """Seconds in the engine's steps while the request was active in this stage. All requests of a batch share them."""
    chunks: int
    sent_bytes: dict[str, int]
    """Bytes sent over each outgoing edge, by the consumer's address."""
    node: str | None = None
    """The name of the worker's node; None without a cluster."""

    def later(self, seconds: float) -> StageStats:
        """Return the same statistics with ``seconds`` added to every time."""
        times = {name: getattr(self, name) for name in ("started", "first_input", "first_output", "finished")}
        moved = {name: time + seconds for name, time in times.items() if time is not None}
        return msgspec.structs.replace(self, **moved)


class Finished(_Control, frozen=True):
    """The engine produced its last output for a request."""

    request: int
    stats: StageStats


class Started(_Control, frozen=True):
    """A replayed request is active in this worker, which accepts its chunks from now on."""

    request: int


class Switched(_Control, frozen=True):
    """The answer to ``Switch`` is complete. received: how many chunks of each source this stage has."""

    request: int
    question: int
    received: dict[str, int]


class InputComplete(_Control, frozen=True):
    """This stage has the last chunk of the upstream stage ``source``, and no longer needs that stage.

    A stage that finishes in the same turn sends ``Finished`` only.
    """

    request: int
    source: str


class Unreplayable(_Control, frozen=True):
    """This stage cannot send its outputs for the request again, for this ``reason``.

    needed: whether a replay that is in progress needed it; otherwise only later replays are concerned. recomputable:
    whether the stage may compute them again: they were evicted, and did not differ.
    """

    request: int
    reason: str
    needed: bool
    recomputable: bool = True


class Refused(_Control, frozen=True):
    """The engine refused a request: it raised ``InvalidRequest`` or, if ``retryable``, ``TemporarilyRefused``."""

    request: int
    message: str
    param: str | None
    code: str
    retryable: bool = False


LoopCommand: TypeAlias = Start | JournalPart | Switch | Resend | Pause | Resume | Abort | Ping | Call | Stop
"""What a worker passes on to its engine loop."""
RequestNotice: TypeAlias = Finished | InputComplete | Started | JournalPart | Switched | Refused | Unreplayable
ControlMessage: TypeAlias = (
    Configure
    | Connect
    | CheckpointMemory
    | LoopCommand
    | Loading
    | Ready
    | Pong
    | CallAnswer
    | LoadFailed
    | EngineFailed
    | RequestNotice
)

MAX_BYTES = 128 * 1024
"""Largest encoded message. It is below the default socket buffer, so the kernel never refuses a packet for its size."""
LONGEST_REASON = 16_384
"""The most bytes of an engine's text in a message, as UTF-8. A worker cuts a longer one. Two fit into one message."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[ControlMessage])
_HEADER = struct.Struct(">BH")
_ARRAY_16 = 0xDC
MAX_PACKET_BYTES = _HEADER.size + MAX_BYTES


def sendable(text: str) -> str:
    r"""Return an engine's text as a message can carry it: up to ``LONGEST_REASON`` bytes, surrogates escaped.

    A surrogate stands, for example, for a byte of a file's name that is not UTF-8.

    >>> sendable("no file \udcff")
    'no file \\udcff'
    """
    return text.encode(errors="backslashreplace")[:LONGEST_REASON].decode(errors="ignore")


def encode(message: ControlMessage) -> bytes:
    """Encode one message. Raises ValueError for more than ``MAX_BYTES``."""
    packet = _encoder.encode(message)
    if len(packet) > MAX_BYTES:
        raise ValueError(
            f"{type(message).__name__} of {len(packet)} bytes: a control message has at most {MAX_BYTES} bytes"
        )
    return packet


def pack(encoded: Sequence[bytes]) -> bytes:
    """Join encoded messages of at most ``MAX_BYTES`` in all to one packet: a msgpack array with a 16-bit count."""
    return _HEADER.pack(_ARRAY_16, len(encoded)) + b"".join(encoded)


def unpack(packet: bytes) -> list[ControlMessage]:
    """Decode all messages of a packet. Raises msgspec.DecodeError (or its subclass ValidationError)."""
    try:
        return _decoder.decode(packet)
    except (UnicodeDecodeError, RecursionError) as error:  # text that is not UTF-8; values nested too deeply
        raise msgspec.DecodeError(str(error)) from error
