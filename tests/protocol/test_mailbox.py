"""The control connection: messages and descriptors cross it, and no descriptor stays open."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from omni_actors.protocol import messages
from omni_actors.protocol.mailbox import Mailbox, MailboxFull, open_mailbox
from omni_actors.protocol.messages import (
    CLIENT_ADDRESS,
    Abort,
    Address,
    CheckpointMemory,
    Connect,
    ControlMessage,
    Loading,
    Ping,
    Pong,
    Ready,
    Stop,
)
from omni_actors.protocol.packets import MAX_FDS, PACKED, PACKED_BYTES, close_all, receive, send_all
from ringbuf import create_memory
from tests.support.open_descriptors import few_descriptors, open_descriptors

CONNECT = Connect(Address("a", 0), CLIENT_ADDRESS, 3)


@asynccontextmanager
async def opened(sock: socket.socket, capacity: int) -> AsyncIterator[Mailbox]:
    """Open a mailbox whose peer's bell does not matter."""
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        async with open_mailbox(sock, capacity, bell) as mailbox:
            yield mailbox
    finally:
        os.close(bell)


@asynccontextmanager
async def pair(capacity: int = 8) -> AsyncIterator[tuple[Mailbox, Mailbox]]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    async with opened(ends[0], capacity) as one, opened(ends[1], capacity) as other:
        yield one, other


async def test_messages_cross_in_order_in_both_directions() -> None:
    async with pair() as (parent, worker):
        for number in range(8):
            parent.post(Abort(number))
        worker.post(Ready(1.5))
        assert [await worker.incoming.receive() for _ in range(8)] == [(Abort(number), ()) for number in range(8)]
        assert await parent.incoming.receive() == (Ready(1.5), ())


async def test_descriptors_cross_and_the_poster_keeps_its_own() -> None:
    read, write = os.pipe()
    async with pair() as (parent, worker):
        parent.post(CONNECT, (read, write))
        message, (their_read, their_write) = await worker.incoming.receive()
        assert message == CONNECT
        os.write(their_write, b"over there")
        assert os.read(read, 100) == b"over there"
        os.close(their_read)
        os.close(their_write)
    os.close(read)
    os.close(write)


async def test_the_descriptors_of_a_dead_peer_are_unread_with_their_messages() -> None:
    before = len(open_descriptors())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setblocking(False)
    memories = [create_memory(number + 1) for number in range(6)]
    async with opened(ours, 2) as mailbox:
        send_all(theirs, [(CheckpointMemory(number), (fd,)) for number, fd in enumerate(memories)])
        socket.send_fds(theirs, [b"\xff"], [0])  # undecodable: its descriptor is closed
        theirs.close()
        await trio.testing.wait_all_tasks_blocked()
        for number, (message, (fd,)) in enumerate(mailbox.unread()):
            assert message == CheckpointMemory(number)
            assert os.fstat(fd).st_size == number + 1
            os.close(fd)
        assert mailbox.fault is not None
    assert number == 5
    assert len(open_descriptors()) == before


@pytest.mark.parametrize("arrived", [0, 3, 8])
async def test_descriptors_that_are_never_received_are_closed(arrived: int) -> None:
    """0: they are queued at the sender. 3: at the receiver. 8: more are in the socket and in the reader's packet."""
    before = len(open_descriptors())
    read, write = os.pipe()
    async with pair() as (parent, worker):
        for _ in range(arrived or 3):
            parent.post(CONNECT, (read, write))
        while worker.incoming.statistics().current_buffer_used < arrived:
            await trio.lowlevel.checkpoint()
        if arrived == 8:
            for _ in range(3):
                parent.post(CONNECT, (read, write))
            await trio.testing.wait_all_tasks_blocked(0.01)
    os.close(read)
    os.close(write)
    assert len(open_descriptors()) == before


async def test_descriptors_for_a_peer_that_is_gone_are_closed() -> None:
    before = len(open_descriptors())
    read, write = os.pipe()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.close()
    async with opened(ours, 8) as mailbox:
        for _ in range(20):  # more than fit: they do not pile up
            mailbox.post(CONNECT, (read, write))
            await trio.testing.wait_all_tasks_blocked()
        for _ in range(20):
            mailbox.post(Ready(0.0))
        with pytest.raises(trio.EndOfChannel):
            await mailbox.incoming.receive()
    os.close(read)
    os.close(write)
    assert len(open_descriptors()) == before


