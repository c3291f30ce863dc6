"""The conversation of a session: its items in order, within bounds.

Rules
1. The conversation has at most ``max_items`` items and ``max_bytes`` bytes of text and recordings. To make room for a
   new item, the recordings of old items are dropped whose words are known. Then the oldest items leave, if the session
   allows it; messages of the system stay. A call of a function and its outputs leave together, and a call that waits
   for its output leaves last. An item that still does not fit is refused, and nothing is dropped for it.
2. Sound of the assistant is not kept.
3. An output of a function needs its call: without it, the client's item is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import trio

from omni_actors.errors import OmniError
from omni_actors.serve.http.errors import bad_request, quote_value
from omni_actors.serve.media.base64_data import to_base64_json
from omni_actors.serve.realtime.input_audio import Recording
from omni_actors.serve.realtime.items import FunctionCall, FunctionCallOutput, Item, Message, wire
from omni_actors.turns import SpokenAnswer

ROOT = "root"
"""The "previous item" of the first one."""


class Tally:
    """The sum of the bytes of a conversation's entries."""

    def __init__(self) -> None:
        self.nbytes = 0


class Entry:
    """An item with what belongs to it.

    Attributes:
        recordings: of a user's message, by the index of its part.
        words_known: set when every recording has a transcript, or ``error``.
        error: why a recording has no transcript. Other recordings of the item may have one.
        spoken: the words and the sound of an assistant's message.
        sent_ms: the exact duration of the sound that has left, in milliseconds.
        nbytes: the bytes of the recordings and, in UTF-8, of all text but the identifier, which is short. ``measure``
            and ``grow`` keep it up to date.
        tally: of the conversation that the entry is in; None: it is in none.
    """

    def __init__(self, item: Item, recordings: dict[int, Recording] | None = None) -> None:
        self.item, self.recordings = item, recordings or {}
        self.words_known = trio.Event()
        self.error: OmniError | None = None
        self.spoken, self.sent_ms = SpokenAnswer(), Fraction(0)
        self.tally: Tally | None = None
        self.nbytes = self._measured()
        if not self.recordings:
            self.words_known.set()

    @property
    def is_from_system(self) -> bool:
        return isinstance(self.item, Message) and self.item.role == "system"

    @property
    def has_words_of_user(self) -> bool:
        return isinstance(self.item, Message) and self.is_from_user and any(part.words for part in self.item.content)

    @property
    def is_from_user(self) -> bool:
        return isinstance(self.item, Message) and self.item.role == "user"

    @property
    def is_unfinished_call(self) -> bool:
        """Whether it is a call of a function whose arguments are being written, or were cut."""
        return isinstance(self.item, FunctionCall) and self.item.status != "completed"

    def expect_words(self) -> None:
        """Say that the transcripts are being made, for the first time or again after an error."""
        self.words_known, self.error = trio.Event(), None

    def untranscribed(self) -> list[tuple[int, Recording]]:
        """Return the recordings that have no transcript, each with the index of its part."""
        parts = self.item.content if isinstance(self.item, Message) else []
        return [(index, each) for index, each in self.recordings.items() if parts[index].transcript is None]

    @property
    def is_spoken(self) -> bool:
        """Whether it is a spoken answer, of which sound may not have left yet."""
        match self.item:
            case Message(role="assistant", content=[part, *_]):
                return part.type == "output_audio"
        return False

    def keep_heard(self, sound_ms: float) -> None:
        """Keep of a spoken answer the words that were heard in so many milliseconds of its sound."""
        assert isinstance(self.item, Message)
        self.item.content[0].transcript = self.spoken.heard(sound_ms)
        self.measure()

    @property
    def may_leave(self) -> bool:
        """Whether it may make room for a new item: it is complete, and no instruction to the model."""
        is_system = isinstance(self.item, Message) and self.item.role == "system"
        return not is_system and self.item.status != "in_progress"

    @property
    def call_id(self) -> str | None:
        """The identifier that a call of a function and its outputs share; None of a message."""
        return None if isinstance(self.item, Message) else self.item.call_id

    def measure(self) -> None:
        """Measure the entry again, because its text or its recordings have changed."""
        self._resize(self._measured() - self.nbytes)

    def grow(self, text: str) -> None:
        """Count text that was added to the item."""
        self._resize(_utf8_bytes(text))

    def _resize(self, by: int) -> None:
        self.nbytes += by
        if self.tally is not None:
            self.tally.nbytes += by

    def _measured(self) -> int:
        texts: list[str | None]
        match self.item:
            case Message(content=parts):
                texts = [text for part in parts for text in (part.text, part.transcript)]
            case FunctionCall(name=name, arguments=arguments):
                texts = [self.item.call_id, name, arguments]
            case FunctionCallOutput(output=output):
                texts = [self.item.call_id, output]
        return sum(_utf8_bytes(text) for text in texts if text) + self.recorded_bytes

    @property
    def recorded_bytes(self) -> int:
        return sum(len(recording.data) for recording in self.recordings.values())

    async def retrieved(self) -> dict[str, Any]:
        """Return the item as it is sent to a client that retrieves it: with its recordings."""
        found = wire(self.item, with_audio=True)
        for index, recording in [*self.recordings.items()]:
            found["content"][index]["audio"] = await to_base64_json(recording.data)
        return found


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class _Room(NamedTuple):
    """What is dropped to make room for an item."""

    recorded: list[Entry]
    """The entries whose recordings are dropped."""
    leaving: list[Entry]
    """The entries that leave the conversation."""


