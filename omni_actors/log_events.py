"""The failures and recoveries that are logged, one record each, with their facts as typed fields.

Rules
1. An event is logged by ``record`` alone, under the logger ``omni_actors.log_events``. Its text is the record's
   message, and the event itself is the record's attribute ``event``: ``msgspec.to_builtins`` gives its name and facts.
2. A library prints nothing by itself, so that logger has a ``NullHandler``: an event is shown once a program configures
   logging (``serve.logs`` does for the server).
3. Times are seconds. ``signal`` is a name such as "SIGKILL", and None if the worker exited; ``exit_code`` is None if a
   signal ended it. Both are None if the exit status is unknown (``WorkerExit``), and so is the pid if no process was
   started.
"""

from __future__ import annotations

import logging
import re
from contextvars import ContextVar
from typing import ClassVar

import msgspec

from omni_actors.errors import WorkerExit

log = logging.getLogger(__name__)
log.addHandler(logging.NullHandler())

REQUEST_ID: ContextVar[str | None] = ContextVar("REQUEST_ID", default=None)
"""The identifier of the HTTP request that the current task serves; None outside of a server."""


def _name(class_name: str) -> str:
    """Return the name of an event as it is logged: "worker_died" for WorkerDied."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class LogEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=_name):
    """One event. ``str`` gives its sentence."""

    level: ClassVar[int] = logging.INFO


def record(event: LogEvent) -> None:
    """Log an event."""
    log.log(event.level, "%s", event, extra={"event": event})


class WorkerEvent(LogEvent, frozen=True, kw_only=True, omit_defaults=True):
    """An event in the life of one worker.

    Attributes:
        stage, replica, generation, pid: which worker.
        node: the node on which it ran; None, and not in the log, without a cluster.
    """

    stage: str
    replica: int
    generation: int
    pid: int | None
    node: str | None = None

    @property
    def worker(self) -> str:
        return f"stage {self.stage!r} (replica {self.replica}, generation {self.generation})"


class WorkerEnd(WorkerEvent, frozen=True, kw_only=True):
    """An event after the end of a worker.

    Attributes:
        signal, exit_code: how the worker ended.
    """

    signal: str | None
    exit_code: int | None


class WorkerDied(WorkerEnd, frozen=True, kw_only=True):
    """A worker has died, or the supervisor ended it.

    Attributes:
        reason: why the supervisor ended it, or why no process was started; None if it died by itself.
        requests: how many requests it held.
    """

    level: ClassVar[int] = logging.WARNING
    reason: str | None
    requests: int

    def __str__(self) -> str:
        if self.pid is None:
            return f"{self.worker} could not be started: {self.reason}"
        exit = WorkerExit(self.pid, self.signal, self.exit_code, reason=self.reason, node=self.node)
        return f"{self.worker} died: {exit}; it held {_requests(self.requests)}"


class WorkerSuccessor(WorkerEvent, frozen=True, kw_only=True):
    """An event of a worker that follows a death: the replica's first one after it was last ready.

    Attributes:
        signal, exit_code: how the dead worker ended.
        requests: how many requests it held.
    """

    signal: str | None
    exit_code: int | None
    requests: int


class WorkerRestarted(WorkerSuccessor, frozen=True, kw_only=True):
    """A new worker of a replica was started after a death, and loads its engine.

    Attributes:
        down_s: the time since the worker before died, was killed, or was given up with its node; failed restarts are
            included.
    """

    down_s: float

    def __str__(self) -> str:
        return f"{self.worker} was restarted as pid {self.pid}, after it was down for {self.down_s:.2f} s"


class WorkerRecovered(WorkerSuccessor, frozen=True, kw_only=True):
    """A replica is ready again.

    Attributes:
        down_s: the time since the worker before died, as in ``WorkerRestarted``.
    """

    down_s: float

    def __str__(self) -> str:
        return f"{self.worker} is ready again as pid {self.pid}; it was down for {self.down_s:.2f} s"


class RequestsReplayed(WorkerEnd, frozen=True, kw_only=True):
    """Requests are replayed after the death of the worker that the event names.

    Attributes:
        requests: how many.
        resumed: how many of these continue from the journal of a resumable stage, if it has made decisions.
        replayed_after_s: the time from the death until the last of them was dispatched again.
        successors: the replicas of the stage that go on with them.
    """

    requests: int
    resumed: int
    replayed_after_s: float
    successors: tuple[int, ...] = ()

    def __str__(self) -> str:
        were = "was" if self.requests == 1 else "were"
        how = "replayed" if not self.resumed else f"replayed ({self.resumed} resumed)"
        after = f"{self.replayed_after_s:.2f} s after the death of {self.worker}"
        others = [f"{each}" for each in self.successors if each != self.replica]
        by = f", by replica {' and '.join(others)}" if others else ""
        return f"{_requests(self.requests)} {were} {how} {after}{by}"


class RequestsLost(WorkerEnd, frozen=True, kw_only=True):
    """Requests have ended because of the death of the worker that the event names.

    Attributes:
        requests: how many.
        reason: why they are not replayed, or that they were refused when they were; None: they were submitted with
            ``on_failure="fail"``.
        retryable: whether their clients may send them again.
    """

    level: ClassVar[int] = logging.ERROR
    requests: int
    reason: str | None
    retryable: bool

    def __str__(self) -> str:
        why = self.reason or 'submitted with on_failure="fail"'
        return f"{_requests(self.requests)} ended after the death of {self.worker}: {why}"


class ReplicaGivenUp(WorkerEnd, frozen=True, kw_only=True):
    """A replica is not restarted any more. The event names its last worker.

    Attributes:
        reason: why.
        retry_in_s: when it is tried again; None if it is not.
        requests: how many requests have ended because their stage has no replica left.
        down_s: the time since it was last ready.
    """

    level: ClassVar[int] = logging.ERROR
    reason: str
    retry_in_s: float | None
    requests: int
    down_s: float

    def __str__(self) -> str:
        retry = "not tried again" if self.retry_in_s is None else f"tried again in {self.retry_in_s:g} s"
        ended = f", and {_requests(self.requests)} ended with it" if self.requests else ""
        return f"{self.worker} was given up: {self.reason}; it is {retry}{ended}"


class Autoscaled(LogEvent, frozen=True, kw_only=True):
    """``autoscale`` changes the number of a stage's replicas, from ``before`` to ``after``."""

    stage: str
    before: int
    after: int

    def __str__(self) -> str:
        return f"stage {self.stage!r} is scaled by its load from {self.before} to {self.after} replicas"