async def test_a_full_mailbox_raises_and_keeps_nothing_of_the_message() -> None:
    read, write = os.pipe()
    async with pair(capacity=2) as (parent, _):
        parent.post(Abort(1))
        parent.post(Abort(2))
        before = len(open_descriptors())
        with pytest.raises(MailboxFull) as caught:
            parent.post(CONNECT, (read, write))
        assert caught.value.pending == 2
        assert len(open_descriptors()) == before
    os.close(read)
    os.close(write)


async def test_messages_that_a_peer_sent_before_it_closed_are_read_before_the_end() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setblocking(False)
    async with opened(ours, 8) as parent:
        send_all(theirs, [(Loading("one"), ()), (Loading("two"), ())])
        theirs.close()
        assert [message async for message, _ in parent.incoming] == [Loading("one"), Loading("two")]
        assert parent.fault is None


async def test_writing_messages_waits_for_room_and_ends_with_the_peer() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setblocking(False)
    sent = [Loading(f"{number}: {'x' * 10_000}") for number in range(200)]  # more than the socket's buffer
    envelopes = [(message, ()) for message in sent]
    with theirs:
        async with trio.open_nursery() as nursery, opened(ours, 8) as parent:
            nursery.start_soon(trio.to_thread.run_sync, send_all, theirs, envelopes)
            assert [(await parent.incoming.receive())[0] for _ in sent] == sent
        send_all(theirs, envelopes)  # they are dropped


async def test_messages_that_the_reader_has_no_room_for_are_unread_and_in_order() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    async with opened(ours, 2) as mailbox:
        for first in (0, 6):
            theirs.send(messages.pack([messages.encode(Pong(first + number)) for number in range(6)]))
        theirs.close()
        await trio.testing.wait_all_tasks_blocked()
        assert list(mailbox.unread()) == [(Pong(number), ()) for number in range(12)]
        assert mailbox.fault is None


async def test_an_empty_packet_ends_reading() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with theirs:
        async with opened(ours, 2) as mailbox:
            theirs.send(messages.pack([]))
            assert [message async for message in mailbox.incoming] == []
            assert mailbox.fault == "a control packet of 3 bytes cannot be decoded: it is empty"


async def test_a_cancelled_owner_still_sends_its_last_messages() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setblocking(False)
    async with opened(theirs, 8) as worker, trio.open_nursery() as nursery:

        async def owner() -> None:
            async with opened(ours, 8) as mailbox:
                try:
                    await trio.sleep_forever()
                finally:
                    mailbox.post(Stop())
                    with trio.CancelScope(shield=True):
                        assert await worker.incoming.receive() == (Stop(), ())

        nursery.start_soon(owner)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


async def read(end: socket.socket) -> tuple[list[ControlMessage], int]:
    """Return the next packet's messages, and how many descriptors came with it."""
    await trio.lowlevel.wait_readable(end)
    packet, fds, _, _ = socket.recv_fds(end, messages.MAX_PACKET_BYTES, MAX_FDS)
    for fd in fds:
        os.close(fd)
    return messages.unpack(packet), len(fds)