class Conversation:
    """The items of one conversation. See the rules."""

    def __init__(self, *, max_items: int, max_bytes: int) -> None:
        self._max_items, self.max_bytes = max_items, max_bytes
        self.entries: list[Entry] = []
        self._tally = Tally()

    @property
    def nbytes(self) -> int:
        """The bytes of all entries."""
        return self._tally.nbytes

    def make_room(self, *, may_leave: bool) -> list[str]:
        """Make room for an answer. Return the identifiers of the items that left.

        may_leave: whether old items may leave. Raises HTTPError: the conversation is full, and nothing has changed.
        """
        return self._drop(self._find_room(None, may_leave=may_leave))

    def add(self, entry: Entry, after: str | None = None, *, may_leave: bool) -> list[str]:
        """Insert an entry, and make room for it. Return the identifiers of the items that left.

        Args:
            entry: the entry.
            after: as ``insert`` takes it.
            may_leave: whether old items may leave.

        Raises HTTPError: the entry is refused, and nothing has changed.
        """
        require_call(entry.item, self.entries, "item")
        room = self._find_room(entry, may_leave=may_leave)
        self.insert(entry, after)
        return self._drop(room)

    def _find_room(self, new: Entry | None, *, may_leave: bool) -> _Room:
        """Return what has to be dropped for a new entry or an answer. Raises HTTPError: the conversation is full."""
        items = len(self.entries) + 1 - self._max_items
        excess = self.nbytes + (0 if new is None else new.nbytes) - self.max_bytes
        recorded, leaving = list[Entry](), list[Entry]()
        for entry in self.entries:
            if excess > 0 and entry.recordings and entry.words_known.is_set() and entry.error is None:
                excess -= entry.recorded_bytes
                recorded.append(entry)
        if may_leave and (items > 0 or excess > 0):
            for group in self._groups_that_may_leave(new):
                if items > 0 or excess > 0:
                    items -= len(group)
                    excess -= sum(each.nbytes - (each.recorded_bytes if each in recorded else 0) for each in group)
                    leaving += group
        if items > 0:
            message = f"the conversation has {self._max_items} items, which is the limit; delete some"
            raise bad_request(message, None, "conversation_full")
        if excess > 0:
            message = f"the conversation has more than {self.max_bytes} bytes; delete items"
            raise bad_request(message, None, "conversation_full")
        return _Room(recorded, leaving)

    def _groups_that_may_leave(self, new: Entry | None) -> list[list[Entry]]:
        """Return the entries that may leave for a new one, in the order in which they do (rule 1)."""
        groups = dict[tuple[bool, str], list[Entry]]()
        for entry in self.entries:
            key = (False, entry.item.id) if entry.call_id is None else (True, entry.call_id)
            groups.setdefault(key, []).append(entry)
        if new is not None and new.call_id is not None:
            groups.pop((True, new.call_id), None)
        found = [group for group in groups.values() if all(entry.may_leave for entry in group)]
        return sorted(found, key=_is_awaited)  # sorting keeps the order of equal keys

    def _drop(self, room: _Room) -> list[str]:
        for entry in room.recorded:
            entry.recordings.clear()
            entry.measure()
        left = [entry for entry in self.entries if entry in room.leaving]
        for entry in left:
            self._forget(entry)
        self.entries = [entry for entry in self.entries if entry not in left]
        return [entry.item.id for entry in left]

    def insert(self, entry: Entry, after: str | None = None) -> str | None:
        """Add an entry at the end, or after the item ``after``. Return the identifier of the item before it.

        Raises HTTPError: there is no such item, or one with the entry's identifier.
        """
        if any(each.item.id == entry.item.id for each in self.entries):
            raise bad_request(f"item.id: there is an item {quote_value(entry.item.id)} already", "item.id")
        if after is None:
            at = len(self.entries)
        else:
            at = 0 if after == ROOT else self.entries.index(self.find(after, "previous_item_id")) + 1
        self.entries.insert(at, entry)
        entry.tally = self._tally
        self._tally.nbytes += entry.nbytes
        return self.entries[at - 1].item.id if at else None

    def before(self, entry: Entry) -> str | None:
        """Return the identifier of the item before an entry; None if there is none, or the entry was deleted."""
        at = self.entries.index(entry) if entry in self.entries else 0
        return self.entries[at - 1].item.id if at else None

    def find(self, id: str, param: str = "item_id") -> Entry:
        """Return the entry of an item. Raises HTTPError."""
        for entry in self.entries:
            if entry.item.id == id:
                return entry
        raise bad_request(f"{param}: there is no item {quote_value(id)}", param, "item_not_found")

    def delete(self, id: str) -> None:
        """Remove an item. Raises HTTPError."""
        entry = self.find(id)
        self.entries.remove(entry)
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        """Stop counting an entry that has left."""
        entry.tally = None
        self._tally.nbytes -= entry.nbytes

    def check_truncation(self, id: str, audio_end_ms: int) -> Entry:
        """Return the entry of a spoken answer that has so many milliseconds of sound. Raises HTTPError."""
        entry = self.find(id)
        if not entry.is_spoken:
            raise bad_request("item_id: only a spoken answer can be truncated", "item_id")
        if audio_end_ms > entry.sent_ms:
            message = f"audio_end_ms: the answer has {int(entry.sent_ms)} ms of sound"
            raise bad_request(message, "audio_end_ms")
        return entry

    def truncate(self, id: str, audio_end_ms: int) -> None:
        """Keep of a spoken answer the words that were heard in so many milliseconds. Raises HTTPError."""
        self.check_truncation(id, audio_end_ms).keep_heard(audio_end_ms)


def _is_awaited(group: Sequence[Entry]) -> bool:
    """Return whether entries of one ``call_id`` wait for the output of a call."""
    return all(isinstance(entry.item, FunctionCall) and entry.item.status == "completed" for entry in group)


def require_call(item: Item, entries: Sequence[Entry], param: str) -> None:
    """Refuse the output of a function whose call is not among the entries. Raises HTTPError."""
    if not isinstance(item, FunctionCallOutput):
        return
    if not any(isinstance(each.item, FunctionCall) and each.item.call_id == item.call_id for each in entries):
        message = f"{param}.call_id: there is no call {quote_value(item.call_id)}"
        raise bad_request(message, f"{param}.call_id", "invalid_tool_call_id")


def has_open_question(entries: Sequence[Entry]) -> bool:
    """Return whether the entries have words of the user, or an output of a function, behind the last answer.

    An answer is a call of a function, or a message of the assistant in which there are words.
    """
    for entry in reversed(entries):
        match entry.item:
            case FunctionCallOutput():
                return True
            case FunctionCall():
                return False
            case Message(role="user" | "assistant" as role, content=parts) if any(part.words for part in parts):
                return role == "user"
    return False
