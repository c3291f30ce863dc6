"""What a stage engine is.

An engine turns the chunks of many requests into the outputs of many requests, a step at a time. The protocol is
synchronous and step-shaped so that a batched language model, a vocoder and a denoiser all fit, and so that
*continuous batching* is natural: requests join and leave between steps.

Rules
1. One thread calls an engine: the worker's engine loop. An engine needs no locks.
2. A chunk's tensors are views into shared memory, valid until ``feed`` returns. Copy what you keep; a view kept
   longer stops the worker with ``FrameBorrowed``, because its bytes would change under the engine.
3. Each request ends exactly once: by a ``StageOutput`` with ``last=True``, by a ``StageFailure``, or by ``abort``.
   After that the engine holds nothing of it, and neither names it again.
4. An engine that raises ``InvalidRequest`` from ``start`` or ``feed`` has refused and forgotten that one request and
   stays in service. Any other exception ends the worker: the supervisor restarts it and the cause is reported.
5. Engines import no layer of omni_actors but this module; heavy libraries are imported in the worker only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np

from omni_actors.errors import InvalidRequest
from omni_actors.protocol.messages import CLIENT
from ringbuf import Tensor

__all__ = [
    "CLIENT",
    "Chunk",
    "InvalidRequest",
    "Measured",
    "NoOptions",
    "NoParams",
    "Pausable",
    "RequestId",
    "StageContext",
    "StageEngine",
    "StageFailure",
    "StageOutput",
    "StageRequest",
    "TensorLike",
]

RequestId: TypeAlias = int
"""A request's number: unique within a system and increasing in order of admission."""

TensorLike: TypeAlias = "np.ndarray[Any, Any] | Tensor"


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of an engine that takes none."""


class NoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request parameters of an engine that takes none."""


class StageContext(msgspec.Struct, frozen=True):
    """What an engine is built with: one stage of the configuration, and a way to report how loading goes."""

    stage: str
    model: Path | None
    options: Mapping[str, Any]
    threads: int
    device: str
    report: Callable[[str], None]
    """Call with a few words while loading ("reading weights"): they reach the health report and the terminal."""
    thread_budget: Callable[[], int] | None = None
    """Call in a step, as often as it can be followed: with how many native threads to compute from now on, ``threads``
    at the most, as other workers need cores. Only for an engine that gives the same bits with any number."""


class StageRequest(msgspec.Struct, frozen=True):
    """One request as one stage sees it."""

    request_id: RequestId
    sources: tuple[str, ...]
    """Who feeds this request here: ``CLIENT``, names of stages, or both. Each ends its part with ``chunk.last``."""
    params: Mapping[str, Any]
    """The request's parameters for this engine over the stage's defaults; validated against the engine's ``params``."""
    downstream: bool = True
    """Whether stages below take part in it: else nobody reads ``StageOutput.downstream``."""


class Chunk(msgspec.Struct, frozen=True):
    """A piece of a request's input, from the stage named ``source`` or from ``CLIENT``.

    ``tensors`` are views (rule 2); ``data`` is small: text, counts, flags.
    """

    source: str
    seq: int
    last: bool
    tensors: Mapping[str, Tensor]
    data: Mapping[str, Any]


class StageOutput(msgspec.Struct, frozen=True):
    """A piece of a request's output: for the stages below and, where this stage's output was asked for, the client.

    For a client, ``data["text"]`` (str) is text, and ``tensors["audio"]`` (float32 (n,), mono) is sound, which needs
    ``data["sample_rate"]`` (Hz). ``tensors`` are copied into rings after ``step`` returns, and may be retained for a
    replay: do not write to them after that call. ``downstream``: more of them, for the stages below, not for a client
    (hidden states); a stage finds them among its chunk's ``tensors``, so no name may be in both.
    """

    request_id: RequestId
    tensors: Mapping[str, TensorLike] = {}
    data: Mapping[str, Any] = {}
    last: bool = False
    downstream: Mapping[str, TensorLike] = {}


class StageFailure(msgspec.Struct, frozen=True):
    """This request cannot be served, the engine can: the request ends with ``error``, the others go on."""

    request_id: RequestId
    error: InvalidRequest


class StageEngine(Protocol):
    @property
    def busy(self) -> bool:
        """Whether ``step`` would make progress with what has been fed so far. The loop sleeps while this is false."""
        ...

    def start(self, request: StageRequest) -> None:
        """Admit a request to the batch. Raises ``InvalidRequest``."""
        ...

    def feed(self, request_id: RequestId, chunk: Chunk) -> None:
        """Take input; ``chunk.last`` ends the input from ``chunk.source``. Raises ``InvalidRequest``."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """Forget a started request and free its memory."""
        ...

    def step(self) -> Iterable[StageOutput | StageFailure]:
        """One batched step. Called only while ``busy``; a generator is drained, each output sent as it is yielded."""
        ...

    def close(self) -> None:
        """Free everything. No call follows."""
        ...


@runtime_checkable
class Measured(Protocol):
    """What an engine may have besides: figures of its own for ``/metrics``."""

    def gauges(self) -> Mapping[str, float]:
        """Figures of now by name, a few dozen at the most: they travel in one control message.

        Called between steps, each time that the supervisor looks whether the loop takes turns: be quick.
        """
        ...


@runtime_checkable
class Pausable(Protocol):
    """What an engine may have besides: it can leave single requests out of its steps for a time.

    The client of a paused request does not keep up with reading. The request keeps its memory and still takes input;
    ``step`` computes nothing for it and ``busy`` does not count it. Pausing changes no output: neither the values nor
    how they are cut into chunks. A request that ends, in whatever way, is no longer paused. It is for engines whose
    output is large, and whose requests hold no place that others wait for, such as a row of a batch.
    """

    def pause(self, request_id: RequestId) -> None:
        """Leave a started request out. Harmless for one that is paused."""
        ...

    def resume(self, request_id: RequestId) -> None:
        """Take it up again. Harmless for one that is not paused."""
        ...
