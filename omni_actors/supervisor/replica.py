"""A replica of a stage over all its incarnations: what the supervisor keeps and the layers above read.

Rule: only the supervisor writes here. ``post`` and ``kill`` are for every layer.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from omni_actors.config import Restart, Stage
from omni_actors.errors import Death, StageFailed, WorkerExit
from omni_actors.protocol.mailbox import MailboxFull
from omni_actors.protocol.messages import Address, ControlMessage, WorkerSpec
from omni_actors.supervisor.calls import PendingCall
from omni_actors.supervisor.incarnation import Incarnation, IncarnationState
from omni_actors.supervisor.process import Worker

HISTORY = 16
"""How many deaths of a replica are kept."""


class ReplicaState(enum.Enum):
    """What a replica is doing, as health and metrics show it.

    loading: its first worker starts. ready: it serves. restarting: it is down, and a new worker follows. asleep: its
    worker has ended, until it is woken. draining: it finishes its requests, and is removed then. failed: it was given
    up.
    """

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    ASLEEP = "asleep"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(eq=False)
class Outage:
    """The time from the end of a ready worker, or of the first one, until the replica is ready again.

    It begins when that worker is killed, or given up with its node, else when it has died. began_at: on trio's clock.
    exit: how that worker ended; None while it is not dead. requests: how many requests were held by it.
    """

    began_at: float
    exit: WorkerExit | None = None
    requests: int = 0


@dataclass(eq=False)
class Replica:
    """The supervisor's record of a replica over all its incarnations.

    spec: what its workers run. stage: its configuration, which bounds loading, steps, shutdown and restarts.
    """

    spec: WorkerSpec
    stage: Stage
    state: ReplicaState = ReplicaState.LOADING
    asleep: bool = False
    """Whether it is to have no worker until it is woken."""
    leaving: bool = False
    """Whether it is being removed: it gets no new request and no new worker."""
    added: bool = False
    """Whether it was added to a running system: if it cannot load, the caller of that gets the error."""
    earlier: int = 0
    """The last generation of an earlier replica with this address, which was removed."""
    generation: int = 0
    devices: tuple[str, ...] = ()
    """The devices of its last worker, as in CUDA_VISIBLE_DEVICES; on another node, places among those of its agent."""
    note: str = "starting"
    """What it is doing, or how its last worker ended, in words."""
    load_s: float | None = None
    """Seconds that its last ready worker took to load."""
    failure: StageFailed | None = None
    """Why it was given up; None if it was not, or has been ready or woken since."""
    retry_at: float | None = None
    """When a replica that was given up is tried again, on trio's clock; None if it was not given up, or for good."""
    outage: Outage | None = None
    """Since the end of a worker that it has not recovered from; None if there is none."""
    failed_tries: int = 0
    """Failed tries since it was given up."""
    recent_restarts: tuple[float, ...] = ()
    """When it was restarted, for the restarts that count against its intensity, on trio's clock."""
    history: collections.deque[Death] = field(default_factory=lambda: collections.deque(maxlen=HISTORY))
    incarnation: Incarnation = field(default_factory=lambda: Incarnation(IncarnationState.ENDED))
    address: Address = field(init=False)

    def __post_init__(self) -> None:
        self.address = self.spec.address

    @property
    def policy(self) -> Restart:
        return self.stage.restart

    @property
    def restarts(self) -> int:
        return max(0, self.generation - self.earlier - 1)

    def is_kept_down(self, ended: Incarnation) -> bool:
        """Whether no worker may be started as the successor of ``ended``.

        The replica sleeps, is being removed, or already has a newer incarnation.
        """
        return self.asleep or self.leaving or self.incarnation is not ended

    @property
    def accepts_work(self) -> bool:
        """Whether requests may be dispatched to the replica now."""
        return self.incarnation.state is IncarnationState.READY and not self.leaving

    @property
    def given_up(self) -> bool:
        """Whether it was given up for good: it has no worker, and gets none."""
        return self.state is ReplicaState.FAILED and self.retry_at is None

    @property
    def shown_state(self) -> ReplicaState:
        """Its state, as health and the live state show it: one that is being removed drains, also without a worker."""
        return ReplicaState.DRAINING if self.leaving and self.state is not ReplicaState.FAILED else self.state

    @property
    def can_stay(self) -> bool:
        """Whether it is being removed, and its worker could still serve."""
        return self.leaving and self.incarnation.state is IncarnationState.READY

    @property
    def worker(self) -> Worker | None:
        """The current worker, unless it is dead."""
        return None if self.incarnation.over else self.incarnation.worker

    @property
    def gauges(self) -> Mapping[str, float]:
        """The measurements of the current worker's engine in its last answer to a ping."""
        return {} if self.incarnation.over else self.incarnation.gauges

    @property
    def congested(self) -> bool:
        """Whether the worker does not keep up with its control messages."""
        worker = self.worker
        return worker is not None and worker.mailbox.congested

    def post(self, message: ControlMessage, fds: Sequence[int] = (), *, wakes: bool = True) -> None:
        """Send a control message to the worker, if there is one. wakes: see ``Mailbox.post``.

        A worker that has stopped reading is killed: it is restarted, and its requests end with the cause.
        """
        if (worker := self.worker) is not None:
            try:
                worker.mailbox.post(message, fds, wakes=wakes)
            except MailboxFull as error:
                self.kill(str(error))

    def call(
        self, capability: str, arguments: Mapping[str, Any], timeout_s: float, *, changes_state: bool = False
    ) -> PendingCall:
        """Post a call to the worker, in order with all other messages. The caller waits for the reply.

        A worker that loads answers when it is ready. arguments: must be small enough for a control message.
        changes_state: whether the call is a change of the stage's desired state.
        """
        pending = PendingCall(self.address, self.generation, capability, timeout_s, changes_state=changes_state)
        if self.worker is None:
            pending.lose(self.history[-1].exit if self.history else None)
        elif (message := self.incarnation.calls.begin(pending, arguments)) is not None:
            self.post(message)
        return pending

    def kill(self, reason: str, *, took_back: bool = False) -> None:
        """Kill the current worker, for this reason. Harmless if it is dead already. took_back: see ``Incarnation``.

        The replica is down from now on. Its worker may be dead much later, if its node is lost.
        """
        incarnation = self.incarnation
        if incarnation.over:
            return
        incarnation.took_back |= took_back
        incarnation.reason = incarnation.reason or reason
        incarnation.stop()
        self.outage = self.outage or Outage(trio.current_time())
        if self.state is ReplicaState.READY:
            self.state, self.note = ReplicaState.RESTARTING, reason
        if incarnation.worker is not None:
            incarnation.worker.kill()
        else:
            incarnation.scope.cancel()  # the worker is still being spawned
