"""Every error that a user of omni_actors can meet, as one tree. Each carries its facts as attributes.

OmniError
├── ConfigError           a pipeline that cannot work; raised before any process is started
├── NoPlace               no node of the cluster can run a worker
├── ClusterUnavailable    nodes of a cluster could not be used
│   └── RayUnavailable    there is no Ray at the cluster's address
├── StartTimedOut         the stages of a system did not load in time
├── SystemClosed          a call to a system that is closed
├── RequestError          a request ended without completing
│   ├── InvalidRequest    the request is wrong and has to be changed (HTTP 400)
│   │   ├── InvalidAdapter  a LoRA adapter cannot be used
│   │   └── Unsupported   a stage does not have the capability that is asked of it
│   ├── InputFailed       the iterator of a live input raised an exception
│   ├── Overloaded        the system is full (HTTP 429)
│   ├── TemporarilyRefused  a stage cannot take the request now (HTTP 503)
│   ├── DeadlineExceeded  the request's deadline passed
│   ├── SlowConsumer      the client did not read its output in time
│   ├── Aborted           the request was aborted
│   ├── StageCrashed      a worker that held the request died
│   ├── Quarantined       the same request has ended workers recently
│   ├── StageAsleep       a stage of the request's route sleeps
│   └── StageUnavailable  a stage of the request's route has failed
├── CallError             a replica did not answer a call
│   ├── CallTimedOut      it did not answer in time
│   ├── TooManyCalls      it has too many calls to answer already
│   └── WorkerLost        it has no worker, or its worker died before it answered
└── StageFailed           a stage could not load, or used up its restarts
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping, Sequence
from typing import Any

# ``as`` makes these names part of this module.
from omni_actors.deaths import LINK_LOST as LINK_LOST
from omni_actors.deaths import NODE_LOST as NODE_LOST
from omni_actors.deaths import Death as Death
from omni_actors.deaths import WorkerExit as WorkerExit


class OmniError(Exception):
    """Root of the errors of omni_actors. They can be pickled and copied, with their facts."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Make the same error from its text and its facts: ``__init__`` takes other arguments than the text."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(OmniError):
    """A configuration that cannot work, found before any process was started.

    Attributes:
        file: Where the value was written: "FILE:LINE", "overrides", or "--set" for one from the command line.
        path: Dotted place in the document, such as "stages.llm.threads".
        found: The value.
        accepted: What would be accepted, in words.
    """

    def __init__(self, file: str, path: str, found: Any, accepted: str) -> None:
        self.file, self.path, self.found, self.accepted = file, path, found, accepted
        try:
            shown = f"{found!r:.200}"
        except ValueError:  # an integer of more digits than Python shows
            shown = f"a {type(found).__name__} too long to show"
        super().__init__(f"{file}: {path}: found {shown}; accepted: {accepted}")


class NoPlace(OmniError):
    """No node of the cluster can run a worker.

    Attributes:
        stage: The stage of the worker.
        replica: The number of the worker in its stage.
        reasons: Why each node cannot run it, in words, by the node's name.
    """

    def __init__(self, stage: str, replica: int, reasons: Mapping[str, str]) -> None:
        self.stage, self.replica, self.reasons = stage, replica, dict(reasons)
        nodes: dict[str, list[str]] = {}
        for node, reason in self.reasons.items():
            nodes.setdefault(reason, []).append(node)
        why = "; ".join(f"{_some(names)}: {reason}" for reason, names in nodes.items())
        super().__init__(f"no node can run {stage}.{replica}: {why or 'there are no nodes'}")


class ClusterUnavailable(OmniError):
    """No agent could be started on some nodes of a cluster.

    Attributes:
        nodes: The reason for each of these nodes.
        no_place: Which worker has no place on the others, in words; empty if that was not tried.
    """

    def __init__(self, nodes: Mapping[str, str], no_place: str = "") -> None:
        self.nodes, self.no_place = dict(nodes), no_place
        reasons = [f"node {node!r} cannot be used: {why}" for node, why in self.nodes.items()]
        super().__init__("; ".join([*reasons, no_place] if no_place else reasons))


