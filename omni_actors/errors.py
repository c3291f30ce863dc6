"""Every error that a user of omni_actors can meet, as one tree. Each carries the facts, not only a sentence.

OmniError
├── ConfigError           a pipeline file, override or model that cannot work; raised before any process starts
├── RequestError          this request did not complete
│   ├── InvalidRequest    it never can: the caller must change it (HTTP 400)
│   ├── Overloaded        not now: the system is full (HTTP 429)
│   ├── DeadlineExceeded  its time was up
│   ├── SlowConsumer      its client did not read its outputs in time
│   ├── Aborted           somebody called ``abort``
│   ├── StageCrashed      a worker that held it died
│   ├── Quarantined       the same request has ended a stage's workers a short time ago
│   └── StageUnavailable  a stage on its route has failed
└── StageFailed           a stage's restarts ran out, or it could not load: the supervisor gave up on it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class OmniError(Exception):
    """Root of the tree."""


class ConfigError(OmniError):
    """A configuration that cannot work.

    file: where it was read ("-" for keyword or command-line overrides). path: the place in the document, dotted.
    found: the offending value. accepted: what would do, in words.
    """

    def __init__(self, file: str, path: str, found: Any, accepted: str) -> None:
        self.file, self.path, self.found, self.accepted = file, path, found, accepted
        super().__init__(f"{file}: {path}: found {found!r}; accepted: {accepted}")


class RequestError(OmniError):
    """A request ended without completing. ``retryable``: sending the same request again makes sense."""

    retryable = False


class InvalidRequest(RequestError):
    """The request itself is at fault. param: the field, as the user knows it, or None."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        self.message, self.param, self.code = message, param, code
        super().__init__(message)


class Overloaded(RequestError):
    """Admission refused: ``limit`` requests are in the system already, or ``stage`` does not keep up with its mail."""

    retryable = True

    def __init__(self, limit: int, retry_after_s: float, stage: str | None = None) -> None:
        self.limit, self.retry_after_s, self.stage = limit, retry_after_s, stage
        why = f"{limit} requests are in flight already"
        if stage is not None:
            why = f"stage {stage!r} does not keep up with its control messages"
        super().__init__(f"{why}; try again in {retry_after_s:.0f} s")


class DeadlineExceeded(RequestError):
    retryable = True

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        super().__init__(f"the request did not finish within {deadline_s:g} s")


class SlowConsumer(RequestError):
    """The client did not read the outputs of its request, which was ended to bound memory.

    limit: the field of ``limits`` that ended it, and ``bound``, its value. unread_bytes: what the client had not got.
    read_bytes_s: what it read per second, in the ``waited_s`` seconds that the request had waited for it.
    """

    def __init__(
        self, limit: str, bound: float, unread_bytes: int = 0, read_bytes_s: float = 0.0, waited_s: float = 0.0
    ) -> None:
        self.limit, self.bound, self.unread_bytes = limit, bound, unread_bytes
        self.read_bytes_s, self.waited_s = read_bytes_s, waited_s
        super().__init__(
            f"the outputs of this request were not read: {unread_bytes} bytes are waiting, and {read_bytes_s:.0f} bytes"
            f" per second were read in {waited_s:.1f} s (limits.{limit} is {bound:g})"
        )


class Aborted(RequestError):
    """reason: why, where it was not the caller's own wish."""

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason
        super().__init__("the request was aborted" + (f": {reason}" if reason else ""))


@dataclass(frozen=True)
class WorkerExit:
    """How a worker ended. Exactly one of ``signal`` (a name such as SIGKILL) and ``exit_code`` is not None.

    reason: why the supervisor ended it ("no progress for 30 s (step_timeout_s)"); None where it died by itself.
    """

    pid: int
    signal: str | None
    exit_code: int | None
    stderr_tail: tuple[str, ...] = ()
    reason: str | None = None

    def __str__(self) -> str:
        how = f"was killed by {self.signal}" if self.signal else f"exited with code {self.exit_code}"
        return f"pid {self.pid} {how}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Death:
    """The end of one incarnation of a worker. at: Unix time, s."""

    generation: int
    at: float
    exit: WorkerExit


class StageCrashed(RequestError):
    """A worker that held the request died. The stage is being restarted.

    not_replayed: why the system did not do that by itself; None where it was asked not to. retryable: False when the
    request has used up its replays, so that sending it again would end more workers.
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
        self.pid, self.signal, self.exit_code, self.stderr_tail = (
            exit.pid,
            exit.signal,
            exit.exit_code,
            exit.stderr_tail,
        )
        self.not_replayed = not_replayed
        message = f"stage {stage!r} (replica {replica}, generation {generation}) died: {exit}"
        super().__init__(message + (f"; the request was not replayed: {not_replayed}" if not_replayed else ""))


class Quarantined(RequestError):
    """A request with the same input and parameters ended workers of ``stage`` until its replays were used up.

    ends_in_s: seconds until such requests are accepted again.
    """

    def __init__(self, stage: str, ends_in_s: float) -> None:
        self.stage, self.ends_in_s = stage, ends_in_s
        super().__init__(
            f"the same request has ended the workers of stage {stage!r}; it is refused for the next {ends_in_s:.0f} s"
        )


class StageFailed(OmniError):
    """The supervisor gave up on a stage. reason: the load error's own text, or what used up the restarts.

    history: its latest deaths, oldest first. generation, pid, signal, exit_code, stderr_tail: of the last of them.
    """

    def __init__(self, stage: str, replica: int, reason: str, history: Sequence[Death]) -> None:
        self.stage, self.replica, self.reason, self.history = stage, replica, reason, tuple(history)
        self.exits = tuple(death.exit for death in self.history)
        last = self.exits[-1] if self.exits else None
        self.generation = self.history[-1].generation if self.history else 0
        self.pid = last.pid if last else None
        self.signal = last.signal if last else None
        self.exit_code = last.exit_code if last else None
        self.stderr_tail = last.stderr_tail if last else ()
        tail = "\n".join(self.stderr_tail)
        super().__init__(f"stage {stage!r} (replica {replica}) failed: {reason}" + (f"\n{tail}" if tail else ""))


class StageUnavailable(RequestError):
    """The request needs a stage that has failed; ``cause`` says why.

    retry_after_s: seconds until the supervisor tries the stage again and it has loaded, as far as known; None where it
    is not tried again.
    """

    def __init__(self, cause: StageFailed, retry_after_s: float | None = None) -> None:
        self.stage, self.cause, self.retry_after_s = cause.stage, cause, retry_after_s
        when = "" if retry_after_s is None else f"; it is tried again, and may be back in {retry_after_s:.0f} s"
        super().__init__(f"stage {cause.stage!r} is not available: {cause.reason}{when}")
