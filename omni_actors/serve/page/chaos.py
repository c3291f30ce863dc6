"""Faults that a viewer of the page injects, to see how a request goes on without a worker.

Rules
1. The routes exist with ``--chaos`` only, which needs a server that listens on a loopback address.
2. A request must name a loopback host, so that no web page reaches the routes by DNS rebinding. The checks of the key
   and of the origin apply as to every route.
3. A signal goes to a pidfd, which is opened while the worker is not reaped. So it never reaches another process. A
   worker on another node is refused: a process of this machine may have the same pid.
4. A starved worker runs a tenth of the time, for ``STARVE_S`` at most. It runs again when the request ends, however it
   ends. One worker is starved once at a time.
5. A frozen worker is not starved, and a starved one is not frozen: the signals of one fault would end the other.
6. The server knows which workers are frozen: a page may be reloaded, and there may be several.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal, get_args

import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from omni_actors.serve.access.origins import host_name
from omni_actors.serve.api.responses import JSONResponse
from omni_actors.serve.http.errors import HTTPError, bad_request
from omni_actors.serve.pipelines import Pipelines
from omni_actors.serve.settings import is_loopback
from omni_actors.system import OmniSystem
from ringbuf.syscalls import pidfd_open, pidfd_send_signal

PATH = "/v1/chaos"
STARVE_S = 5.0
PERIOD_S, SHARE = 0.1, 0.1
"""A starved worker runs for ``SHARE`` of each period."""

Fault = Literal["kill", "freeze", "thaw", "starve"]
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "thaw": signal.SIGCONT}


def routes() -> list[Route]:
    """Return the routes of the faults: POST injects one, GET names the frozen workers. The query has the arguments."""
    frozen = dict[tuple[str, str], int]()  # the pid, by pipeline and "stage.replica"; another worker has another pid
    starved = set[int]()

    async def show(request: Request) -> Response:
        """Return the pid of each worker of ``pipeline`` (the first one) that was frozen, by "stage.replica"."""
        _require_loopback(request)
        name = _system(request).pipeline.name
        return JSONResponse({"frozen": {worker: pid for (pipeline, worker), pid in frozen.items() if pipeline == name}})

    async def chaos(request: Request) -> Response:
        """Inject ``fault`` into the worker of ``stage`` and ``replica`` (0) of ``pipeline`` (the first one)."""
        _require_loopback(request)
        query = request.query_params
        fault = query.get("fault")
        if fault not in get_args(Fault):
            raise bad_request(f"fault: one of {', '.join(get_args(Fault))} was expected", "fault")
        system, stage, replica = _system(request), query.get("stage", ""), query.get("replica", "0")
        pid, worker = _pid(system, stage, replica), (system.pipeline.name, f"{stage}.{replica}")
        with _opened(pid) as pidfd:
            if fault in ("freeze", "starve") and pid in starved:
                raise HTTPError(409, f"the worker with pid {pid} is starved now", code="starved")
            if fault == "starve" and frozen.get(worker) == pid:
                raise HTTPError(409, f"the worker with pid {pid} is frozen", code="frozen")
            if fault in SIGNALS:
                _send(pidfd, SIGNALS[fault])
                if fault == "freeze":
                    frozen[worker] = pid
                else:
                    frozen.pop(worker, None)
            else:
                starved.add(pid)
                try:
                    await _starve(pidfd)
                finally:
                    starved.discard(pid)
        return JSONResponse({"fault": fault, "pid": pid})

    return [Route(PATH, chaos, methods=["POST"]), Route(PATH, show, methods=["GET"])]


def _require_loopback(request: Request) -> None:
    """Raises HTTPError 421 if the request does not name a loopback host."""
    name = host_name(request.headers.get("host", "").lower())
    if name is None or not is_loopback(name):
        raise HTTPError(421, "faults are injected through a loopback host only", code="unknown_host")


def _system(request: Request) -> OmniSystem:
    """Return the system of the pipeline that the query names; by default the first. Raises HTTPError."""
    pipelines: Pipelines = request.app.state.pipelines
    return pipelines.named(request.query_params.get("pipeline", pipelines.first.pipeline.name))


def _pid(system: OmniSystem, stage: str, replica: str) -> int:
    """Return the process of a worker. Raises HTTPError."""
    health = system.health()
    replicas = health.stages.get(stage)
    if replicas is None:
        raise bad_request(f"stage: one of {', '.join(system.pipeline.stages)} was expected", "stage")
    found = next((each for each in replicas if str(each.replica) == replica), None)
    if found is None:
        raise bad_request("replica: the stage has no replica of this number", "replica")
    if not found.pid:
        raise HTTPError(409, "the replica has no worker now", code="no_worker")
    if found.node is not None and not health.nodes[found.node].parent:
        message = f"the worker runs on the node {found.node!r}; faults reach the server's own node only"
        raise HTTPError(409, message, code="on_another_node")
    return found.pid


@contextmanager
def _opened(pid: int) -> Iterator[int]:
    """Open a pidfd for the block. Raises HTTPError 409 if the process has ended."""
    try:
        pidfd = pidfd_open(pid)
    except ProcessLookupError as error:
        raise HTTPError(409, "the worker has just ended", code="no_worker") from error
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _send(pidfd: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended
        pidfd_send_signal(pidfd, number)


async def _starve(pidfd: int) -> None:
    """Let a process run for ``SHARE`` of the time, for ``STARVE_S``. It runs again after a cancellation, too."""
    try:
        with trio.move_on_after(STARVE_S):
            while True:
                _send(pidfd, signal.SIGSTOP)
                await trio.sleep(PERIOD_S * (1 - SHARE))
                _send(pidfd, signal.SIGCONT)
                await trio.sleep(PERIOD_S * SHARE)
    finally:
        _send(pidfd, signal.SIGCONT)
