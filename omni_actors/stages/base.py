"""The protocol of stage engines: the model code that a worker runs.

An engine turns the input chunks of many requests into output chunks, one step at a time. The protocol is synchronous
and step-shaped, so that a batched language model, a vocoder and a denoiser all fit, and so that *continuous batching*
is natural: requests join and leave between steps.

Rules
1. Threading: one thread, the worker's engine loop, builds the engine and makes every call. An engine needs no locks. An
   engine may start threads of its own; ``close`` must end them.
2. Lifetime of views: a chunk's tensors are views into shared memory, valid until ``feed`` returns. Copy what you keep.
   A view that is kept longer stops the worker with ``FrameBorrowed``, because its bytes would change under the engine.
   The tensors of an output are not copied at once either: do not write to them after yielding the output.
3. Lifetime of requests: ``start`` comes first, then chunks and steps in any order. Each request ends exactly once: by a
   ``StageOutput`` with ``last=True``, by a ``StageFailure``, by a refusal from ``start`` or ``feed`` (rule 4), or by
   ``abort``. After that the engine keeps nothing of the request, and neither side names it again.
4. Errors: ``InvalidRequest`` refuses one request. ``TemporarilyRefused`` refuses it for now: the client may send it
   again. Raise it before the request's first output. The engine must have forgotten the request when it raises one of
   the two, and stays in service. Any other exception ends the worker: the supervisor reports the cause and starts a new
   incarnation. ``stages.refusal`` turns exceptions of one request's own work into ``InvalidRequest``.
5. Cancellation: an engine is never interrupted. ``abort``, pausing and new requests are handled between two calls, so a
   step should take well under a second. A call that lasts longer than the stage's step timeout counts as a hang: the
   supervisor kills the worker.
6. Recovery: a request can survive the death of a worker if its engine is one of these, as ``registry.EngineSpec``
   states, or the stage in the pipeline's file (``deterministic``, ``resumable``).
   *Deterministic*: its outputs depend on parameters and input chunks alone. A new incarnation computes them again.
   *Resumable*: it names, in each output, what it decided for it (``StageOutput.decisions``). A new incarnation gets the
   input and these decisions (``StageRequest.journal``), puts out the same outputs again, and decides on from there. A
   resumable engine whose state is too large for decisions, such as a denoiser, also yields a ``StageCheckpoint`` after
   each step; a new incarnation gets the last one (``StageRequest.checkpoint``). The journal and the checkpoint need
   not be of the same moment. A checkpoint may be later than the journal, because outputs before it were lost with the
   worker: they are not repeated, and the engine decides anew which output comes next. The journal may also be later
   than the checkpoint: the engine puts these outputs out again when it reaches them. An output of the journal that lies
   before the checkpoint cannot be computed again: the engine puts it out with the same decisions and data, and without
   tensors. Only a downstream stage whose worker dies too misses them.
7. Imports: this module is all that an engine must know of omni_actors. Heavy libraries are imported in workers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np

# ``as`` makes these names part of this module (rule 7).
from omni_actors.errors import InvalidRequest as InvalidRequest
from omni_actors.errors import TemporarilyRefused as TemporarilyRefused
from omni_actors.protocol.messages import CLIENT as CLIENT
from omni_actors.protocol.messages import Decisions as Decisions
from ringbuf import Tensor as Tensor

REFUSALS = InvalidRequest, TemporarilyRefused
"""The exceptions by which an engine refuses one request (rule 4)."""
RequestId: TypeAlias = int
"""A request's number: unique within a system, and increasing in the order of the first dispatch."""

TensorLike: TypeAlias = "np.ndarray[Any, Any] | Tensor"


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of an engine that has none."""


class NoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request parameters of an engine that has none."""


