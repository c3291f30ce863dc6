"""Calls to workers: the parent's side of ``Call`` and ``Answer``.

Rules
1. Each call to each replica ends with one ``Reply``: a value, a refusal of the engine, or a ``CallError``.
2. A worker has at most ``MAX_CALLS`` calls to answer, and as many changes of its desired state; its mailbox has room
   for them beside its requests' messages. A call that timed out counts until the worker answers it or dies.
3. Every worker of a stage, also one that starts later, gets the stage's desired state with its first message. A change
   of that state is posted to every worker that runs, or to none. Control messages arrive in order, so a request that is
   dispatched after a change meets an engine that has it.
4. A part of the desired state that no worker has carried out, and at which the engines of workers that load raise, is
   taken back: it would end every later worker, too. A worker that has yet to answer, or to load, decides it first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import trio

from omni_actors.errors import (
    CallTimedOut,
    InvalidRequest,
    OmniError,
    TooManyCalls,
    Unsupported,
    WorkerExit,
    WorkerLost,
)
from omni_actors.protocol.messages import Address, Answer, Call, Desired

MAX_CALLS = 16
CALL_MESSAGES = 2 * MAX_CALLS
"""Most messages about calls that a worker has not answered."""
LARGEST_ARGUMENTS = 64 * 1024
"""Most bytes of a call's arguments, encoded: they travel in one control message."""
LARGEST_DESIRED = 64 * 1024
"""Most bytes of one stage's desired state, encoded: it travels in ``Configure``."""