class AutoscaleFailed(LogEvent, frozen=True, kw_only=True):
    """``autoscale``, or ``scale_from_zero``, could not add replicas.

    Attributes:
        replicas: how many it wanted.
        error: why it cannot have them.
        retry_in_s: when the next change of the stage may follow; 0 if the next request begins one.
    """

    level: ClassVar[int] = logging.ERROR

    stage: str
    replicas: int
    error: str
    retry_in_s: float

    def __str__(self) -> str:
        failure = f"stage {self.stage!r} cannot be scaled to {self.replicas} replicas: {self.error}"
        when = f"in {self.retry_in_s:g} s" if self.retry_in_s else "with the next request"
        return f"{failure}; the next change may follow {when}"


class NodeLeftOut(LogEvent, frozen=True, kw_only=True):
    """A system starts without a node of its cluster, which has no agent. The others can run all stages.

    Attributes:
        reason: why it has none. It is started again, and the node is used once it has one.
    """

    level: ClassVar[int] = logging.WARNING
    node: str
    reason: str

    def __str__(self) -> str:
        return f"the system starts without node {self.node!r}, which is tried again: {self.reason}"


class NodeLost(LogEvent, frozen=True, kw_only=True):
    """The parent has given up a node of its cluster that had an agent with a lease.

    Attributes:
        reason: why.
        workers: how many ran there, or were being started.
        fenced_in_s: after at most this many seconds none of them can run any more. Their deaths follow then.
    """

    level: ClassVar[int] = logging.WARNING
    node: str
    reason: str
    workers: int
    fenced_in_s: float

    def __str__(self) -> str:
        lost = f"node {self.node!r} is lost: {self.reason}"
        if not self.workers:
            return f"{lost}; it had no workers"
        workers = "its worker starts" if self.workers == 1 else f"its {self.workers} workers start"
        return f"{lost}; {workers} again once none can run there any more, in at most {self.fenced_in_s:g} s"