async def test_messages_that_are_posted_together_are_one_packet_if_they_fit() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setblocking(False)
    read_end, write_end = os.pipe()
    large = Loading("x" * (PACKED_BYTES // 2))
    with theirs:
        async with opened(ours, PACKED + 2) as mailbox:
            for number in range(PACKED + 2):
                mailbox.post(Abort(number))
            assert await read(theirs) == ([Abort(number) for number in range(PACKED)], 0)
            assert await read(theirs) == ([Abort(PACKED), Abort(PACKED + 1)], 0)
            mailbox.post(Abort(1))
            mailbox.post(CONNECT, (read_end, write_end))
            mailbox.post(Abort(2))
            mailbox.post(CONNECT, (read_end,))
            assert await read(theirs) == ([Abort(1)], 0)
            assert await read(theirs) == ([CONNECT, Abort(2)], 2), "descriptors belong to a packet's first message"
            assert await read(theirs) == ([CONNECT], 1)
            mailbox.post(large)
            mailbox.post(large)
            assert await read(theirs) == ([large], 0)
            assert await read(theirs) == ([large], 0)
    os.close(read_end)
    os.close(write_end)


async def test_messages_of_the_next_turn_are_in_the_same_packet() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setblocking(False)
    with theirs:
        async with opened(ours, 8) as mailbox:
            for _ in range(20):  # trio runs the tasks of a turn in any order
                mailbox.post(Abort(1))
                await trio.lowlevel.checkpoint()
                mailbox.post(Abort(2))
                assert await read(theirs) == ([Abort(1), Abort(2)], 0)


async def test_descriptors_of_a_message_that_cannot_have_all_of_them_are_closed() -> None:
    before = len(open_descriptors())
    read_end, write_end = os.pipe()
    async with pair() as (parent, worker):
        with few_descriptors(free=1), pytest.raises(OSError, match="Too many open files"):
            parent.post(CONNECT, (read_end, write_end))
        parent.post(Stop())
        assert await worker.incoming.receive() == (Stop(), ())
    os.close(read_end)
    os.close(write_end)
    assert len(open_descriptors()) == before


def bell_rang(bell: int) -> bool:
    try:
        return bool(os.eventfd_read(bell))
    except BlockingIOError:
        return False


async def test_only_messages_that_wake_the_peer_ring_its_bell_and_all_come_in_order() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setblocking(False)
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    with theirs:
        async with open_mailbox(ours, 8, bell) as mailbox:
            mailbox.post(Abort(1), wakes=False)
            assert await read(theirs) == ([Abort(1)], 0)
            await trio.testing.wait_all_tasks_blocked()
            assert not bell_rang(bell)
            mailbox.post(Abort(2))
            mailbox.post(Abort(3), wakes=False)
            assert await read(theirs) == ([Abort(2), Abort(3)], 0)
            await trio.testing.wait_all_tasks_blocked()
            assert bell_rang(bell)
            mailbox.post(Abort(4), wakes=False)
            await trio.testing.wait_all_tasks_blocked()
            assert not bell_rang(bell)
    os.close(bell)


async def test_messages_that_wake_nothing_ring_the_bell_when_the_socket_is_full() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)  # the kernel's least, a few packets
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    with theirs:
        async with open_mailbox(ours, 10_000, bell) as mailbox:
            posted = 0
            while not mailbox.congested:
                mailbox.post(Abort(posted), wakes=False)
                posted += 1
            await trio.testing.wait_all_tasks_blocked()
            assert bell_rang(bell)
            received: list[ControlMessage] = []
            while len(received) < posted:
                received += (await read(theirs))[0]
            assert received == [Abort(number) for number in range(posted)]
    os.close(bell)


async def test_a_message_that_wakes_rings_the_bell_although_the_writer_waits_with_earlier_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer reads nothing during a long step. From then on it reads when its bell rings."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)  # the kernel's least, a few packets
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    received: list[ControlMessage] = []

    def read_all() -> None:
        while (packet := receive(theirs)) is not None:
            received.extend(packet[0])

    with theirs:
        async with open_mailbox(ours, 10_000, bell) as mailbox:
            while not mailbox.waiting:  # one message in each packet, until one waits for room and another behind it
                mailbox.post(Abort(1), wakes=False)
                await trio.testing.wait_all_tasks_blocked()
            mailbox.post(Ping(1))
            monkeypatch.setattr(mailbox, "_ring", read_all)
            read_all()
            await trio.testing.wait_all_tasks_blocked()
            assert received[-1] == Ping(1)
    os.close(bell)


async def test_a_mailbox_loses_nothing_when_its_block_is_left_before_it_is_sent() -> None:
    before = len(open_descriptors())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setblocking(False)
    read_end, write_end = os.pipe()
    with theirs:
        async with opened(ours, 8) as mailbox:
            mailbox.post(CONNECT, (read_end, write_end))
            while mailbox.waiting:  # until the writer has taken it
                await trio.lowlevel.checkpoint()
        assert await read(theirs) == ([CONNECT], 2)
    os.close(read_end)
    os.close(write_end)
    assert len(open_descriptors()) == before


async def test_a_mailbox_is_congested_while_half_of_its_capacity_is_used() -> None:
    async with pair(4) as (parent, worker):
        for number in range(2):
            assert not parent.congested
            parent.post(Abort(number))
        assert parent.congested
        assert [(await worker.incoming.receive())[0] for _ in range(2)] == [Abort(0), Abort(1)]
        assert not parent.congested
        parent.post(Abort(2))
        parent.post(Abort(3))
        assert [(await worker.incoming.receive())[0] for _ in range(2)] == [Abort(2), Abort(3)]
        assert not parent.congested
        parent.post(Abort(4))
        assert not parent.congested
        parent.post(Abort(5))
        assert parent.congested, "messages that were sent count as those that were posted"
    async with pair(9) as (parent, _):
        for number in range(5):
            assert not parent.congested
            parent.post(Abort(number))
        assert parent.congested


async def test_descriptors_after_a_packet_that_finds_no_room_are_closed() -> None:
    before = len(open_descriptors())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    read_end, write_end = os.pipe()
    overhead = len(messages.encode(Loading("x" * 70_000))) - 70_000
    packets = (Loading("x" * (messages.MAX_BYTES - overhead)), ()), (Abort(1), ()), (CONNECT, (read_end, write_end))
    with theirs:
        async with opened(ours, 8) as mailbox:
            for message, fds in packets * 2:  # the first of the second round exceeds the socket's buffer
                mailbox.post(message, fds)
            await trio.testing.wait_all_tasks_blocked()
            assert mailbox.waiting == 0, "the writer has taken them"
            mailbox.post(CONNECT, (read_end, write_end))
            await trio.testing.wait_all_tasks_blocked()
            assert mailbox.waiting == 1, "the writer is blocked"
    os.close(read_end)
    os.close(write_end)
    assert len(open_descriptors()) == before


def test_a_message_fits_into_a_packet_or_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Loading of \d+ bytes"):
        messages.encode(Loading("x" * messages.MAX_BYTES))
    largest = messages.encode(Loading("x" * (messages.MAX_BYTES - 100)))
    assert messages.unpack(messages.pack([largest])) == [Loading("x" * (messages.MAX_BYTES - 100))]


async def test_the_largest_message_crosses() -> None:
    note = Loading("x" * (messages.MAX_BYTES - 100))
    async with pair() as (parent, worker):
        parent.post(note)
        assert await worker.incoming.receive() == (note, ())


async def test_messages_of_a_peer_that_closed_with_unread_messages_are_still_read() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    async with opened(ours, 8) as mailbox:
        mailbox.post(Stop())
        await trio.testing.wait_all_tasks_blocked()  # now it is in the peer's buffer
        theirs.send(messages.pack([messages.encode(Ready(1.5))]))
        theirs.close()
        assert [message async for message, _ in mailbox.incoming] == [Ready(1.5)]


async def test_a_message_that_cannot_be_sent_is_its_sender_s_error() -> None:
    async with pair() as (parent, worker):
        with pytest.raises(ValueError, match="a control message has at most"):
            parent.post(Loading("x" * messages.MAX_BYTES))
        parent.post(Abort(1))
        assert (await worker.incoming.receive())[0] == Abort(1)


async def test_descriptors_wait_while_too_many_are_on_their_way(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts those in the sockets of all processes of a user without privileges."""
    refusals, send_fds, before = [True] * 3, socket.send_fds, open_descriptors()

    def send(*arguments: Any) -> int:
        if refusals:
            refusals.pop()
            raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")
        return send_fds(*arguments)

    monkeypatch.setattr(socket, "send_fds", send)
    memory = create_memory(4096)
    async with pair() as (parent, worker):
        parent.post(CONNECT, (memory,))
        parent.post(Stop())
        message, fds = await worker.incoming.receive()
        close_all(fds)
        assert (message, len(fds), await worker.incoming.receive()) == (CONNECT, 1, (Stop(), ()))
        refusals.append(True)
        send_all(worker._sock, [(CheckpointMemory(1), (memory,))])
        message, fds = await parent.incoming.receive()
        close_all(fds)
        assert (message, len(fds)) == (CheckpointMemory(1), 1)
    assert not refusals
    assert open_descriptors() == before


@pytest.mark.parametrize("arguments", [b"\xa1\xff", b"\x91" * 60_000 + b"\xc0"], ids=["no UTF-8", "nested too deeply"])
async def test_a_packet_that_cannot_be_decoded_ends_reading(arguments: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    encoded = messages.encode(messages.Call(7, "x", {"key": "placeholder"}))
    packet = messages.pack([encoded.replace(msgspec.msgpack.encode("placeholder"), arguments)])
    with theirs:
        async with opened(ours, 2) as mailbox:
            theirs.send(packet)
            assert [message async for message in mailbox.incoming] == []
            assert mailbox.fault is not None
            assert mailbox.fault.startswith(f"a control packet of {len(packet)} bytes cannot be decoded: ")