@dataclass(frozen=True)
class Reply:
    """How a call ended at one replica.

    Attributes:
        value: What the engine returned; None if there is an error.
        error: Why there is no value: ``Unsupported``, ``InvalidRequest`` (the engine refused the arguments) or a
            ``CallError``.
    """

    value: Any = None
    error: OmniError | None = None

    def result(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value


class PendingCall:
    """A call to one replica, until its caller has the reply. changes_state: whether it changes the desired state."""

    def __init__(self, address: Address, capability: str, timeout_s: float, *, changes_state: bool = False) -> None:
        self.address, self.capability, self._timeout_s = address, capability, timeout_s
        self.changes_state = changes_state
        self.deadline = trio.current_time() + timeout_s
        """Until when the caller waits, on trio's clock."""
        self.on_refusal: Callable[[], None] = lambda: None
        """Called when the engine refuses the call, also after the deadline."""
        self._reply: Reply | None = None
        self._ended = trio.Event()

    @property
    def accepted(self) -> bool:
        """Whether the worker has answered with a value."""
        return self._reply is not None and self._reply.error is None

    @property
    def unanswered(self) -> bool:
        """Whether the worker lives and has not answered, also after the deadline."""
        return self._reply is None

    def end(self, reply: Reply) -> None:
        """Give the call its reply."""
        self._reply = reply
        self._ended.set()

    def lose(self, exit: WorkerExit | None, *, raised: bool = False) -> None:
        """End the call: the worker will not answer.

        exit: how it ended, or the one before it; None if none has. raised: whether its engine raised in a call.
        """
        stage, replica = self.address.stage, self.address.replica
        self.end(Reply(error=WorkerLost(stage, replica, self.capability, exit, raised=raised)))

    async def wait(self) -> Reply:
        """Wait for the reply until the call's timeout. Cancelling the wait does not cancel the call."""
        with trio.move_on_at(self.deadline):
            await self._ended.wait()
        if self._reply is not None:
            return self._reply
        stage, replica = self.address.stage, self.address.replica
        return Reply(error=CallTimedOut(stage, replica, self.capability, self._timeout_s))


class Calls:
    """The calls that one worker has not answered yet."""

    def __init__(self) -> None:
        self._pending: dict[int, PendingCall] = {}
        self._numbers = itertools.count(1)

    def remaining_s(self) -> float:
        """Return for how many more seconds a caller waits for an answer of this worker; 0.0 if none does."""
        latest = max((call.deadline for call in self._pending.values()), default=0.0)
        return max(0.0, latest - trio.current_time())

    def has_room(self, *, changes_state: bool) -> bool:
        """Whether another call may be posted, or another change of the desired state."""
        return sum(each.changes_state is changes_state for each in self._pending.values()) < MAX_CALLS

    def begin(self, pending: PendingCall, arguments: Mapping[str, Any]) -> Call | None:
        """Return the message to post. None: the worker has too many calls to answer, and the call has ended."""
        if not self.has_room(changes_state=pending.changes_state):
            stage, replica = pending.address.stage, pending.address.replica
            pending.end(Reply(error=TooManyCalls(stage, replica, pending.capability, MAX_CALLS)))
            return None
        number = next(self._numbers)
        self._pending[number] = pending
        return Call(number, pending.capability, dict(arguments))

    def answer(self, answer: Answer) -> None:
        """Take an answer of the worker. An unknown number is ignored."""
        if (pending := self._pending.pop(answer.number, None)) is None:
            return
        refusal = answer.refusal
        if refusal is None:
            pending.end(Reply(msgspec.msgpack.decode(answer.value)))
            return
        pending.on_refusal()
        if refusal.unsupported is not None:
            pending.end(Reply(error=Unsupported(pending.address.stage, refusal.unsupported, refusal.message)))
        else:
            pending.end(Reply(error=InvalidRequest(refusal.message, param=refusal.param, code=refusal.code)))

    def lose(self, exit: WorkerExit | None, *, raised: bool = False) -> None:
        """End all calls: the worker answers no more. raised: whether its engine raised in a call."""
        pending, self._pending = self._pending, {}
        for call in pending.values():
            call.lose(exit, raised=raised)


_Name: TypeAlias = tuple[str, str]
"""A capability and a key."""


@dataclass(eq=False)
class Part:
    """A part of a stage's desired state.

    before: its earlier value. order: the names of the stage's parts before it was set.
    """

    stage: str
    desired: Desired
    key: str
    before: Part | None
    order: tuple[_Name, ...]
    calls: Sequence[PendingCall] = ()
    """To the workers that ran when it was set."""
    established: bool = False
    """Whether a worker that loaded has carried it out."""
    failed_at: set[Address] = field(default_factory=set)
    """Replicas of which a worker that loaded raised at it."""
    taken_back: bool = False

    @property
    def name(self) -> _Name:
        return (self.desired.capability, self.key)

    @property
    def carried_out(self) -> bool:
        """Whether any worker has carried it out."""
        return self.established or any(call.accepted for call in self.calls)

    @property
    def unanswered(self) -> bool:
        """Whether a worker that runs has not answered yet."""
        return any(call.unanswered for call in self.calls)


class DesiredState:
    """What every worker of a stage is to have beside requests, now and after each restart: adapters, for example."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[_Name, Part]] = {}

    def of(self, stage: str) -> tuple[Desired, ...]:
        """Return the desired state of a stage, in the order in which its parts were last set."""
        return tuple(part.desired for part in self.parts(stage))

    def parts(self, stage: str) -> tuple[Part, ...]:
        """Return the parts of that state, in the same order."""
        return tuple(self._parts.get(stage, {}).values())

    def get(self, stage: str, capability: str, key: str = "") -> Mapping[str, Any] | None:
        """Return the arguments of one part, or None."""
        part = self._parts.get(stage, {}).get((capability, key))
        return None if part is None else part.desired.arguments

    def set(self, stage: str, capability: str, arguments: Mapping[str, Any], key: str = "") -> Part:
        """Set one part, behind all others, and return it.

        Raises InvalidRequest if the stage's state becomes too large to send.
        """
        earlier = self._parts.get(stage, {})
        part = Part(stage, Desired(capability, dict(arguments)), key, earlier.get((capability, key)), tuple(earlier))
        parts = {**_without(earlier, part.name), part.name: part}
        if len(msgspec.msgpack.encode([each.desired for each in parts.values()])) > LARGEST_DESIRED:
            raise InvalidRequest(f"{capability}: the desired state of stage {stage!r} exceeds {LARGEST_DESIRED} bytes")
        self._parts[stage] = parts
        *_, oldest = itertools.islice(_values(part), MAX_CALLS + 1)
        oldest.before = None
        return part

    def take_back(self, part: Part) -> None:
        """Give a part its earlier value and place again: the newest value of ``MAX_CALLS`` that was not taken back.

        If the part was set anew or dropped, it stays as it is, and this value does not come back.
        """
        part.taken_back = True
        current = self._parts.get(part.stage, {})
        if current.get(part.name) is part:
            values = _without(current, part.name)
            if (before := next((each for each in _values(part) if not each.taken_back), None)) is not None:
                values[part.name] = before
            order = [*(name for name in part.order if name in values), *values]
            self._parts[part.stage] = {name: values[name] for name in order}

    def drop(self, stage: str, capability: str, key: str = "") -> None:
        """Remove one part."""
        self._parts[stage] = _without(self._parts.get(stage, {}), (capability, key))

    def keep_only(self, stage: str, capability: str, key: str) -> None:
        """Remove the parts of a capability that have another key, because this one replaces them all."""
        parts = self._parts.get(stage, {})
        self._parts[stage] = {name: part for name, part in parts.items() if name[0] != capability or name[1] == key}


def _values(part: Part | None) -> Iterator[Part]:
    """Yield a part's value and its earlier ones, the newest first."""
    while part is not None:
        yield part
        part = part.before


def _without(parts: Mapping[_Name, Part], name: _Name) -> dict[_Name, Part]:
    return {each: part for each, part in parts.items() if each != name}


def require_sendable(capability: Any, arguments: Any, timeout_s: Any) -> None:
    """Raise InvalidRequest for a call that cannot be sent, or that a worker could not decode: it would end."""
    if not isinstance(timeout_s, int | float) or math.isnan(timeout_s):
        raise InvalidRequest(f"timeout_s: expected seconds, found {timeout_s!r:.200}", param="timeout_s")
    try:
        encoded = msgspec.msgpack.encode([capability, arguments])
        msgspec.msgpack.decode(encoded, type=tuple[str, dict[str, Any]])
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"arguments of {capability!r:.200}: {error}", param="arguments") from error
    if len(encoded) > LARGEST_ARGUMENTS:
        message = f"arguments of {capability!r}: at most {LARGEST_ARGUMENTS} bytes can be sent, found {len(encoded)}"
        raise InvalidRequest(message, param="arguments")
