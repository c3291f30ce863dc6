"""One request as the live state shows it: its outcome, its latencies, and a bar for each part of its life."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from omni_actors.config import Pipeline
from omni_actors.errors import StageCrashed
from omni_actors.orchestrator.request import Request
from omni_actors.protocol.messages import CLIENT
from omni_actors.system.timeline import Period, periods

EPOCH = time.time() - time.monotonic()
"""Unix time of the zero of CLOCK_MONOTONIC, as of the import: a clock that is set later does not move what is shown."""
MAX_BARS = 64
"""Most bars of one request. Each replay adds some; the latest ones are kept."""
STDERR_LINES = 12
"""Most lines of a worker's stderr, of each death and of each failure."""


class Bar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One part of a request's life. Times are seconds since the request was submitted.

    Attributes:
        kind: "queue" (it waits for a replica, or for the stage's engine loop), "transfer" (the first chunk is on its
            way), "step" (the engine has input), "run" (the stage has not finished, so its parts are not known yet),
            "lost" (the work of a worker that died) or "resume" (from a death until the stage's next new output).
        began, ended: When. ``ended`` is None while the part lasts.
        stage: The stage; None for the time before the request was dispatched.
    """

    kind: str
    began: float
    ended: float | None = None
    stage: str | None = None


class RequestFailure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request failed.

    Attributes:
        type: Name of the error's class.
        message: One sentence.
        stage, signal, exit_code: The stage whose worker died, and how; None if no death ended the request.
        stderr: The last lines that this worker wrote to stderr.
    """

    type: str
    message: str
    stage: str | None = None
    signal: str | None = None
    exit_code: int | None = None
    stderr: list[str] = []


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request.

    Attributes:
        name: Its identifier.
        state: "queued", "running", "streaming", "done", "failed" or "aborted".
        submitted: When, in Unix time.
        stages: The stages of its route, in order.
        bars: The parts of its life.
        replays: How often it was replayed after a death.
        total_s: Seconds from its submission to its end; None while it runs.
        ttft_s, ttfa_s: Seconds to the first text and to the first sound for the client; None if there was none, if it
            is not known yet, or if the stage died.
        underruns: Gaps that a listener of its sound has heard until now (see ``playback``).
        failure: Why it failed.
    """

    name: str
    state: str
    submitted: float
    stages: list[str]
    bars: list[Bar]
    replays: int = 0
    total_s: float | None = None
    ttft_s: float | None = None
    ttfa_s: float | None = None
    underruns: int = 0
    failure: RequestFailure | None = None


def live_request(request: Request, pipeline: Pipeline) -> LiveRequest:
    """Return the state of a request that runs, or that has ended."""
    until = time.monotonic() if request.finished is None else request.finished
    bars = [
        Bar(
            kind=kind,
            stage=stage,
            began=_rounded(period.began - request.submitted),
            ended=None
            if request.finished is None and period.ended == until
            else _rounded(period.ended - request.submitted),
        )
        for stage, kind, period in _bars(periods(request, pipeline, until))
    ]
    return LiveRequest(
        name=request.name,
        state=request.lifecycle.state.value,
        submitted=_rounded(EPOCH + request.submitted),
        stages=list(request.route.stages),
        bars=bars[-MAX_BARS:],
        replays=request.replays,
        total_s=None if request.finished is None else _rounded(request.finished - request.submitted),
        ttft_s=_first_output_s(request, pipeline, "text"),
        ttfa_s=_first_output_s(request, pipeline, "audio"),
        underruns=request.underruns,
        failure=_failure(request),
    )


def _rounded(seconds: float) -> float:
    return round(seconds, 4)


def _bars(parts: list[Period]) -> Iterator[tuple[str | None, str, Period]]:
    """Yield the stage and the kind of each bar, with its times."""
    for period in parts:
        what, _, stage = period.name.partition(" ")
        if what != "stage":
            yield stage or None, what, period
        elif period.error is not None:
            yield stage, "lost", period
        elif not period.parts:
            yield stage, "run", period
        else:
            for part in period.parts:
                yield stage, "step" if part.name == "compute" else part.name, part


def _first_output_s(request: Request, pipeline: Pipeline, modality: str) -> float | None:
    lost = {loss.crash.stage for loss in request.deaths.losses}
    times = [
        stats.first_output - request.submitted
        for stage, stats in request.stats.items()
        if stats.first_output is not None
        and pipeline.stages[stage].emits == modality
        and CLIENT in request.route.targets[stage]
        and stage not in lost
    ]
    return _rounded(min(times)) if times else None


def _failure(request: Request) -> RequestFailure | None:
    error = request.error
    if error is None:
        return None
    if not isinstance(error, StageCrashed):
        return RequestFailure(type=type(error).__name__, message=str(error))
    return RequestFailure(
        type=type(error).__name__,
        message=str(error),
        stage=error.stage,
        signal=error.signal,
        exit_code=error.exit_code,
        stderr=list(error.stderr_tail[-STDERR_LINES:]),
    )
