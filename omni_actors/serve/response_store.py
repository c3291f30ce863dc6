"""The responses of /v1/responses that the server remembers, in memory.

Rules
1. The newest responses stay: at most ``MAX_RESPONSES`` with ``MAX_BYTES`` together. A restart forgets all. Beyond
   that, the oldest response leaves of the address that takes the largest share of either limit. So a client first loses
   its own responses. Clients behind one proxy have one address.
2. A response is kept with its whole conversation, files included. Conversations share their messages in memory; each
   is counted in full, so the real memory is below the bound.
3. Messages are measured once, when they join a conversation. The client cannot hide the length of a conversation behind
   an id: it has the bounds of a body in bytes and values (``routes.response_routes``).
4. A running response is known by its id while its stream runs, so that it can be looked at and cancelled.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from omni_actors.network_addresses import counted_address
from omni_actors.serve.api.schemas import ChatMessage

MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20


class Conversation(NamedTuple):
    """Messages and their measure.

    bytes: of their strings in memory. values: of their JSON, as ``api.json_body`` counts them in a body.
    """

    messages: tuple[ChatMessage, ...] = ()
    bytes: int = 0
    values: int = 0

    def extended(self, messages: Sequence[ChatMessage]) -> Conversation:
        """Return the conversation with more messages. Only these are measured."""
        size, values = _measure(messages)
        return Conversation((*self.messages, *messages), self.bytes + size, self.values + values)


class StoredResponse(NamedTuple):
    """A response that has ended.

    address: of the client, as limits count it. body: its object, as JSON. conversation: without instructions, with the
    answer.
    """

    address: str
    body: bytes
    conversation: Conversation

    @property
    def size(self) -> int:
        """Its bytes."""
        return len(self.body) + self.conversation.bytes


class RunningResponse(NamedTuple):
    """A response whose stream runs. body: returns its object. cancel: ends it."""

    body: Callable[[], dict[str, Any]]
    cancel: Callable[[], None]


@dataclass
class _Share:
    """What the responses of one address take. ids: of these, the oldest first."""

    ids: dict[str, None] = field(default_factory=dict)
    bytes: int = 0


class ResponseStore:
    """Remembers responses by id."""

    def __init__(self, *, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: dict[str, StoredResponse] = {}
        self._shares: defaultdict[str, _Share] = defaultdict(_Share)
        """The share of each client, by its address."""
        self._running: dict[str, RunningResponse] = {}
        self.bytes = 0
        """The size of all stored responses."""

    def put(self, id: str, body: dict[str, Any], conversation: Conversation, address: str) -> bool:
        """Store a response of the client at ``address``, and forget others if there is no room (rule 1).

        Returns False if there is no room for this one.
        """
        address = counted_address(address)
        response = StoredResponse(address, msgspec.json.encode(body), conversation)
        if response.size > self._max_bytes:
            return False
        self.delete(id)
        self._stored[id] = response
        self.bytes += response.size
        share = self._shares[address]
        share.ids[id] = None
        share.bytes += response.size
        while len(self._stored) > self._max_responses or self.bytes > self._max_bytes:
            self.delete(next(iter(max(self._shares.values(), key=self._portion).ids)))
        return id in self._stored

    def _portion(self, share: _Share) -> float:
        """Return the larger one of the parts of the two limits that an address takes."""
        return max(len(share.ids) / self._max_responses, share.bytes / self._max_bytes)

    def get(self, id: str) -> StoredResponse | None:
        """Return a stored response."""
        return self._stored.get(id)

    def delete(self, id: str) -> bool:
        """Forget a stored response. Returns whether it was there."""
        found = self._stored.pop(id, None)
        if found is None:
            return False
        self.bytes -= found.size
        share = self._shares[found.address]
        share.bytes -= found.size
        del share.ids[id]
        if not share.ids:
            del self._shares[found.address]
        return True

    def running(self, id: str) -> RunningResponse | None:
        """Return a response whose stream runs."""
        return self._running.get(id)

    @contextmanager
    def run(self, id: str, response: RunningResponse) -> Iterator[None]:
        """Let a running response be known by its id for as long as the block lasts."""
        self._running[id] = response
        try:
            yield
        finally:
            del self._running[id]


def _measure(messages: Sequence[ChatMessage]) -> tuple[int, int]:
    """Return the bytes of the strings of messages in memory, and the values of their JSON.

    An object of n fields has two braces, n names, n colons and n - 1 commas; a list has two brackets and n - 1 commas.
    """
    size, values, pending = 0, len(messages), list[Any](messages)
    while pending:
        value = pending.pop()
        if isinstance(value, msgspec.Struct):
            fields = [each for name in value.__struct_fields__ if (each := getattr(value, name)) is not None]
            has_tag = value.__struct_config__.tag is not None
            values += 3 * len(fields) + 1 + 4 * has_tag
            pending += fields
        elif isinstance(value, list):
            values += len(value) + 1
            pending += value
        else:
            values += 1
            size += sys.getsizeof(value)
    return size, values
