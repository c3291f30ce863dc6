"""The orchestrator's record of one request."""

from __future__ import annotations

import collections
import copy
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import msgspec
import trio

from omni_actors.errors import RequestError, StageCrashed
from omni_actors.orchestrator.checkpoints import CheckpointMemories
from omni_actors.orchestrator.fingerprint import Fingerprint, fingerprint
from omni_actors.orchestrator.lifecycle import Event, Lifecycle
from omni_actors.orchestrator.pieces import Inputs, Piece
from omni_actors.orchestrator.replay_state import Phase, ReplayState
from omni_actors.orchestrator.request_input import RequestInput
from omni_actors.orchestrator.resumption import Resumption
from omni_actors.orchestrator.routes import Route
from omni_actors.orchestrator.routing import Affinity
from omni_actors.orchestrator.unread import Account
from omni_actors.protocol.chunks import ChunkSequence
from omni_actors.protocol.messages import StageStats

OnFailure: TypeAlias = Literal["replay", "fail"]
"""Whether a request is replayed or ends when a worker that it needs dies."""
ON_FAILURE = get_args(OnFailure)


@dataclass(eq=False, slots=True)
class Loss:
    """The death of one worker that held a request. Times are CLOCK_MONOTONIC, but for ``noticed``.

    noticed: when the death was noticed, on trio's clock.
    """

    crash: StageCrashed
    at: float
    noticed: float
    stats: StageStats | None
    """The stage's statistics, if it had finished."""
    restarted: float | None = None
    """When the stage was dispatched again; None if it was not."""
    started: float | None = None
    """When the next incarnation confirmed that."""
    resumed: float | None = None
    """When the client's side received the next new output of the stage."""


@dataclass(eq=False, slots=True)
class Deaths:
    """The deaths of workers that held one request, and how they count against it (see ``trials``)."""

    losses: list[Loss] = field(default_factory=list)
    """All of them, the earliest first."""
    to_charge: set[str] = field(default_factory=set)
    """The stages whose deaths count against ``limits.replays`` with the next replay."""
    charged: dict[str, int] = field(default_factory=dict)
    """Charged replays by stage, since the client last got a new output of a stage that had started again, or is fed by
    one. Each stage is counted by itself, because several workers may die of one cause, one noticed after the other."""
    suspected: int = 0
    """The number of deaths that the request may have caused."""
    unproven: set[str] = field(default_factory=set)
    """The stages that started again, while the client has got no new output of them or of a stage that they feed."""

    @property
    def latest(self) -> StageCrashed | None:
        """The latest death; None if there was none."""
        return self.losses[-1].crash if self.losses else None

    def add(self, crash: StageCrashed, at: float, stats: StageStats | None) -> None:
        """Record a death. at: when it was noticed, on trio's clock. stats: those of the stage, if it had finished."""
        self.losses.append(Loss(crash, time.monotonic(), at, stats))

    def charges(self) -> dict[str, int]:
        """Return the charged replays of each stage in ``to_charge``."""
        return {stage: self.charged.get(stage, 0) for stage in self.to_charge}

    def cause(self, stages: Collection[str]) -> Loss:
        """Return the death because of which ``stages`` start again.

        That is the latest death of one of them that was not started again since; without one, the latest death of all.
        A stage whose output is not needed does not start again, so its death is passed over.
        """
        theirs = [each for each in self.losses if each.restarted is None and each.crash.stage in stages]
        return (theirs or self.losses)[-1]

    def restarted(self, stages: Collection[str]) -> None:
        """Record that these stages were dispatched again."""
        for loss in self.losses:
            if loss.restarted is None and loss.crash.stage in stages:
                loss.restarted = time.monotonic()
        self.unproven.update(stages)
        for stage in self.to_charge.intersection(stages):
            self.charged[stage] = self.charged.get(stage, 0) + 1
        self.to_charge.difference_update(stages)

    def started(self, stage: str) -> None:
        """Record that the next incarnation of a stage has started."""
        latest = next((loss for loss in reversed(self.losses) if loss.crash.stage == stage), None)
        if latest is not None:  # else a living stage computes its outputs again
            latest.started = time.monotonic()

    def output_arrived(self, stage: str, upstream: Collection[str], now: float) -> None:
        """Record that a new output of a stage has arrived. upstream: the stages before it. now: CLOCK_MONOTONIC.

        If this stage or one upstream has started again, earlier replays do not count any more, unless the request may
        have caused one of the deaths. The output may have been made before the latest death; few such outputs remain.
        """
        self.unproven.difference_update((stage, *upstream))
        restarted = [loss for loss in self.losses if loss.restarted is not None]
        for loss in restarted:
            if loss.resumed is None and loss.crash.stage == stage:
                loss.resumed = now
        if not self.suspected and any(loss.crash.stage in (stage, *upstream) for loss in restarted):
            for each in (stage, *upstream):
                self.charged.pop(each, None)

    def error(self, reason: str | None, *, retryable: bool = True, stage: str | None = None) -> StageCrashed:
        """Return the error of a request that ends because of a death: the latest one in ``stage``, or else of all.

        reason: why the request is not replayed.
        """
        died = next((each.crash for each in reversed(self.losses) if each.crash.stage == stage), self.latest)
        assert died is not None, "a worker died"
        where = died.stage, died.replica, died.generation
        return StageCrashed(*where, died.exit, not_replayed=reason, retryable=retryable)