class RayUnavailable(ClusterUnavailable):
    """No Ray cluster can be used at an address.

    Attributes:
        address: The one that was given.
        why: The reason, in words.
    """

    def __init__(self, address: str, why: str) -> None:
        self.address, self.why = address, why
        self.nodes, self.no_place = {}, ""
        OmniError.__init__(self, f"the cluster {address!r} cannot be used: {why}")


class StartTimedOut(OmniError):
    """Not all replicas of a system were ready in ``start_timeout_s``.

    Attributes:
        timeout_s: The time that they had, in seconds.
        not_ready: What each replica that was not ready was doing, by stage and number.
    """

    def __init__(self, timeout_s: float, not_ready: Mapping[tuple[str, int], str]) -> None:
        self.timeout_s, self.not_ready = timeout_s, dict(not_ready)
        waiting = ", ".join(f"{stage}.{number} ({note})" for (stage, number), note in self.not_ready.items())
        super().__init__(f"not ready within {timeout_s:g} s (start_timeout_s): {waiting}")


class SystemClosed(OmniError, RuntimeError):
    """The system is closed. ``__cause__`` is the exception that ended it, if that was not ``close``.

    Attributes:
        reason: Why, in words.
    """

    def __init__(self, reason: str = "the system is closed") -> None:
        self.reason = reason
        super().__init__(reason)


class RequestError(OmniError):
    """A request ended without completing.

    Attributes:
        retryable: Whether the same request may succeed when it is sent again.
        index: Position of its prompt in a list of prompts, or in those of ``OmniSystem.map``; 0 otherwise.
    """

    retryable = False
    index = 0


