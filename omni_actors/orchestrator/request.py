"""A request's record."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec
import trio

from omni_actors.errors import InvalidRequest, RequestError, StageCrashed
from omni_actors.orchestrator.fingerprint import fingerprint
from omni_actors.orchestrator.lifecycle import Lifecycle
from omni_actors.orchestrator.pieces import Input, Piece
from omni_actors.orchestrator.routes import Route
from omni_actors.orchestrator.unread import Account
from omni_actors.protocol.chunks import ChunkSequence
from omni_actors.protocol.messages import Address, StageStats

OnFailure: TypeAlias = Literal["replay", "fail"]
"""What is to happen to a request when a worker that it needs dies."""


@dataclass(eq=False)
class Request:
    """The orchestrator's record of a request. ``number`` and ``placement`` are given at dispatch."""

    name: str
    route: Route
    inputs: Mapping[str, Sequence[Input]]
    """Kept until the end where the request may be replayed."""
    params: Mapping[str, msgspec.Raw]
    """The parameters for each stage, encoded with msgpack."""
    deadline_s: float
    submitted: float
    """CLOCK_MONOTONIC, comparable with the times in ``stats``."""
    on_failure: OnFailure = "replay"
    first_arrived: dict[str, float] = field(default_factory=dict)
    """When the first output of each stage reached the client's side."""
    number: int | None = None
    finished: float | None = None
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    error: RequestError | None = None
    pieces: collections.deque[Piece] = field(default_factory=collections.deque)
    account: Account = field(default_factory=Account)
    """What its client does not have yet."""
    output_wakeup: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)
    work: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Until its client has everything; see ``expires``, and ``Readers`` for connections."""
    feeding: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Around moving its input in: cancelled when its stages have ended it."""
    expires: float = math.inf
    """When its time is up, by trio's clock."""
    delivery: trio.CancelScope | None = None
    """Around a send that its reader waits for."""
    paused_stages: set[str] = field(default_factory=set)
    """Stages whose worker was told to pause it, and not to go on."""
    stats: dict[str, StageStats] = field(default_factory=dict)
    """Of the stages that have finished it."""
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """What the client's side put into the ring of each replica it feeds."""
    open_outputs: dict[str, ChunkSequence] = field(default_factory=dict)
    """The stages whose last output for the client has not come yet."""

    # where it is, and what was lost

    placement: dict[str, Address] = field(default_factory=dict)
    """Which worker holds it, by stage: those that live."""
    pending_inputs: collections.deque[str] = field(default_factory=collections.deque)
    """Stages whose part of the input is to be sent, from its first piece on."""
    input_wakeup: trio.lowlevel.ParkingLot = field(default_factory=trio.lowlevel.ParkingLot)
    """Woken when there are such."""
    stages_to_restart: tuple[str, ...] = ()
    """Stages that have to start again and wait for replicas that are ready."""
    starting: set[str] = field(default_factory=set)
    """Stages that were told to start again and have not said so yet: nothing is sent to them."""
    repeated: set[str] = field(default_factory=set)
    """Of those in ``placement``, the ones that started again."""
    fed: set[tuple[str, str]] = field(default_factory=set)
    """(stage, source): the stage's worker lives and has all that the other one gives."""
    let_go: dict[str, str] = field(default_factory=dict)
    """Stages that can no longer send their outputs again, and why."""
    broken: dict[str, str] = field(default_factory=dict)
    """Of those in ``placement``, the ones that could not do their part in a replay, and why."""
    replays: int = 0
    crash: StageCrashed | None = None
    """The latest death of a worker that held it."""

    # whether it ends its workers (see ``trials``)

    charged: bool = False
    """Whether the death that it is to be replayed for uses up one of its replays."""
    charged_replays: int = 0
    suspected: int = 0
    """Deaths that it may have caused."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """See ``fingerprint``. A request whose input is gone, or cannot be encoded, is equal to no other."""
        with suppress(InvalidRequest):
            if self.inputs:
                return fingerprint(self.route, self.inputs, self.params)
        return self.name

    def feed(self, *stages: str) -> None:
        self.pending_inputs.extend(stages)
        self.input_wakeup.unpark_all()

    @property
    def over(self) -> bool:
        """Whether its stages have ended it, and its client has everything or was cut off."""
        return self.lifecycle.ended and not self.account.charged

    @property
    def readable(self) -> bool:
        """Whether a piece can be read now. The final one waits for the stages to finish: statistics are whole then."""
        if self.open_outputs or len(self.pieces) > 1:
            return bool(self.pieces)
        return bool(self.pieces) and self.lifecycle.ended
