"""Chooses one of a stage's free replicas for a request: the policies of ``Stage.routing``.

Rules
1. A congested replica, which does not keep up with its control messages, is chosen only if all are congested.
2. ``least_outstanding``: the replica with the fewest requests. ``round_robin``: by number, the one after the policy's
   last choice; what a session chose does not count. ``prefix``: the replica that was given the longest common prefix of
   the prompt, because its engine may have that in its cache.
3. Whatever the policy, a request with a session goes to the replica that the session's last request was given.
4. Rules 2 and 3 prefer a replica only while it has at most ``SLACK`` requests more than the least loaded one, else the
   least loaded one is chosen. A new incarnation has an empty cache, so prefixes of the last one do not count.
5. Memory is bounded: the least recently used sessions and prefixes are forgotten.
6. No I/O, clock or trio here.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from omni_actors.config import RoutingPolicy
from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.request_input import RequestInput
from omni_actors.protocol.messages import Address

SLACK = 4
"""How many more requests than the least loaded replica a preferred one may have."""
SESSIONS, PREFIXES = 4096, 16384
"""How many sessions, and blocks of prompts, are remembered for each stage."""
BLOCK_BYTES, BLOCKS = 256, 64
"""The size of the blocks in which a prompt's prefix is known, and the most blocks of a prompt."""


class Candidate(NamedTuple):
    """A replica that a request may be given. load: the number of requests that it holds."""

    address: Address
    generation: int
    load: int
    congested: bool = False


class Holder(NamedTuple):
    """The incarnation of a replica that was given a session or a prefix."""

    address: Address
    generation: int


def least_outstanding(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate with the fewest requests, by rules 1 and 2; of equal ones the first."""
    return min(candidates, key=lambda each: (each.congested, each.load))


def round_robin(candidates: Sequence[Candidate], last: int) -> Candidate:
    """Return the candidate that follows replica number ``last``, cyclically, by rules 1 and 2."""
    return min(candidates, key=lambda each: (each.congested, each.address.replica <= last, each.address.replica))


def preferred(candidates: Sequence[Candidate], holder: Holder | None, *, same_life: bool) -> Candidate | None:
    """Return the candidate that is ``holder``, if it is not too busy (rule 4), or None.

    same_life: whether it must be the same incarnation.
    """
    if holder is None:
        return None
    least = least_outstanding(candidates)
    for each in candidates:
        if each.address == holder.address and (each.generation == holder.generation or not same_life):
            return each if each.congested <= least.congested and each.load <= least.load + SLACK else None
    return None


class Affinity:
    """What relates a request to earlier ones. given: the request's input."""

    def __init__(self, session: str | None, given: RequestInput) -> None:
        self.session, self._input = session, given

    @functools.cached_property
    def prefixes(self) -> tuple[bytes, ...]:
        """A hash of the first block of the prompt, of the first two, and so on.

        If a value cannot be encoded, the hashes end before it. The request ends with the error when its input is sent.
        """
        found = list[bytes]()
        with suppress(AttributeError, ArithmeticError, BufferError, RuntimeError, TypeError, ValueError):
            found.extend(prefix_hashes(self._input.fixed))
        return tuple(found)


class StageRouting:
    """Routes the requests of one stage by its policy, and remembers what it has to."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy, self._last = policy, -1
        self._sessions: OrderedDict[str, Holder] = OrderedDict()
        self._prefixes: OrderedDict[bytes, Holder] = OrderedDict()

    def remembers(self, affinity: Affinity) -> bool:
        """Return whether ``choose`` must be called even for a single candidate, because the choice is remembered."""
        return self._policy != "least_outstanding" or affinity.session is not None

    def choose(self, candidates: Sequence[Candidate], affinity: Affinity) -> Address:
        """Choose one of ``candidates``, of which there is one at least, and remember the choice."""
        chosen = self._of_session(candidates, affinity.session)
        if chosen is None:
            chosen = self._by_policy(candidates, affinity)
            self._last = chosen.address.replica
        holder = Holder(chosen.address, chosen.generation)
        if affinity.session is not None:
            _remember(self._sessions, affinity.session, holder, SESSIONS)
        for each in affinity.prefixes if self._policy == "prefix" else ():
            _remember(self._prefixes, each, holder, PREFIXES)
        return chosen.address

    def _of_session(self, candidates: Sequence[Candidate], session: str | None) -> Candidate | None:
        holder = None if session is None else self._sessions.get(session)
        return preferred(candidates, holder, same_life=False)

    def _by_policy(self, candidates: Sequence[Candidate], affinity: Affinity) -> Candidate:
        if self._policy == "round_robin":
            return round_robin(candidates, self._last)
        if self._policy == "prefix":
            for each in reversed(affinity.prefixes):
                if (found := preferred(candidates, self._prefixes.get(each), same_life=True)) is not None:
                    return found
        return least_outstanding(candidates)


def prefix_hashes(inputs: Mapping[str, Sequence[Input]]) -> Iterator[bytes]:
    """Yield a hash of the first whole block of a prompt, of the first two, and so on, ``BLOCKS`` at most.

    A prompt that begins with all of another one, such as a conversation that goes on, begins with its hashes, too.
    """
    digest = hashlib.blake2b(digest_size=8)
    block = bytearray()
    left = BLOCKS
    for kind in sorted(inputs):
        for piece in inputs[kind]:
            for part in itertools.chain(_flat(piece.data), _tensor_bytes(piece.tensors)):
                for at in range(0, len(part), BLOCK_BYTES):
                    block += part[at : at + BLOCK_BYTES]
                    if len(block) >= BLOCK_BYTES:
                        digest.update(block[:BLOCK_BYTES])
                        del block[:BLOCK_BYTES]
                        yield digest.digest()
                        left -= 1
                        if not left:
                            return


def _flat(value: Any) -> Iterator[bytes]:
    """Yield the leaves of small data as bytes, without lengths: what is appended to a list does not change a prefix."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield str(name).encode()
            yield from _flat(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    elif isinstance(value, str):
        yield value[: BLOCKS * BLOCK_BYTES].encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes | bytearray | memoryview):
        yield bytes(value[: BLOCKS * BLOCK_BYTES])
    else:
        yield msgspec.msgpack.encode(value) if isinstance(value, bool | int | float | None) else b""


def _tensor_bytes(tensors: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the first bytes of each tensor. One without a flat buffer is left out: a prefix is only a hint."""
    for tensor in tensors.values():
        with suppress(TypeError, ValueError, BufferError):
            yield bytes(memoryview(tensor.data).cast("B")[: BLOCKS * BLOCK_BYTES])


def _remember(table: OrderedDict[Any, Holder], key: Any, holder: Holder, limit: int) -> None:
    table[key] = holder
    table.move_to_end(key)
    if len(table) > limit:
        table.popitem(last=False)