class InvalidRequest(RequestError):
    """The request itself is wrong, and has to be changed.

    Attributes:
        message: What is wrong.
        param: The parameter that is wrong, by the caller's name; None if it is no single one.
        code: The kind of fault, as OpenAI's API names them, such as "invalid_value" or "unprocessable_input".
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        self.message, self.param, self.code = message, param, code
        super().__init__(message)


class Unsupported(InvalidRequest):
    """A stage does not have a capability that was asked of it.

    Attributes:
        stage: The stage.
        capability: The capability, by the name that ``call`` takes.
        why: Why the stage does not have it.
    """

    def __init__(self, stage: str, capability: str, why: str, *, param: str | None = None) -> None:
        self.stage, self.capability, self.why = stage, capability, why
        super().__init__(f"stage {stage!r} does not support {capability!r}: {why}", param=param, code="unsupported")


class InvalidAdapter(InvalidRequest):
    """A LoRA adapter cannot be used.

    Attributes:
        adapter: Its directory, or the name by which it was asked for.
        reason: Why it cannot be used.
        misfit: Whether it is an adapter of another model. The error's code says so, too.
    """

    MISFIT = "adapter_of_another_model"

    def __init__(self, adapter: str, reason: str, *, misfit: bool = False) -> None:
        self.adapter, self.reason, self.misfit = adapter, reason, misfit
        code = self.MISFIT if misfit else "invalid_adapter"
        super().__init__(f"LoRA adapter {adapter!r}: {reason}", param="lora", code=code)


class InputFailed(RequestError):
    """An iterator of the caller, which gave a request's live input, raised an exception.

    Attributes:
        kind: The kind of input, such as "script" or "audio".
        cause: The exception; also ``__cause__``.
    """

    def __init__(self, kind: str, cause: Exception) -> None:
        self.kind, self.cause = kind, cause
        super().__init__(f"the iterator of the {kind} raised {type(cause).__name__}: {cause}")


class Overloaded(RequestError):
    """The request was not admitted.

    Attributes:
        limit: ``limits.max_requests``.
        retry_after_s: Estimated seconds until a request would be admitted.
        stage: The stage whose control messages have piled up; None if ``limit`` requests are in flight.
    """

    retryable = True

    def __init__(self, limit: int, retry_after_s: float, stage: str | None = None) -> None:
        self.limit, self.retry_after_s, self.stage = limit, retry_after_s, stage
        why = f"{limit} requests are in flight, which is the limit (limits.max_requests)"
        if stage is not None:
            why = f"stage {stage!r} does not keep up with its control messages"
        super().__init__(f"{why}; try again in {retry_after_s:.0f} s")


class TemporarilyRefused(RequestError):
    """A stage cannot take the request now. The same request may succeed when it is sent again.

    Attributes:
        message: Why the stage cannot take it.
        code: The kind of reason, such as "no_room_for_prompt".
        retry_after_s: Estimated seconds until a request would be taken. The system sets it; an engine leaves it out.
    """

    retryable = True

    def __init__(self, message: str, *, code: str, retry_after_s: float = 1.0) -> None:
        self.message, self.code, self.retry_after_s = message, code, retry_after_s
        super().__init__(message)


class DeadlineExceeded(RequestError):
    """The request did not finish within ``deadline_s`` seconds."""

    retryable = True

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        super().__init__(f"the request did not finish within {deadline_s:g} s")


class SlowConsumer(RequestError):
    """The client did not read its output, and the request was ended to bound memory.

    Attributes:
        limit: The field of ``limits`` that was exceeded.
        bound: The value of that field.
        unread_bytes: Output that the client had not read.
        read_bytes_s: Bytes per second that the client read while the request waited for it.
        waited_s: Seconds that the request waited for the client.
    """

    def __init__(
        self, limit: str, bound: float, unread_bytes: int = 0, read_bytes_s: float = 0.0, waited_s: float = 0.0
    ) -> None:
        self.limit, self.bound, self.unread_bytes = limit, bound, unread_bytes
        self.read_bytes_s, self.waited_s = read_bytes_s, waited_s
        super().__init__(
            f"the client did not read the output of this request: {unread_bytes} bytes are unread, and it read"
            f" {read_bytes_s:.0f} bytes per second for {waited_s:.1f} s (limits.{limit} is {bound:g})"
        )


class Aborted(RequestError):
    """The request was aborted.

    Attributes:
        reason: Why, if the system aborted it; None if the caller did.
    """

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason
        super().__init__("the request was aborted" + (f": {reason}" if reason else ""))


class StageCrashed(RequestError):
    """A worker that held the request died, and the request was not replayed.

    Attributes:
        stage, replica, generation: Which worker died.
        exit: How it ended; its facts are also attributes of the error (pid, signal, exit_code, stderr_tail).
        not_replayed: Why the request was not replayed; None if the caller asked for that.
        retryable: False if the request has used up its replays or is quarantined, because sending it again would end
            more workers.
    """

    def __init__(
        self,
        stage: str,
        replica: int,
        generation: int,
        exit: WorkerExit,
        not_replayed: str | None = None,
        *,
        retryable: bool = True,
    ) -> None:
        self.retryable = retryable
        self.stage, self.replica, self.generation, self.exit = stage, replica, generation, exit
        self.pid, self.signal = exit.pid, exit.signal
        self.exit_code, self.stderr_tail = exit.exit_code, exit.stderr_tail
        self.not_replayed = not_replayed
        message = f"stage {stage!r} (replica {replica}, generation {generation}) died: {exit}"
        super().__init__(message + (f"; the request was not replayed: {not_replayed}" if not_replayed else ""))


class Quarantined(RequestError):
    """Requests with the same input and parameters ended workers two or more times, so this one is refused for a time.

    Attributes:
        stage: The stage whose workers it ended.
        ends_in_s: Seconds until such requests are admitted again.
    """

    def __init__(self, stage: str, ends_in_s: float) -> None:
        self.stage, self.ends_in_s = stage, ends_in_s
        super().__init__(
            f"the same request has ended the workers of stage {stage!r}; it is refused for the next {ends_in_s:.0f} s"
        )


class CallError(OmniError):
    """A replica did not answer a call.

    Attributes:
        stage, replica: Which replica; ``replica`` is None if the stage has no replicas.
        capability: What the call asked for.
        why: What kept it from answering.
    """

    def __init__(self, stage: str, replica: int | None, capability: str, why: str) -> None:
        self.stage, self.replica, self.capability, self.why = stage, replica, capability, why
        which = "" if replica is None else f" (replica {replica})"
        super().__init__(f"stage {stage!r}{which} did not answer {capability!r}: {why}")


class CallTimedOut(CallError):
    """A replica did not answer a call in time. It may still carry the call out later.

    Attributes:
        timeout_s: How long the call waited, in seconds.
    """

    def __init__(self, stage: str, replica: int, capability: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        super().__init__(stage, replica, capability, f"it took longer than {timeout_s:g} s")


class TooManyCalls(CallError):
    """A replica was not sent a call, because it has not answered many earlier ones.

    Attributes:
        limit: How many calls a worker may have to answer at a time. Calls that timed out count until it answers them.
    """

    def __init__(self, stage: str, replica: int, capability: str, limit: int) -> None:
        self.limit = limit
        super().__init__(stage, replica, capability, f"it has {limit} calls to answer already")


class WorkerLost(CallError):
    """A replica has no worker at the moment, or its worker ended before it answered; or a stage has no replicas.

    Attributes:
        exit: How the worker ended; if there was none, how the replica's last worker died. None if no worker has died.
        raised: Whether it ended because its engine raised in a call: this one, or one before it.
        had_worker: Whether a worker had received the call, and ended before it answered.
    """

    def __init__(
        self,
        stage: str,
        replica: int | None,
        capability: str,
        exit: WorkerExit | None,
        *,
        raised: bool = False,
        had_worker: bool = False,
    ) -> None:
        self.exit, self.raised, self.had_worker = exit, raised, had_worker
        if had_worker:
            why = "its worker " + ("was stopped before it answered" if exit is None else f"died: {exit}")
        elif replica is None:
            why = "it has no replicas"
        else:
            why = "it has no worker" + ("" if exit is None else f"; its last death: {exit}")
        super().__init__(stage, replica, capability, why)


class StageFailed(OmniError):
    """A stage could not load, or used up its restarts, and the supervisor gave it up.

    A traceback of this error ends with the last lines of the worker's stderr, as notes; ``str`` is one sentence.

    Attributes:
        stage, replica: Which replica was given up last.
        reason: The load error's text, or what used up the restarts.
        history: Its latest deaths, oldest first: at least one. The facts of the last one are also attributes of the
            error (generation, pid, signal, exit_code, stderr_tail).
        exits: How the workers of ``history`` ended.
    """

    def __init__(self, stage: str, replica: int, reason: str, history: Sequence[Death]) -> None:
        self.stage, self.replica, self.reason, self.history = stage, replica, reason, tuple(history)
        self.exits = tuple(death.exit for death in self.history)
        last = self.history[-1]
        self.generation = last.generation
        self.pid, self.signal = last.exit.pid, last.exit.signal
        self.exit_code, self.stderr_tail = last.exit.exit_code, last.exit.stderr_tail
        super().__init__(f"stage {stage!r} (replica {replica}) failed: {reason}")
        if self.stderr_tail:
            self.add_note("The last lines of the worker's stderr:\n" + "\n".join(self.stderr_tail))


class StageAsleep(RequestError):
    """The request needs a stage that sleeps until ``wake_up``.

    Attributes:
        stage: The stage.
    """

    retryable = True

    def __init__(self, stage: str) -> None:
        self.stage = stage
        super().__init__(f"stage {stage!r} sleeps")


class StageUnavailable(RequestError):
    """The request needs a stage that has failed.

    Attributes:
        stage: The stage.
        cause: Why it failed.
        retry_after_s: Estimated seconds until the supervisor has tried the stage again and it has loaded; None if it is
            not tried again.
        retryable: Whether it is tried again.
    """

    def __init__(self, cause: StageFailed, retry_after_s: float | None = None) -> None:
        self.stage, self.cause, self.retry_after_s = cause.stage, cause, retry_after_s
        self.retryable = retry_after_s is not None
        when = "" if retry_after_s is None else f"; it is tried again and may be ready in {retry_after_s:.0f} s"
        super().__init__(f"stage {cause.stage!r} is not available: {cause.reason}{when}")


def _some(names: Sequence[str]) -> str:
    """Return names as words, the first three of many."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} others"