class DevicesAwaited(LogEvent, frozen=True, kw_only=True):
    """Opening a system waits for devices of its cluster that another system holds, which may have just been killed.

    Attributes:
        nodes: which have the devices.
        at_most_s: how long it waits; after that it uses only the devices that are free.
    """

    level: ClassVar[int] = logging.WARNING
    nodes: tuple[str, ...]
    at_most_s: float

    def __str__(self) -> str:
        return (
            f"agents of another system, or of one that has just ended, hold devices of {', '.join(self.nodes)}: "
            f"waiting for up to {self.at_most_s:g} s"
        )


class ServerListening(LogEvent, frozen=True, kw_only=True):
    """The server accepts connections, and its stages load. page: the URL of the page for browsers, if there is one."""

    url: str
    pipeline: str
    page: str | None

    def __str__(self) -> str:
        page = "" if self.page is None else f"; the page is at {self.page}"
        return f"listening on {self.url}; loading {self.pipeline}{page}"


class ServerReady(LogEvent, frozen=True, kw_only=True):
    """All stages have loaded."""

    url: str
    pipeline: str

    def __str__(self) -> str:
        return f"ready: {self.url}/v1 serves {self.pipeline!r}"


class ServerDraining(LogEvent, frozen=True, kw_only=True):
    """A signal has arrived. /health reports 503, and new requests are served for ``notice_s`` more seconds."""

    notice_s: float

    def __str__(self) -> str:
        return f"draining: new requests are served for {self.notice_s:g} s more"


class RequestServed(LogEvent, frozen=True, kw_only=True):
    """A response has ended: the line of the access log.

    Attributes:
        client: the client's address and port.
        path: as the client sent it, without its query.
        status: of the response; 499 if the client disconnected before that began, 101 of a WebSocket.
        body_bytes: the bytes of the response's body.
        seconds: from the request's head until the response, or the WebSocket, ended.
        request_id: the request's identifier, as in the header X-Request-ID.
    """

    client: str
    method: str
    path: str
    http_version: str
    status: int
    body_bytes: int
    seconds: float
    request_id: str

    def __str__(self) -> str:
        request = f'{self.client} - "{self.method} {self.path} HTTP/{self.http_version}" {self.status}'
        return f"{request} {self.body_bytes} bytes {self.seconds:.3f} s {self.request_id}"


class PipelineFailed(LogEvent, frozen=True, kw_only=True):
    """One of several pipelines cannot load. The others are served."""

    level: ClassVar[int] = logging.ERROR
    pipeline: str
    reason: str

    def __str__(self) -> str:
        return f"the pipeline {self.pipeline!r} cannot load: {self.reason}"


class ServerFailed(LogEvent, frozen=True, kw_only=True, omit_defaults=True):
    """The server ends because it cannot serve.

    Attributes:
        error: the class of the error, such as "StageFailed".
        reason: the error's sentence.
        code: the server's exit code.
        stage, replica, generation, pid, node, signal, exit_code: the worker whose death is the reason; absent if none
            is.
    """

    level: ClassVar[int] = logging.CRITICAL
    error: str
    reason: str
    code: int
    stage: str | None = None
    replica: int | None = None
    generation: int | None = None
    pid: int | None = None
    node: str | None = None
    signal: str | None = None
    exit_code: int | None = None

    def __str__(self) -> str:
        return self.reason


def _requests(count: int) -> str:
    return f"{count} request" if count == 1 else f"{count} requests"
