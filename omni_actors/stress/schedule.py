"""What happens in a run, as data.

Rules
1. A schedule names everything by position and name, nothing by what came out: it means the same in every run.
2. An operation that finds nothing to do (an abort of a request that has ended, a kill of a stage that is given up) does
   nothing. So every part of a schedule is a schedule, and shrinking may leave out whatever it likes.
3. Its text is JSON: ``["full", null, [["kill", ["second"]], ["wait", 20]]]``. Times are milliseconds.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

Load: TypeAlias = Literal["idle", "one", "full"]
"""Requests kept in flight all the while: none, one, as many as the workload says."""

Milliseconds: TypeAlias = Annotated[int, Meta(ge=0, le=600_000)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=64)]
OnFailure: TypeAlias = Literal["replay", "fail"]
How: TypeAlias = Literal["raise", "exit", "hang"]


class _Operation(msgspec.Struct, frozen=True, array_like=True, tag=str.lower):
    pass


# requests


class Submit(_Operation, frozen=True):
    """A request of the workload, read as it comes, or with ``pace`` between the outputs that it reads."""

    request: str
    on_failure: OnFailure = "replay"
    pace: Milliseconds = 0


class Abort(_Operation, frozen=True):
    """Of the request submitted ``index``-th, counted around."""

    index: int


class Disconnect(_Operation, frozen=True):
    """Drop what reads the request submitted ``index``-th, counted around."""

    index: int


class Wait(_Operation, frozen=True):
    ms: Milliseconds


class Settle(_Operation, frozen=True):
    """Wait until every stage serves again and every request submitted here has ended."""


# faults


class Kill(_Operation, frozen=True):
    """SIGKILL of a worker of each stage at once."""

    stages: tuple[str, ...]


class KillLoading(_Operation, frozen=True):
    """SIGKILL, and again ``after`` the next worker of the stage appeared, if it is not ready before."""

    stage: str
    after: Milliseconds = 0


class Storm(_Operation, frozen=True):
    """SIGKILL of each worker of a stage as soon as it is there."""

    stage: str
    times: Count


class Freeze(_Operation, frozen=True):
    """SIGSTOP, for good."""

    stage: str


class Pause(_Operation, frozen=True):
    """SIGSTOP, and SIGCONT within half of what the stage's ``step_timeout_s`` allows: nobody is to be killed for it."""

    stage: str
    ms: Milliseconds


class Crash(_Operation, frozen=True):
    """A request that makes the stage's engine raise in a step, exit, or never return."""

    stage: str
    how: How
    on_failure: OnFailure = "fail"


class Starve(_Operation, frozen=True):
    """The worker's address space is bounded at what it has (RLIMIT_AS), and a large request comes."""

    stage: str


class Full(_Operation, frozen=True):
    """SIGKILL, and the memory of the next ``times`` rings is refused (ENOSPC, where rings are made)."""

    stage: str
    times: Count


class Orphan(_Operation, frozen=True):
    """SIGKILL of a process that runs the pipeline, its workers loading or serving."""

    loading: bool = False


Operation: TypeAlias = (
    Submit
    | Abort
    | Disconnect
    | Wait
    | Settle
    | Kill
    | KillLoading
    | Storm
    | Freeze
    | Pause
    | Crash
    | Starve
    | Full
    | Orphan
)


class Schedule(msgspec.Struct, frozen=True, array_like=True):
    """lives: None, or the restarts of a stage within a minute (its ``intensity``) before it is given up."""

    load: Load
    intensity: int | None
    operations: tuple[Operation, ...]


def encode(schedule: Schedule) -> str:
    """One line of JSON."""
    return msgspec.json.encode(schedule).decode()


def decode(text: str) -> Schedule:
    """Raises msgspec.ValidationError or msgspec.DecodeError on anything else than a schedule."""
    return msgspec.json.decode(text, type=Schedule)


def stages_of(schedule: Schedule) -> set[str]:
    """Every stage that it names."""
    named: set[str] = set()
    for operation in schedule.operations:
        match operation:
            case Kill(stages):
                named.update(stages)
            case KillLoading() | Storm() | Freeze() | Pause() | Crash() | Starve() | Full():
                named.add(operation.stage)
            case _:
                pass
    return named


def requests_of(schedule: Schedule) -> set[str]:
    """Every request that it names."""
    return {operation.request for operation in schedule.operations if isinstance(operation, Submit)}
