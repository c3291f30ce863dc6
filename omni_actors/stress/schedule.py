"""What happens in a run, as data.

Rules
1. A schedule names things by position and name, and by nothing that a run produces, so it means the same in every run.
2. An operation without a target (an abort of a request that has ended, a kill of a stage that was given up) does
   nothing. So every part of a schedule is a schedule, and shrinking may remove any operation.
3. Its text is JSON: ``["full", null, [["kill", ["second"]], ["wait", 20]]]``. Times are milliseconds.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

Load: TypeAlias = Literal["idle", "one", "full"]
"""Requests kept in flight during the run: none, one, or ``Workload.full``."""

Milliseconds: TypeAlias = Annotated[int, Meta(ge=0, le=600_000)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=64)]
OnFailure: TypeAlias = Literal["replay", "fail"]
How: TypeAlias = Literal["raise", "exit", "hang"]


class _Operation(msgspec.Struct, frozen=True, array_like=True, tag=str.lower):
    pass


# requests


class Submit(_Operation, frozen=True):
    """Submit a request of the workload, and read it at once, or with ``pace`` between outputs."""

    request: str
    on_failure: OnFailure = "replay"
    pace: Milliseconds = 0


class Abort(_Operation, frozen=True):
    """Abort the ``index``-th request that was submitted, modulo their number."""

    index: int


class Disconnect(_Operation, frozen=True):
    """Stop reading the ``index``-th request that was submitted, modulo their number."""

    index: int


class Wait(_Operation, frozen=True):
    ms: Milliseconds


class Settle(_Operation, frozen=True):
    """Wait until every stage serves again and every request submitted here has ended."""


class SwitchAdapter(_Operation, frozen=True):
    """Give the name of the workload's LoRA adapter to the ``version``-th version, modulo their number."""

    version: int


class PauseGeneration(_Operation, frozen=True):
    """Pause generation in this mode, and resume it ``ms`` later."""

    mode: Literal["abort", "wait", "keep"]
    ms: Milliseconds


class Sleep(_Operation, frozen=True):
    """Let a stage sleep at level 2, and wake it ``ms`` later."""

    stage: str
    ms: Milliseconds


class UpdateWeights(_Operation, frozen=True):
    """Give the echo engines of the workload the next version of their weights."""


ClientAction: TypeAlias = (
    Submit | Abort | Disconnect | Wait | Settle | SwitchAdapter | PauseGeneration | Sleep | UpdateWeights
)


# faults


class Kill(_Operation, frozen=True):
    """SIGKILL to a worker of each stage at once."""

    stages: tuple[str, ...]


class KillLoading(_Operation, frozen=True):
    """SIGKILL, and another one ``after`` the next worker of the stage appeared, unless it is ready before."""

    stage: str
    after: Milliseconds = 0


class Storm(_Operation, frozen=True):
    """SIGKILL to each worker of a stage as soon as it appears."""

    stage: str
    times: Count


class Freeze(_Operation, frozen=True):
    """SIGSTOP, for good."""

    stage: str


class Pause(_Operation, frozen=True):
    """SIGSTOP, and SIGCONT within half of ``step_timeout_s``. The supervisor must not kill the worker."""

    stage: str
    ms: Milliseconds


class Crash(_Operation, frozen=True):
    """A request that makes the stage's engine raise in a step, exit, or never return."""

    stage: str
    how: How
    on_failure: OnFailure = "fail"


class Starve(_Operation, frozen=True):
    """Limit the worker's address space to what it has (RLIMIT_AS), and submit a large request."""

    stage: str


class Full(_Operation, frozen=True):
    """SIGKILL, and refuse memory for the next ``times`` rings (ENOSPC)."""

    stage: str
    times: Count


class Orphan(_Operation, frozen=True):
    """SIGKILL to a parent that runs the pipeline, while its workers load or serve."""

    loading: bool = False


# faults of nodes, which are numbered: modulo their number


class KillAgent(_Operation, frozen=True):
    """SIGKILL to the agent of a node."""

    node: int


class FreezeAgent(_Operation, frozen=True):
    """SIGSTOP to the agent of a node, for good: its lease ends."""

    node: int


class PauseAgent(_Operation, frozen=True):
    """SIGSTOP to the agent of a node, and SIGCONT within half of the shortest ``step_timeout_s``. Nothing may end."""

    node: int
    ms: Milliseconds


class CutControl(_Operation, frozen=True):
    """Cut the connection between the agent of a node and the parent."""

    node: int


class CutLinks(_Operation, frozen=True):
    """Cut every link into a node."""

    node: int


NodeFault: TypeAlias = KillAgent | FreezeAgent | PauseAgent | CutControl | CutLinks
Fault: TypeAlias = Kill | KillLoading | Storm | Freeze | Pause | Crash | Starve | Full | Orphan | NodeFault
Operation: TypeAlias = ClientAction | Fault


class Schedule(msgspec.Struct, frozen=True, array_like=True):
    """intensity: None, or the ``restart.intensity`` of every stage."""

    load: Load
    intensity: int | None
    operations: tuple[Operation, ...]


def encode(schedule: Schedule) -> str:
    """One line of JSON."""
    return msgspec.json.encode(schedule).decode()


def decode(text: str) -> Schedule:
    """Read a schedule. Raises msgspec.ValidationError or msgspec.DecodeError."""
    return msgspec.json.decode(text, type=Schedule)


def stages_of(schedule: Schedule) -> set[str]:
    """Every stage that a schedule names."""
    several = {stage for operation in schedule.operations if isinstance(operation, Kill) for stage in operation.stages}
    return several | {operation.stage for operation in schedule.operations if hasattr(operation, "stage")}


def requests_of(schedule: Schedule) -> set[str]:
    """Every request that a schedule names."""
    return {operation.request for operation in schedule.operations if isinstance(operation, Submit)}
