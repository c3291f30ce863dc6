"""The desired state of stages: what every worker has beside requests, now and after each restart.

Rules
1. Every worker of a stage, also one that starts later, gets the stage's desired state with its first message. A change
   of that state is posted to every worker that runs, or to none. Control messages arrive in order, so an engine has a
   change before the requests that are dispatched after it.
2. A part of the desired state that no worker has carried out, and at which the engines of workers that load raise, is
   taken back: it would end every later worker, too. First, each worker that runs answers, and each that loads when an
   engine first raises has one try.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from omni_actors.errors import InvalidRequest
from omni_actors.protocol.messages import Address, Desired
from omni_actors.supervisor.calls import MAX_CALLS, PendingCall, Reply

if TYPE_CHECKING:
    from omni_actors.supervisor.incarnation import Incarnation  # which imports this module

LARGEST_DESIRED = 64 * 1024
"""Most bytes of one stage's desired state, encoded: it travels in ``Configure``."""

_Name: TypeAlias = tuple[str, str]
"""A capability and a key."""


@dataclass(eq=False)
class Part:
    """A part of a stage's desired state.

    before: its earlier value. number: its place in the order in which all parts were set. size: its bytes, encoded.
    """

    stage: str
    desired: Desired
    key: str
    before: Part | None
    number: int
    size: int
    unanswered: set[Address] = field(default_factory=set)
    """Replicas whose workers ran when it was set, live, and have not answered yet."""
    accepted: set[tuple[Address, int]] = field(default_factory=set)
    """Workers that have answered with a value: replica and generation."""
    established: bool = False
    """Whether a worker that loaded has carried it out."""
    trying: Set[Incarnation] | None = None
    """The incarnations that loaded with it when an engine first raised at it, and still do; None: none has raised."""
    taken_back: bool = False

    @property
    def name(self) -> _Name:
        return (self.desired.capability, self.key)

    @property
    def carried_out(self) -> bool:
        """Whether any worker has carried it out."""
        return self.established or bool(self.accepted)

    def is_to_blame(self, raised: Incarnation, loading: Set[Incarnation]) -> bool:
        """Whether a part that no worker has carried out would end them all (rule 2).

        raised: the incarnation whose worker raised at it while it loaded. loading: those whose workers load with it.
        """
        self.trying = (loading if self.trying is None else self.trying & loading) - {raised}
        return not (self.unanswered or self.trying)


class DesiredState:
    """What every worker of a stage is to have beside requests, now and after each restart: adapters, for example."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[_Name, Part]] = {}
        self._numbers = itertools.count()

    def parts(self, stage: str) -> tuple[Part, ...]:
        """Return the desired state of a stage, in the order in which its parts were last set."""
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
        desired, before = Desired(capability, dict(arguments)), earlier.get((capability, key))
        size = len(msgspec.msgpack.encode(desired))
        part = Part(stage=stage, desired=desired, key=key, before=before, number=next(self._numbers), size=size)
        parts = {**_without(earlier, part.name), part.name: part}
        if sum(max(value.size for value in _values(each)) for each in parts.values()) > LARGEST_DESIRED:
            message = f"the desired state of stage {stage!r} exceeds {LARGEST_DESIRED} bytes"
            raise InvalidRequest(f"{capability}: {message}, each part counted at its largest recent value")
        self._parts[stage] = parts
        *_, oldest = itertools.islice(_values(part), MAX_CALLS + 1)
        kept = next((each for each in _values(oldest.before) if each.carried_out and not each.taken_back), None)
        if kept is not None:
            kept.before = None
        oldest.before = kept
        return part

    def take_back(self, part: Part) -> None:
        """Give a part its earlier value and place again: the newest value that was not taken back.

        It is one of the last ``MAX_CALLS`` values or, before these, the newest that a worker has carried out.
        If the part was set anew or dropped, it stays as it is, and this value does not come back.
        """
        part.taken_back = True
        current = self._parts.get(part.stage, {})
        if current.get(part.name) is part:
            parts = _without(current, part.name)
            if (before := next((each for each in _values(part) if not each.taken_back), None)) is not None:
                parts[part.name] = before
            self._parts[part.stage] = dict(sorted(parts.items(), key=lambda item: item[1].number))

    def follow(self, part: Part, call: PendingCall) -> None:
        """Note how a worker answers, also after the deadline."""
        if call.reply is None:
            part.unanswered.add(call.address)
            call.on_end = partial(self.note_end, part, call)

    def note_end(self, part: Part, call: PendingCall, reply: Reply) -> None:
        """Note that a worker has answered, or answers no more. If its engine has refused the part, take that back."""
        part.unanswered.discard(call.address)
        if reply.error is None:
            part.accepted.add((call.address, call.generation))
        elif isinstance(reply.error, InvalidRequest):
            self.take_back(part)

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