class StageContext(msgspec.Struct, frozen=True):
    """The argument of an engine's factory: one stage of the configuration, and ways to talk to the worker."""

    stage: str
    """The stage's name."""
    model: Path | None
    """The model's directory."""
    options: Mapping[str, Any]
    """The stage's options; complete with defaults if the registry knows the engine, else as configured. The engine
    converts them with ``msgspec.convert(context.options, Options)``."""
    threads: int
    """How many native threads the engine may compute with."""
    device: str
    """A torch device: "cpu", "cuda:0"."""
    report: Callable[[str], None]
    """Call with a few words while loading ("reading weights"); they appear in the health report and in the terminal."""
    tokenizer: Path | None = None
    """The tokenizer's directory, if it is not the model's."""
    device_count: int = 1
    """How many devices the worker spans; ``device`` is the first one."""

    @property
    def model_directory(self) -> Path:
        """``model``, for an engine that cannot do without. Raises ValueError: the stage has no model."""
        if self.model is None:
            raise ValueError(f"stage {self.stage!r}: this engine needs a model, a directory")
        return self.model

    @property
    def tokenizer_directory(self) -> Path:
        """The directory that has the tokenizer: ``tokenizer``, or the model's. Raises ValueError as that does."""
        return self.tokenizer or self.model_directory


MOST_UNDECLARED = 1000
"""After so many decisions, a resumable engine puts out an output, an empty one if it has nothing else to put out."""
MOST_DECISIONS = 10_000
"""How many decisions an output may have. More would not fit into a control message."""


class StageRequest(msgspec.Struct, frozen=True):
    """One request as one stage sees it."""

    request_id: RequestId
    sources: tuple[str, ...]
    """Where input comes from: names of stages, ``CLIENT``, or both. Each source ends by a chunk with ``last=True``."""
    params: Mapping[str, Any]
    """The request's parameters for this engine, over the stage's defaults. The parent has validated them if the
    registry knows the engine; the engine converts them with ``refusal.validated(request.params, Params)``."""
    downstream: bool = True
    """Whether downstream stages take part in the request. If not, ``StageOutput.downstream`` is dropped."""
    journal: tuple[Decisions, ...] = ()
    """The decisions of the outputs that an earlier incarnation put out for this request. A resumable engine puts these
    outputs out again: as many, each with the same decisions, data, and tensors of the same shapes. Floating-point
    values may differ. The output behind them is the first one that it decides itself."""
    needed_from: int = 0
    """The number of the first output that is needed, at most ``len(journal)``. A resumable engine need not compute the
    content of earlier ones: it may put them out without it, each marked as ``StageOutput.partial``."""
    replayed: bool = False
    """Whether an earlier incarnation had started the request. A bound that it met there should not refuse it now."""
    checkpoint: StageCheckpoint | None = None
    """The last checkpoint of an earlier incarnation; None if there is none, or what it left is not valid. Its tensors
    are ``Tensor``s, and their arrays are valid until ``start`` returns: copy them. A view that is kept longer stops the
    worker with ``FrameBorrowed``."""


class Chunk(msgspec.Struct, frozen=True):
    """A piece of a request's input."""

    source: str
    """The name of the upstream stage, or ``CLIENT``."""
    seq: int
    """Counts the chunks of this request from this source, from 0. Each arrives once and in order."""
    last: bool
    """Whether this is the last chunk from ``source``."""
    tensors: Mapping[str, Tensor]
    """Views, valid until ``feed`` returns (rule 2)."""
    data: Mapping[str, Any]
    """Small values: text, counts, flags. These are copies. ``docs/pipelines.md`` says what a client's chunks have."""


class StageOutput(msgspec.Struct, frozen=True):
    """A piece of a request's output, for downstream stages and, if the client asked for this stage, for the client.

    Raises ValueError: it has too many decisions.
    """

    request_id: RequestId
    tensors: Mapping[str, TensorLike] = {}
    """For a client, ``audio`` is sound: float32 (n,), mono, with ``data["sample_rate"]`` in Hz. The bytes are sent
    later and may be retained for a replay: do not write to them any more."""
    data: Mapping[str, Any] = {}
    """For a client, ``text`` (str) is text."""
    last: bool = False
    """Whether this output ends the request in this stage."""
    decisions: Decisions = ()
    """What a resumable engine decided since its previous output for the request: all that a new incarnation needs, with
    the request's input, to go on behind this output. A few bytes: they travel with the chunk. At most
    ``MOST_DECISIONS``."""
    downstream: Mapping[str, TensorLike] = {}
    """More tensors, such as hidden states, for downstream stages only. They arrive in ``Chunk.tensors`` together with
    ``tensors``, so no name may be in both."""
    partial: bool = False
    """Whether some of its content may be missing, because no consumer needs it (``StageRequest.needed_from``). It is
    not sent to a consumer that starts again later."""

    def __post_init__(self) -> None:
        if len(self.decisions) > MOST_DECISIONS:
            raise ValueError(f"an output has {len(self.decisions)} decisions; the limit is {MOST_DECISIONS}")


