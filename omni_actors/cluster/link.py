"""A link: the TCP connection that carries the records of one ring to a ring of another node.

On the wire, after the handshake, from the producer's node to the consumer's, integers little-endian:

    off size field
      0    8 kind, length   as in a ring's record: kind in the low 8 bits, bytes of payload above; 0: no record follows
      8    8 place          as in a ring's record
     16      payload

Back come single bytes: ALIVE, when the link is open at the consumer's node and then every few seconds, and CLOSED, when
the consumer has closed its ring. The producer's node sends nothing before the first ALIVE.

Rule 1: a link moves bytes when its socket and its ring are ready, and never waits. Backpressure is TCP's: while the
receiving ring is full, the receiving end does not read.
Rule 2: payloads go from the memory of one ring to the kernel, and from the kernel to the memory of the other ring.
Only records that arrive together with the end of another one (READ_AHEAD bytes at most) are copied once more.
Rule 3: a record becomes visible when it is complete. A link that breaks inside a record leaves no trace of it.
Rule 4: an end of the stream without the end mark is a loss (``LinkBroken``). A link that has ended or is lost moves
nothing more, and leaves the ring's end as it is until ``close``.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from typing import Final, NamedTuple

from omni_actors.cluster.channel import Channel
from omni_actors.errors import OmniError

HEADER: Final = struct.Struct("<QQ")
END_MARK: Final = HEADER.pack(0, 0)
ALIVE: Final = b"\0"
CLOSED: Final = b"\1"
TURN_BYTES: Final = 1 << 20
"""A link moves about so much before other links have their turn."""
SIGNS: Final = 5
"""How many times in ``silent_s`` the receiving end says ALIVE, and the sending end checks that it has heard it."""
MOST_MISSED: Final = SIGNS + 2
"""A link is lost when so many checks in a row have heard nothing."""
READ_AHEAD: Final = 64 << 10
"""Bytes that are read beyond the end of a record: they may be many small records."""


class LinkBroken(OmniError):
    """The other side of a link is gone, or sends what no link sends. why: in words."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(why)


class LinkStatistics(NamedTuple):
    """state: "opening", "open", "ended" (an end of the ring was closed) or "lost". records and payload_bytes: moved.

    by_reference: how many of the records NIXL has carried.
    """

    state: str
    records: int
    payload_bytes: int
    by_reference: int = 0


class Link(ABC):
    """One end of a link. The pump's thread alone uses it.

    ``step`` moves what can be moved. The pump sets ``readable`` and ``writable`` when the socket becomes so.
    """

    channel: Channel

    def __init__(self, link_id: int) -> None:
        self.link_id = link_id
        self.state = "opening"
        self.readable = self.writable = True
        """Whether the socket may have something, and may have room. False after it had none, until the pump learns."""
        self.hung_up = False
        """The other side sends no more: a read that finds less than it could take did not find the end."""
        self.records = self.payload_bytes = 0

    def open(self, channel: Channel) -> None:
        """Begin to use an authenticated connection. Raises OSError: it is lost already."""
        self.channel, self.state = channel, "open"

    @abstractmethod
    def check_silence(self, sign_s: float) -> None:
        """Send the sign of life that is due, or look whether one of the other side has come since the last check.

        Called about every ``sign_s`` seconds. Raises LinkBroken (none has come before MOST_MISSED checks in a row),
        OSError (the connection is lost).
        """

    @abstractmethod
    def step(self) -> bool:
        """Move up to about TURN_BYTES. Returns whether more can be moved at once.

        Raises LinkBroken, RingError (the ring is corrupted, or was closed here), OSError (the connection).
        """

    @abstractmethod
    def bell(self) -> int:
        """Return the descriptor of the doorbell at which this end of the ring sleeps."""

    def lose(self) -> None:
        """Give the connection up. The ring's end stays open."""
        if self.state == "open":
            self.channel.reset()
        self.state = "lost"

    def close(self) -> None:
        """Close the connection and this end of the ring: its peer gets RingClosed. Idempotent."""
        if self.state == "open":
            self.channel.reset()
        self.state = "ended"

    def statistics(self) -> LinkStatistics:
        return LinkStatistics(self.state, self.records, self.payload_bytes)

    def _end(self) -> None:
        self.channel.close()
        self.state = "ended"

    def _receive(self, buffers: list[memoryview]) -> int | None:
        """Receive, and remember when there is nothing more. Returns as ``Channel.receive``."""
        count = self.channel.receive(buffers)
        if count is None or (count < sum(map(len, buffers)) and self.channel.tells_when_empty and not self.hung_up):
            self.readable = False
        return count