@dataclass(eq=False, slots=True)
class Request:
    """The orchestrator's record of one request."""

    name: str
    route: Route
    inputs: InitVar[Inputs]
    params: Mapping[str, msgspec.Raw]
    """The parameters for each stage, encoded with msgpack."""
    deadline_s: float
    submitted: float
    """CLOCK_MONOTONIC, comparable with the times in ``stats``."""
    on_failure: OnFailure = "replay"
    session: str | None = None
    """What the caller names the conversation that the request belongs to."""
    priority: int = 0
    """A waiting request with a lower number is dispatched first."""
    work: float = 1.0
    """How much it is to do, compared with other requests on its route."""
    arrived: float = 0.0
    """When the request reached the caller, who may have kept it before it was submitted; CLOCK_MONOTONIC."""
    expires: float = math.inf
    """The deadline, on trio's clock."""
    number: int | None = None
    """Given at dispatch; larger than all numbers before."""
    affinity: Affinity = field(init=False)
    """What relates the request to earlier ones, for the choice of its replicas."""
    dispatched: float | None = None
    """When the request was first dispatched; CLOCK_MONOTONIC."""
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    error: RequestError | None = None

    # Input

    input: RequestInput = field(init=False)
    """A request that may be replayed keeps it until it ends."""
    live_fingerprint: Fingerprint | None = None
    """The fingerprint of a request with live input; it covers what has arrived."""
    _fingerprint: str | None = None
    """``fingerprint``, once it was asked for."""

    # Output

    chunk_sequences: dict[str, ChunkSequence] = field(default_factory=dict)
    """For each stage whose output the client gets, the filter of chunks that were received before."""
    pieces: collections.deque[Piece] = field(default_factory=collections.deque)
    """Received and not read yet."""
    output_wakeup: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)
    """Woken when a piece arrives, and when the request ends."""
    pieces_in_turn: int = 0
    """Pieces that the reader has got since other tasks could run."""
    account: Account = field(default_factory=Account)
    """The bytes that the client does not have yet."""
    delivery: trio.CancelScope | None = None
    """Around a reader's wait for its connection."""
    paused_stages: set[str] = field(default_factory=set)
    """Stages whose worker was sent ``Pause`` and no ``Resume`` since."""

    # Statistics

    stats: dict[str, StageStats] = field(default_factory=dict)
    """Statistics of the stages that have finished."""
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """Input bytes that the parent sent to each replica."""
    underruns: int = 0
    """Gaps that a listener of its sound has heard (see ``playback``), as the reader of the sound reports them."""
    last_data: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """The small data of each stage's last output to the client."""
    trace: Any = None
    """The OpenTelemetry context that the request's trace continues; None: the request is not traced."""
    finished: float | None = None
    """When the request ended; CLOCK_MONOTONIC."""
    replays: int = 0
    restarted_stages: set[str] = field(default_factory=set)
    """Stages that started again in one of these replays."""

    # Replay

    replay_state: ReplayState = field(init=False)
    """What each stage has done for the request."""
    resumption: Resumption = field(default_factory=Resumption)
    """What is known of the decisions of resumable stages, and which stages wait for more."""
    checkpoints: CheckpointMemories = field(default_factory=CheckpointMemories)
    """The memory of checkpoints that workers have made."""
    deaths: Deaths = field(default_factory=Deaths)

    def __post_init__(self, inputs: Inputs) -> None:
        self.input = RequestInput(inputs, self.route.entries)
        self.affinity = Affinity(self.session, self.input)
        self.replay_state = ReplayState(self.route)

    @property
    def fingerprint(self) -> str:
        """See ``fingerprint``. A request without input, or whose input cannot be encoded, equals no other.

        It covers the live input that has arrived when it is first asked for, so that it does not change in a trial.
        """
        if self._fingerprint is None:
            self._fingerprint = self.known_fingerprint or self.name
        return self._fingerprint

    @property
    def known_fingerprint(self) -> str | None:
        """The fingerprint of the input that has arrived; None if there is none, or it cannot be encoded."""
        if self.input.segments:
            known = self.live_fingerprint if self.input.live_arrived else None
            return known.hexdigest() if known else None
        if not self.input.fixed:
            return None
        return fingerprint(self.route, self.input.fixed, self.params)

    @property
    def dispatched_number(self) -> int:
        """The number of a request that was dispatched."""
        assert self.number is not None, "it was dispatched"
        return self.number

    @property
    def takes_input(self) -> bool:
        """Whether every stage that the input enters was sent all of it that has arrived, and none starts again."""
        phases = {self.replay_state.stages[stage].phase for stage in self.route.entries}
        return self.input.all_sent and phases.isdisjoint({Phase.QUEUED, Phase.WAITING, Phase.RESTARTING})

    @property
    def order(self) -> tuple[int, float]:
        """The request's place among those that wait."""
        return self.priority, self.arrived

    @property
    def closed(self) -> bool:
        """Whether the request has ended and its client has everything, or was cut off."""
        return self.lifecycle.ended and not self.account.charged

    def raise_error(self) -> NoReturn:
        """Raise a copy of ``error``: a raised error keeps its callers' frames, and the request may be kept longer."""
        assert self.error is not None, "it has failed"
        raise copy.copy(self.error) from self.error.__cause__

    @property
    def readable(self) -> bool:
        """Whether a piece can be read now. The final piece waits for the end, when the statistics are complete."""
        if not self.pieces:
            return False
        return self.lifecycle.ended or len(self.pieces) > 1 or bool(self.replay_state.open_outputs)


EndRequest: TypeAlias = Callable[[Request, Event, RequestError | None], None]
"""Ends a request with an event of its lifecycle and, unless it completes, an error."""
