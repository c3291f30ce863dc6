"""Packets of a control socket (SOCK_SEQPACKET): each holds some whole messages.

Descriptors in a packet belong to its first message.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Generator, Iterable, Sequence
from typing import TypeAlias

from omni_actors.errors import OmniError
from omni_actors.protocol import messages

Envelope: TypeAlias = tuple[messages.ControlMessage, tuple[int, ...]]
"""A message and its descriptors, which the holder owns."""
Encoded: TypeAlias = tuple[bytes, tuple[int, ...]]
"""An encoded message or packet, and the descriptors to send with it, which the sender owns."""

MAX_FDS = 8
PACKED, PACKED_BYTES = 64, 16 * 1024
"""The most messages and bytes in one packet; a larger message is sent by itself."""
IN_FLIGHT_RETRY_S = 0.01
"""Seconds until the next try when sockets contain too many descriptors (ETOOMANYREFS): the kernel allows a user without
privileges as many as RLIMIT_NOFILE, in all sockets, and no event tells when some were received."""


class PeerGone(OmniError):
    """The other end of a control socket is closed, and all that it sent has been read."""


def packets(posted: Iterable[Encoded]) -> Generator[Encoded]:
    """Pack messages into as few packets as possible. Closing it closes the descriptors of what it has not yielded."""
    batch: list[bytes] = []
    size = 0
    owned: tuple[int, ...] = ()
    try:
        for message, fds in posted:
            if batch and (fds or size + len(message) > PACKED_BYTES or len(batch) == PACKED):
                full, given, owned = messages.pack(batch), owned, fds
                batch, size = [], 0
                yield full, given
            elif fds:
                owned = fds
            batch.append(message)
            size += len(message)
        given, owned = owned, ()
        yield messages.pack(batch), given
    finally:
        close_all(owned)


def send_all(sock: socket.socket, sent: Iterable[Envelope]) -> None:
    """Send messages, in order, and close their descriptors. Blocks while there is no room.

    If the peer is gone, the messages are dropped.

    sock: a non-blocking socket.
    """
    peer_gone = False
    for packet, fds in packets((messages.encode(message), fds) for message, fds in sent):
        try:
            while not peer_gone:
                try:
                    if fds:
                        socket.send_fds(sock, [packet], fds)
                    else:
                        sock.send(packet)
                    break
                except BlockingIOError:
                    wait(sock, select.POLLOUT)
                except (BrokenPipeError, ConnectionResetError):
                    peer_gone = True
                except OSError as error:
                    if error.errno != errno.ETOOMANYREFS:
                        raise
                    time.sleep(IN_FLIGHT_RETRY_S)
        finally:
            close_all(fds)


def receive(sock: socket.socket) -> tuple[list[messages.ControlMessage], Sequence[int]] | None:
    """Return the messages of the next packet and its descriptors, which the caller owns. None: no packet has arrived.

    sock: a non-blocking socket. Raises PeerGone, msgspec.DecodeError.
    """
    try:
        packet, fds = receive_packet(sock)
    except BlockingIOError:
        return None
    if not packet:
        raise PeerGone
    return messages.unpack(packet), fds


def receive_packet(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next packet and its descriptors, which the caller owns. The packet is b"" if the peer is gone.

    sock: a non-blocking socket. Raises BlockingIOError: no packet has arrived.
    """
    while True:
        try:
            packet, fds, _, _ = socket.recv_fds(sock, messages.MAX_PACKET_BYTES, MAX_FDS)
        except ConnectionResetError:
            continue  # raised once if the peer left messages unread; what it sent itself is still to be read
        return packet, fds


def wait(sock: socket.socket, event: int) -> None:
    """Block until ``event`` of poll(2), or the end of the connection."""
    poll = select.poll()
    poll.register(sock, event)
    poll.poll()


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)
