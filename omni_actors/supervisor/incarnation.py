"""One incarnation of a replica, that is one life of its worker process, as a state machine.

Rules
1. Every transition is in TRANSITIONS; no other file assigns a state.
2. An event that a state does not accept raises IllegalTransition and leaves the state unchanged.
3. What belongs to one worker process is kept here, so that nothing of a dead worker is taken for its successor's.

    STARTING ──ready──► READY
        │                 │
        ├──stop───────────┴─stop─► STOPPING
        │                             │
        ├──die────────────────────────┴─die─► DEAD
        │                             │         │
        └──end────────────────────────┴─end─────┴─end─► ENDED
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import trio

from omni_actors.errors import OmniError
from omni_actors.platform.device_locks import DeviceLocks
from omni_actors.protocol.messages import Address
from omni_actors.supervisor.calls import Calls
from omni_actors.supervisor.desired_state import Part
from omni_actors.supervisor.process import Worker
from omni_actors.transitions import TableKey, next_state
from ringbuf import Consumer


class IncarnationState(TableKey):
    STARTING = "starting"
    """The supervisor spawns the worker, and the worker loads its engine."""
    READY = "ready"
    """The worker serves requests."""
    STOPPING = "stopping"
    """The worker was asked to stop, was killed or is dying. It gets no new requests."""
    DEAD = "dead"
    """The supervisor has reported the death. The process may still free its memory, and its rings are still open."""
    ENDED = "ended"
    """The process is reaped and its rings are closed. Also the state before a replica's first incarnation."""


class IncarnationEvent(TableKey):
    READY = "ready"
    STOP = "stop"
    DIE = "die"
    """The supervisor reports the death. It does not report a stop that it was asked for (a shutdown)."""
    END = "end"


_State, _Event = IncarnationState, IncarnationEvent

TRANSITIONS: dict[IncarnationState, dict[IncarnationEvent, IncarnationState]] = {
    _State.STARTING: {
        _Event.READY: _State.READY,
        _Event.STOP: _State.STOPPING,
        _Event.DIE: _State.DEAD,
        _Event.END: _State.ENDED,
    },
    _State.READY: {_Event.STOP: _State.STOPPING},
    _State.STOPPING: {_Event.DIE: _State.DEAD, _Event.END: _State.ENDED},
    _State.DEAD: {_Event.END: _State.ENDED},
    _State.ENDED: {},
}


class Incarnation:
    """One life of a replica's worker: the supervisor's record of it."""

    def __init__(self, state: IncarnationState = IncarnationState.STARTING) -> None:
        self.state = state
        self.over = state is _State.ENDED
        """Whether its death was reported, or nothing is left of it."""
        self.scope = trio.CancelScope(shield=True)
        """Cancelling it stops the worker. It is shielded, because the supervisor decides the order of stopping."""
        self.begun, self.ready, self.ended = trio.Event(), trio.Event(), trio.Event()
        """begun: its task runs. ready: it has been READY. ended: it is ENDED."""
        if state is _State.ENDED:
            self.ended.set()
        self.device_locks = DeviceLocks()
        """What keeps other workers from loading onto its devices."""
        self.may_load = trio.Event()
        """Set when its devices are locked; the time that it has for loading begins."""
        self.worker: Worker | None = None
        self.output: Consumer | None = None
        """The client's end of its output ring, if it has one; open until its rings are closed."""
        self.ready_at = 0.0
        """When it became ready, on trio's clock."""
        self.ping = 0
        """Number of the last ping; ``pong`` is set when it is answered."""
        self.pong = trio.Event()
        self.last_pong_at = 0.0
        """When its engine loop last answered a ping, on trio's clock; 0.0 before its first answer."""
        self.gauges: Mapping[str, float] = {}
        """The engine's measurements in its last answer."""
        self.calls = Calls()
        self.parts: Sequence[Part] = ()
        """The parts of the desired state that its worker was configured with."""
        self.took_back = False
        """Whether it ends because a part of the desired state was taken back. The replica then starts again in any
        case, and that does not count against its intensity. One that was given up stays so meanwhile."""
        self.load_error: str | None = None
        self.no_place: str | None = None
        """Why no node has room for it, while it waits for a place; else None."""
        self.start_error: OmniError | None = None
        """Why no process was started for it."""
        self.failed_call = False
        """Whether the engine raised in a call, for which no request is to blame."""
        self.failed_request: int | None = None
        """The request for which the engine's call raised, if the worker could report it."""
        self.reason: str | None = None
        """Why the supervisor stops or kills the worker; None if it does not."""
        self.stopped_with_another = False
        """Whether it is stopped because another replica died."""
        self.delay_s = 0.0
        """Seconds from its death to the start of its successor."""
        self.restarts_with: tuple[Address, ...] = ()
        """The replicas that are restarted with it."""

    @property
    def running(self) -> bool:
        """Whether it starts or serves, and is not being stopped."""
        return self.state in (_State.STARTING, _State.READY)

    @property
    def ended_from_outside(self) -> bool:
        """Whether its end says nothing of its replica: another one died, or desired state was taken back."""
        return self.stopped_with_another or self.took_back

    def advance(self, event: IncarnationEvent) -> None:
        """Make a transition. Raises IllegalTransition; the state is then unchanged."""
        self.state = next_state(TRANSITIONS, self.state, event)
        self.over = self.state in (_State.DEAD, _State.ENDED)
        if self.state is _State.READY:
            self.ready.set()
        elif self.state is _State.ENDED:
            self.calls.lose(None)
            self.ended.set()

    def stop(self) -> None:
        """Accept no more work. Harmless if it is stopping already, or over."""
        if self.running:
            self.advance(_Event.STOP)
