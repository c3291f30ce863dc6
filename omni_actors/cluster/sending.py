"""The end of a link on the producer's node: records go from the ring's memory to the socket (rules in ``link``)."""

from __future__ import annotations

import ipaddress
from collections import deque
from typing import Final

from omni_actors.cluster.channel import Address
from omni_actors.cluster.link import CLOSED, END_MARK, HEADER, MOST_MISSED, TURN_BYTES, Link, LinkBroken
from ringbuf import Consumer, Frame, RingClosed

_MOST_BUFFERS: Final = 512
"""In one call of the kernel, which takes 1024."""


class SendingLink(Link):
    """Carries records out of a ring.

    The silence of the receiving end is counted in checks, and not in seconds. The pump reads between two of them. So a
    time in which this process does not run (SIGSTOP, a machine that is paused) counts as one check at the most, and
    what has come meanwhile is read before the next one.
    """

    def __init__(self, link_id: int, consumer: Consumer, address: Address) -> None:
        """Raises ValueError (no IP address)."""
        super().__init__(link_id)
        ipaddress.ip_address(address[0])
        self.address = address
        self._consumer = consumer
        self._buffers: list[bytes | memoryview] = []
        """What is to be sent: header, payload, header, …; no empty payloads."""
        self._last: deque[Frame | None] = deque()
        """For each buffer, the frame that it is the last part of."""
        self._finished = False
        self._ending = False
        """Whether the end mark was appended: no more records follow."""
        self._was_heard = True
        """Whether the receiving end was heard since the last check. It has said that the link is open."""
        self._missed = 0
        """How many checks in a row have heard nothing."""
        self._ear = memoryview(bytearray(64))

    def check_silence(self, sign_s: float) -> None:
        self._missed = 0 if self._was_heard else self._missed + 1
        self._was_heard = False
        if self._missed == MOST_MISSED:
            raise LinkBroken(f"no sign of the other node for {MOST_MISSED * sign_s:g} s")

    def bell(self) -> int:
        return self._consumer.fileno()

    def step(self) -> bool:
        if self.readable and self._read_from_receiver():
            return False
        moved = 0
        while self.writable and moved < TURN_BYTES:
            if not self._gather():
                return False
            sent = self.channel.send(self._buffers)
            if sent is None:
                self.writable = False
            else:
                moved += sent
                self._drop(sent)
        return self.writable

    def close(self) -> None:
        super().close()
        self._release_all()
        self._consumer.close()

    def _gather(self) -> bool:
        """Take records from the ring, up to a turn's bytes. Returns whether there is anything to send."""
        size = sum(map(len, self._buffers)) if self._buffers else 0
        while size < TURN_BYTES and len(self._buffers) < _MOST_BUFFERS and not self._ending:
            try:
                record = self._consumer.try_record()
            except RingClosed as error:
                if error.end == "consumer":
                    raise
                self._append(END_MARK, None)
                self._ending = True
                break
            if record is not None:
                size += self._append_record(record.kind, record.place, record.frame)
            elif self._buffers or self._consumer.park():
                break
        if not self._buffers and self._ending and not self._finished:
            self.channel.finish()
            self._finished = True
        return bool(self._buffers)

    def _append_record(self, kind: int, place: int, frame: Frame) -> int:
        data = frame.data
        header = HEADER.pack(len(data) << 8 | kind, place)
        self.records += 1
        self.payload_bytes += len(data)
        if len(data):
            self._append(header, None)
            self._append(data, frame)
        else:
            self._append(header, frame)
        return len(header) + len(data)

    def _append(self, buffer: bytes | memoryview, last_of: Frame | None) -> None:
        self._buffers.append(buffer)
        self._last.append(last_of)

    def _drop(self, sent: int) -> None:
        """Forget the first ``sent`` bytes, and give back the frames that are sent."""
        done = 0
        for buffer in self._buffers:
            if sent < len(buffer):
                break
            sent -= len(buffer)
            done += 1
            self._release(buffer)
        del self._buffers[:done]
        if sent:
            first = self._buffers[0]
            self._buffers[0] = first[sent:]
            if isinstance(first, memoryview):
                first.release()

    def _release(self, buffer: bytes | memoryview) -> None:
        if isinstance(buffer, memoryview):
            buffer.release()
        if (frame := self._last.popleft()) is not None:
            frame.release()

    def _release_all(self) -> None:
        for buffer in self._buffers:
            self._release(buffer)
        self._buffers.clear()

    def _read_from_receiver(self) -> bool:
        """Read what the receiving end sends. Returns whether the link has ended."""
        while self.readable and (count := self._receive([self._ear])) is not None:
            if not count:
                if not self._ending or self._buffers:  # the end mark was not sent: not ``_finished``, which may be due
                    raise LinkBroken("the other node closed the connection")
                self._end()
                return True
            if CLOSED[0] in self._ear[:count]:
                self._end()
                self._release_all()
                self._consumer.close()
                return True
            self._was_heard = True
            self._note(bytes(self._ear[:count]))
        return False

    def _note(self, said: bytes) -> None:
        """Take what the receiving end says besides. Nothing, without NIXL (``nixl_links``)."""