class StageFailure(msgspec.Struct, frozen=True):
    """Ends one request with ``error``. The engine stays in service and other requests go on."""

    request_id: RequestId
    error: InvalidRequest | TemporarilyRefused


class StageCheckpoint(msgspec.Struct, frozen=True):
    """The state of one request, kept in memory that survives the worker. A later checkpoint replaces it.

    It reflects all outputs that were yielded before it: with this state, the request's input and its journal, a new
    incarnation goes on (rule 6). It is copied when it is yielded, and costs no message. Keep its size constant: a
    checkpoint that is larger than the first one needs new memory.

    It is kept for resumable stages, and for requests that are replayed. Twice its size counts against
    ``limits.retain_bytes`` for one request, and ``limits.worker_retain_bytes`` for all requests of a worker. Beyond
    that, or without memory, it is not kept, and a new incarnation gets an earlier checkpoint or none.
    """

    request_id: RequestId
    tensors: Mapping[str, TensorLike]
    data: Mapping[str, Any] = {}
    """Small values, such as the number of steps done."""


class StageEngine(Protocol):
    """Model code behind one stage. A factory, ``factory(context: StageContext) -> StageEngine``, loads it.

    The factory raises any exception if loading fails, with a text that helps the operator. A class is its own factory:

    >>> class Shout:
    ...     '''Answers each piece of text in upper case, one piece of each request per step.'''
    ...
    ...     def __init__(self, context: StageContext) -> None:
    ...         self._pieces: dict[RequestId, list[tuple[str, bool]]] = {}
    ...
    ...     @property
    ...     def busy(self) -> bool:
    ...         return any(self._pieces.values())
    ...
    ...     def start(self, request: StageRequest) -> None:
    ...         if len(request.sources) != 1:
    ...             raise InvalidRequest("one source was expected")
    ...         self._pieces[request.request_id] = []
    ...
    ...     def feed(self, request_id: RequestId, chunk: Chunk) -> None:
    ...         text = chunk.data.get("text", "")
    ...         if not isinstance(text, str):
    ...             del self._pieces[request_id]  # rule 4: forget the request, then refuse it
    ...             raise InvalidRequest("a text was expected", param="text")
    ...         self._pieces[request_id].append((text, chunk.last))
    ...
    ...     def abort(self, request_id: RequestId) -> None:
    ...         del self._pieces[request_id]
    ...
    ...     def step(self) -> Iterable[StageOutput | StageFailure]:
    ...         for request_id in [number for number, pieces in self._pieces.items() if pieces]:
    ...             text, last = self._pieces[request_id].pop(0)
    ...             if last:
    ...                 del self._pieces[request_id]
    ...             yield StageOutput(request_id, data={"text": text.upper()}, last=last)
    ...
    ...     def close(self) -> None:
    ...         self._pieces.clear()

    The engine loop then calls it like this:

    >>> context = StageContext(stage="shout", model=None, options={}, threads=1, device="cpu", report=print)
    >>> engine: StageEngine = Shout(context)
    >>> engine.start(StageRequest(7, sources=(CLIENT,), params={}))
    >>> engine.busy
    False
    >>> engine.feed(7, Chunk(CLIENT, seq=0, last=False, tensors={}, data={"text": "hello"}))
    >>> engine.feed(7, Chunk(CLIENT, seq=1, last=True, tensors={}, data={"text": " there"}))
    >>> while engine.busy:
    ...     for output in engine.step():
    ...         print(output.data["text"], output.last)
    HELLO False
     THERE True
    >>> engine.close()

    tests/support/conformance.py checks an engine against the rules of this module.
    """

    @property
    def busy(self) -> bool:
        """Whether ``step`` would make progress with the input so far. The engine loop sleeps while this is false.

        It must be cheap: the loop reads it in every turn. It is separate from ``step``, because a step that makes
        progress may give no output: a token that completes no character, for example.
        """
        ...

    def start(self, request: StageRequest) -> None:
        """Accept a request. Its chunks follow.

        Raises InvalidRequest, TemporarilyRefused: the request is refused, and the engine has kept nothing of it.
        """
        ...

    def feed(self, request_id: RequestId, chunk: Chunk) -> None:
        """Take a chunk of a started request's input. Copy what is needed of ``chunk.tensors``, compute in ``step``.

        Called for paused requests too (see ``Pausable``).
        Raises InvalidRequest, TemporarilyRefused: the request is refused, and the engine has forgotten it.
        """
        ...

    def abort(self, request_id: RequestId) -> None:
        """Forget a started request that has not ended, and free its memory. The engine yields no more output for it."""
        ...

    def step(self) -> Iterable[StageOutput | StageFailure | StageCheckpoint]:
        """Compute one batched step, and return what became ready.

        Called only while ``busy``. A generator is run to its end, and no other call comes in between; outputs are sent
        in the order in which they are yielded.
        Raises any exception to end the worker; a request's own failure is a ``StageFailure``.
        """
        ...

    def close(self) -> None:
        """Free everything and end all threads. No call follows. Not called if the worker ends by an exception."""
        ...


