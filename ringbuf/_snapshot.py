"""Memory that keeps the last message written to it, also when the writer dies at any instruction.

    off        size field        ordering
      0           8 magic        stored last by the creator, after the two words below
      8           8 version
     16           8 slot bytes
     64           8 current      SYNC CURRENT: number of the last message, stored when its slot is complete; 0: none
   4096  slot bytes slot 0       of messages with an even number
    ...  slot bytes slot 1       of messages with an odd number

Slot (64-byte header, then the message):

      0           8 number       the message's own number, from 1 on
      8           8 length       bytes of the message
     16           8 checksum     CRC-32 of the message

Rule 1: a message is written to the slot that is not current. So the message before it stays whole until ``current``
changes, by one aligned 8-byte store.
Rule 2: there is one writer at a time. A reader is the writer itself, or starts after the writer's death.

SYNC CURRENT  The writer stores ``current`` after the slot's bytes. Total store order keeps both in order for every
              later reader, wherever the writer is killed (see ``_words``, SYNC DATA).
"""

from __future__ import annotations

import os
import zlib
from typing import Final

from ringbuf._buffers import Deferred, SendBuffer
from ringbuf._consumer import Frame
from ringbuf._descriptors import check_memory, create_memory
from ringbuf._errors import MessageTooLarge, RingCorrupted
from ringbuf._mapping import Mapping
from ringbuf._words import PAGE

MAGIC: Final = int.from_bytes(b"snapshot", "little")
VERSION: Final = 1
_MAGIC, _VERSION, _SLOT_BYTES, CURRENT = 0, 1, 2, 8
SLOT_HEADER: Final = 64
_NUMBER, _LENGTH, _CHECKSUM = 0, 1, 2


class Snapshot(Mapping):
    """A mapping of such memory. Use it from one thread at a time."""

    def __init__(self, memory_fd: int) -> None:
        self._size = os.fstat(memory_fd).st_size
        if self._size <= PAGE or self._size % (2 * PAGE) != PAGE:
            raise RingCorrupted(0, (), f"a memory of {self._size} bytes contains no snapshot")
        super().__init__(memory_fd, self._size, offset=0, what="the snapshot's memory")
        self._slot_bytes = (self._size - PAGE) // 2
        self._number = 0
        """The number of the last message. A writer keeps it here too, and so never computes with a stranger's words."""

    @classmethod
    def create(cls, capacity: int) -> tuple[Snapshot, int]:
        """Create memory for messages of up to ``capacity`` bytes, at least.

        Returns its mapping, and a descriptor that the caller owns: another process attaches with it.
        Raises OSError (no memory, no descriptors), ValueError (capacity <= 0).
        """
        if capacity <= 0:
            raise ValueError(f"capacity must be positive, not {capacity}")
        fd = create_memory(cls.needed_bytes(capacity))
        try:
            snapshot = cls(fd)
        except BaseException:
            os.close(fd)
            raise
        snapshot.words[_VERSION], snapshot.words[_SLOT_BYTES] = VERSION, snapshot._slot_bytes
        snapshot.words[_MAGIC] = MAGIC
        return snapshot, fd

    @staticmethod
    def needed_bytes(capacity: int) -> int:
        """Return the bytes of memory for messages of up to ``capacity`` bytes: for two of them, and a header."""
        return PAGE + 2 * -(-(SLOT_HEADER + capacity) // PAGE) * PAGE

    @classmethod
    def attach(cls, fd: int) -> Snapshot:
        """Map memory that another process made. The descriptor is closed, also if this fails.

        Raises RingCorrupted (no such memory, or of another version), OSError (no room to map it, no descriptor).
        """
        try:
            check_memory(fd)
            snapshot = cls(fd)
        finally:
            os.close(fd)
        found = snapshot.words[: _SLOT_BYTES + 1].tolist()
        snapshot._number = snapshot.words[CURRENT]
        if found != [MAGIC, VERSION, snapshot._slot_bytes] or snapshot._number >> 62:
            snapshot.close()
            raise RingCorrupted(0, (*found, snapshot._number), "they are not the words of a snapshot")
        return snapshot

    @property
    def capacity(self) -> int:
        """The most bytes of a message."""
        return self._slot_bytes - SLOT_HEADER

    @property
    def nbytes(self) -> int:
        """The bytes of memory."""
        return self._size

    def write(self, *buffers: SendBuffer) -> None:
        """Replace the message by these bytes, one buffer after the other. Raises MessageTooLarge.

        If it raises, or its process dies, the message before it stays.
        """
        length = sum(buffer.nbytes for buffer in buffers)
        if length > self.capacity:
            raise MessageTooLarge(length, self.capacity, "create a larger one")
        number = self._number + 1
        start = end = self._start(number)
        for buffer in buffers:
            if isinstance(buffer, Deferred):
                buffer.copy_into(self.data[end : end + buffer.nbytes])
            else:
                self.data[end : end + buffer.nbytes] = buffer
            end += buffer.nbytes
        header = (start - SLOT_HEADER) >> 3
        self.words[header + _NUMBER] = number
        self.words[header + _LENGTH] = length
        self.words[header + _CHECKSUM] = zlib.crc32(self.data[start:end])
        self.words[CURRENT] = number  # SYNC CURRENT: pairs with read
        self._number = number

    def read(self) -> Frame | None:
        """Return the last message, or None before the first. Release it before ``close`` and before the second write.

        Raises RingCorrupted: the memory contains what ``write`` never leaves.
        """
        number = self.words[CURRENT]  # SYNC CURRENT: pairs with write
        if number == 0:
            return None
        start = self._start(number)
        header = (start - SLOT_HEADER) >> 3
        found = self.words[header : header + _CHECKSUM + 1].tolist()
        length = found[_LENGTH]
        if found[_NUMBER] != number or length > self.capacity:
            raise RingCorrupted(8 * header, found, f"no message of number {number}")
        if zlib.crc32(self.data[start : start + length]) != found[_CHECKSUM]:
            raise RingCorrupted(8 * header, found, "the message's checksum is another")
        return Frame(self.data[start : start + length], self, 0)

    def _start(self, number: int) -> int:
        """Return where the message of this number begins."""
        return PAGE + (number & 1) * self._slot_bytes + SLOT_HEADER

    def _released(self) -> None:
        """A frame was released."""
