"""A replica of a stage and the life of its worker, as data: what the supervisor keeps, and what the layers above read.

Rules
1. Only the supervisor writes here. ``post`` and ``kill`` are for all.
2. What belongs to one worker is in its ``Incarnation``, so that nothing of a dead one is taken for its successor's.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from omni_actors.errors import Death, StageFailed
from omni_actors.protocol.mailbox import MailboxFull
from omni_actors.protocol.messages import Address, ControlMessage
from omni_actors.supervisor.process import Worker
from omni_actors.supervisor.restart import RecentRestarts, RestartPolicy

HISTORY = 16
"""Deaths of a replica that are kept."""


class ReplicaState(enum.Enum):
    """loading: first start. ready: serving. restarting: down, coming back. failed: given up."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"


@dataclass(frozen=True)
class Blueprint:
    """Everything needed to start one replica of a stage. inputs: the stages that feed it."""

    address: Address
    inputs: tuple[str, ...]
    factory: str
    model: str | None
    options: dict[str, Any]
    threads: int
    nice: int
    device: str
    spins: bool
    restart: RestartPolicy
    load_timeout_s: float
    step_timeout_s: float
    shutdown_timeout_s: float


class Incarnation:
    """One life of a replica's worker."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope(shield=True)
        """Cancelled, the worker is stopped. Nothing else stops it: the order of stopping is the supervisor's."""
        self.begun, self.ready, self.ended = trio.Event(), trio.Event(), trio.Event()
        """ended: nothing is left of it."""
        self.ready_at = 0.0
        """When it became ready, on trio's clock."""
        self.failed_request: int | None = None
        """The request for which the engine's call raised, where the worker could tell."""
        self.ping = 0
        self.pong = trio.Event()
        """Whether the last ping was answered."""
        self.last_pong_at = 0.0
        """When its engine loop answered a ping the last time, on trio's clock."""
        self.gauges: Mapping[str, float] = {}
        """What its engine measured of itself when it last answered."""
        self.worker: Worker | None = None
        self.leaving = False
        """Whether it is dead or being stopped: it takes no new work, and somebody brings its successor."""
        self.dead = False
        """Whether its death was told; its edges may still stand."""
        self.load_error: str | None = None
        self.reason: str | None = None
        """Why the supervisor ends it, where it does."""
        self.went_with_another = False
        self.delay_s = 0.0
        """Before its successor starts."""
        self.takes_down: list[Replica] = []
        """Who is restarted with it."""


def _before_the_first() -> Incarnation:
    life = Incarnation()
    life.leaving = True
    life.ended.set()
    return life


@dataclass(eq=False)
class Replica:
    """A replica over all its incarnations, as the supervisor knows it."""

    blueprint: Blueprint
    state: ReplicaState = ReplicaState.LOADING
    generation: int = 0
    note: str = "starting"
    load_s: float | None = None
    failure: StageFailed | None = None
    retry_at: float | None = None
    """When a replica that was given up is tried again, on trio's clock; None: it was not given up, or for good."""
    failed_tries: int = 0
    """Tries since it was given up."""
    history: collections.deque[Death] = field(default_factory=lambda: collections.deque(maxlen=HISTORY))
    life: Incarnation = field(default_factory=_before_the_first)

    def __post_init__(self) -> None:
        self.recent = RecentRestarts(self.blueprint.restart.period_s)

    @property
    def address(self) -> Address:
        return self.blueprint.address

    @property
    def restarts(self) -> int:
        return max(0, self.generation - 1)

    @property
    def worker(self) -> Worker | None:
        """The one that lives, if one does."""
        return None if self.life.dead else self.life.worker

    @property
    def accepts_work(self) -> bool:
        """Whether requests may be dispatched to the replica now."""
        return self.state is ReplicaState.READY and not self.life.leaving

    @property
    def last_pong_at(self) -> float:
        """When the current worker last answered a ping, on trio's clock; 0.0 before its first answer."""
        return self.life.last_pong_at

    @property
    def gauges(self) -> Mapping[str, float]:
        """What the engine of the worker that lives measured of itself, when it last answered a ping."""
        return {} if self.life.dead else self.life.gauges

    @property
    def congested(self) -> bool:
        """Whether its worker does not keep up with its mail."""
        worker = self.worker
        return worker is not None and worker.mailbox.congested

    def post(self, message: ControlMessage, fds: Sequence[int] = ()) -> None:
        """Tell the worker. One that has stopped reading is killed: it comes back, its requests fail with the cause."""
        if (worker := self.worker) is not None:
            try:
                worker.mailbox.post(message, fds)
            except MailboxFull as error:
                self.kill(str(error))

    def kill(self, reason: str) -> None:
        """End the worker now, for this reason. Harmless when it is dead already."""
        if not self.life.dead:
            self.life.leaving, self.life.reason = True, self.life.reason or reason
            if self.life.worker is not None:
                self.life.worker.kill()
            else:
                self.life.scope.cancel()  # it is still being spawned