NEXT_END = "next_end_s"
"""The name of a figure that the parent uses: the seconds until the first of the engine's running requests ends."""


@runtime_checkable
class Measured(Protocol):
    """An engine may also have figures of its own for ``/metrics``."""

    def gauges(self) -> Mapping[str, float]:
        """Return current figures by name, a few dozen at most: they travel in one control message.

        ``NEXT_END`` is among them if the engine knows it: a refused client is told to try again after that time.

        Called between steps, whenever the supervisor checks that the engine loop makes turns. It must be quick.
        """
        ...


@runtime_checkable
class Controllable(Protocol):
    """An engine may also have capabilities beside requests, such as adapters or a cache that can be reset.

    A caller of ``OmniSystem.call`` uses them. ``stages.engine`` has an implementation.
    """

    def capabilities(self) -> Mapping[str, str | None]:
        """Return the names of the capabilities.

        The value is None for one that the engine has; otherwise the reason why it does not have it. Callers get
        ``Unsupported`` with that reason, or with a general one for a name that is missing here.
        """
        ...

    def call(self, capability: str, arguments: Mapping[str, Any]) -> Any:
        """Use a capability that the engine has, and return a value that msgpack can encode, of 100 KiB at most.

        Called between steps, while requests are active; and before the first request, to establish the desired state
        of the stage. A success is returned only after the capability was really carried out.
        Raises InvalidRequest: the arguments are wrong, and nothing has changed. Any other exception ends the worker.
        """
        ...


@runtime_checkable
class WarmsUp(Protocol):
    """An engine may also have costs that only its first request would pay, such as kernels that are built when used."""

    def warm_up(self) -> None:
        """Run such first computations now, in a few seconds. Called once, after loading and before any other method.

        Afterwards the engine has no request and is not ``busy``. Raises any exception to fail loading.
        """
        ...


@runtime_checkable
class Pausable(Protocol):
    """An engine may also be able to leave single requests out of its steps for a time.

    The parent pauses a request whose client does not keep up with reading. A paused request keeps its memory and still
    takes input; ``step`` computes nothing for it, and ``busy`` does not count it. Pausing changes no output: neither
    the values nor how they are cut into chunks. Implement this if outputs are large and requests have nothing that
    others wait for, such as a row of a batch. ``stages.engine`` has an implementation.
    """

    def pause(self, request_id: RequestId) -> None:
        """Leave a started request out of the steps. Has no effect on a paused request."""
        ...

    def resume(self, request_id: RequestId) -> None:
        """Include a request again. Has no effect on a request that is not paused."""
        ...
