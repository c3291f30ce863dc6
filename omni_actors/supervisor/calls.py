"""Calls to workers: the parent's side of ``Call`` and ``CallAnswer``.

Rules
1. Each call to each replica ends with one ``Reply``: a value, a refusal of the engine, or a ``CallError``.
2. A worker has at most ``MAX_CALLS`` calls to answer, and as many changes of its desired state; its mailbox has room
   for them beside its requests' messages. A call that timed out counts until the worker answers it or dies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
from omni_actors.protocol.messages import Address, Call, CallAnswer
from omni_actors.validation import require_seconds

MAX_CALLS = 16
CALL_MESSAGES = 2 * MAX_CALLS
"""Most messages about calls that a worker has not answered."""
LARGEST_ARGUMENTS = 64 * 1024
"""Most bytes of a call's arguments, encoded: they travel in one control message."""


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
    """A call to one replica, until its caller has the reply.

    generation: that of the worker. changes_state: whether the call changes the desired state.
    """

    def __init__(
        self, address: Address, generation: int, capability: str, timeout_s: float, *, changes_state: bool = False
    ) -> None:
        self.address, self.generation, self.capability, self._timeout_s = address, generation, capability, timeout_s
        self.changes_state = changes_state
        self.deadline = trio.current_time() + timeout_s
        """Until when the caller waits, on trio's clock."""
        self.on_end: Callable[[Reply], None] = lambda reply: None
        """Called when the call ends, also after the deadline."""
        self.reply: Reply | None = None
        """How it has ended, also after the deadline; None: it has not."""
        self._ended = trio.Event()

    def end(self, reply: Reply) -> None:
        """Give the call its reply."""
        self.reply = reply
        self.on_end(reply)
        self._ended.set()

    def lose(self, exit: WorkerExit | None, *, raised: bool = False, had_worker: bool = False) -> None:
        """End the call: no worker will answer. The arguments are those of ``WorkerLost``."""
        where = self.address.stage, self.address.replica
        self.end(Reply(error=WorkerLost(*where, self.capability, exit, raised=raised, had_worker=had_worker)))

    async def wait(self) -> Reply:
        """Wait for the reply until the call's timeout. Cancelling the wait does not cancel the call."""
        with trio.move_on_at(self.deadline):
            await self._ended.wait()
        if self.reply is not None:
            return self.reply
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

    def answer(self, answer: CallAnswer) -> None:
        """Take an answer of the worker. An unknown number is ignored."""
        if (pending := self._pending.pop(answer.number, None)) is None:
            return
        refusal = answer.refusal
        if refusal is None:
            pending.end(_reply(answer.value))
            return
        if refusal.unsupported is not None:
            pending.end(Reply(error=Unsupported(pending.address.stage, refusal.unsupported, refusal.message)))
        else:
            pending.end(Reply(error=InvalidRequest(refusal.message, param=refusal.param, code=refusal.code)))

    def lose(self, exit: WorkerExit | None, *, raised: bool = False) -> None:
        """End all calls: the worker answers no more.

        exit: how it died; None if it was stopped. raised: whether its engine raised in a call.
        """
        pending, self._pending = self._pending, {}
        for call in pending.values():
            call.lose(exit, raised=raised, had_worker=True)


def _reply(value: msgspec.Raw) -> Reply:
    """Return the reply with a value that a worker has sent."""
    try:
        return Reply(msgspec.msgpack.decode(value))
    except (ValueError, RecursionError) as error:  # msgspec.DecodeError is a ValueError
        return Reply(error=InvalidRequest(f"the answer cannot be decoded: {error}", code="answer_not_encodable"))


def require_sendable(capability: Any, arguments: Any, timeout_s: Any) -> None:
    """Raise InvalidRequest for a call that cannot be sent, or that a worker could not decode: it would end."""
    require_seconds("timeout_s", timeout_s, endless=True)
    try:
        encoded = msgspec.msgpack.encode([capability, arguments])
        msgspec.msgpack.decode(encoded, type=tuple[str, dict[str, Any]])
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"arguments of {capability!r:.200}: {error}", param="arguments") from error
    if len(encoded) > LARGEST_ARGUMENTS:
        message = f"arguments of {capability!r}: at most {LARGEST_ARGUMENTS} bytes can be sent, found {len(encoded)}"
        raise InvalidRequest(message, param="arguments")
