"""The mailbox of a worker on another node: what happens while the supervisor does not read."""

from __future__ import annotations

import trio
import trio.testing

from omni_actors.cluster.remote_worker import RemoteMailbox
from omni_actors.protocol import messages

CAPACITY = 4
SENT = [messages.Loading(f"part {n}") for n in range(3 * CAPACITY)]


def mailbox() -> RemoteMailbox:
    return RemoteMailbox(1, CAPACITY, post=lambda message: None)


def packet() -> bytes:
    return messages.pack([messages.encode(message) for message in SENT])


async def test_messages_wait_while_the_supervisor_is_busy(autojump_clock: trio.testing.MockClock) -> None:
    """As on one machine, where they wait in the worker's socket."""
    box = mailbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(box.take, packet())
        await trio.testing.wait_all_tasks_blocked()
        assert [(await box.incoming.receive())[0] for _ in SENT] == SENT
    assert box.fault is None


async def test_a_worker_whose_messages_are_not_read_is_at_fault(autojump_clock: trio.testing.MockClock) -> None:
    box = mailbox()
    await box.take(packet())
    assert box.fault == "its control messages are not read: 4 wait, which is the limit"
    assert [message for message, _ in box.unread()] == SENT[:CAPACITY]
    await box.take(packet())


async def test_a_worker_that_is_lost_while_its_message_waits(autojump_clock: trio.testing.MockClock) -> None:
    box = mailbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(box.take, packet())
        await trio.testing.wait_all_tasks_blocked()
        box.fail("NodeLost: a")
    assert box.fault == "NodeLost: a"
