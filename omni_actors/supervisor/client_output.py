"""Delivers what a worker sends to the client, through a ring, to the listener."""

from __future__ import annotations

from contextlib import aclosing

import trio

from omni_actors.protocol.messages import Address
from omni_actors.supervisor.edges import receive_frames
from omni_actors.supervisor.listener import Listener
from omni_actors.supervisor.replica import Replica
from ringbuf import Consumer, RingClosed, RingError


@trio.lowlevel.enable_ki_protection
async def deliver(replica: Replica, consumer: Consumer, listener: Listener) -> None:
    """Deliver the outputs of a worker while it lives.

    A worker is killed if it has corrupted the ring, or if there is no memory for a copy of one of its outputs.
    """
    try:
        async with aclosing(receive_frames(consumer)) as frames:
            async for frame in frames:
                with frame:
                    if replica.incarnation.over:
                        return  # all was delivered
                    _hand_over(listener, replica.address, frame.data)
    except (RingError, MemoryError) as error:
        replica.kill(_fault(error))


def deliver_rest(replica: Replica, consumer: Consumer, listener: Listener) -> None:
    """Deliver what is left in the ring of a dead worker, which may have reported that it has finished."""
    try:
        while (frame := consumer.try_recv()) is not None:
            with frame:
                _hand_over(listener, replica.address, frame.data)
    except RingClosed:
        pass  # the worker had closed it: nothing is left
    except (RingError, MemoryError) as error:
        replica.kill(_fault(error))


def _hand_over(listener: Listener, address: Address, data: memoryview) -> None:
    """Hand a copy of a chunk to the listener. Raises ringbuf.RingError, and MemoryError if there is none for the copy.

    Lack of memory in the listener is no fault of the worker. The chunk may count as received by then, so that a replay
    would lose it. So that ends the system, as any other exception there.
    """
    copy = memoryview(bytearray(data))
    try:
        listener.on_output(address, copy)
    except MemoryError as error:
        raise RuntimeError(f"there is no memory to process an output of {address}") from error


def _fault(error: RingError | MemoryError) -> str:
    """Return why a worker is killed whose output cannot be delivered."""
    what = "there is no memory for its output" if isinstance(error, MemoryError) else error
    return f"{type(error).__name__}: {what}"
