"""Delivers what a worker sends to the client, through a ring, to the listener."""

from __future__ import annotations

from contextlib import aclosing

import trio

from omni_actors.supervisor.edges import receive_frames
from omni_actors.supervisor.listener import Listener
from omni_actors.supervisor.replica import Replica
from ringbuf import Consumer, RingClosed, RingError


@trio.lowlevel.enable_ki_protection
async def deliver(replica: Replica, consumer: Consumer, listener: Listener) -> None:
    """Deliver the outputs of a worker while it lives. A worker that has corrupted the ring is killed."""
    try:
        async with aclosing(receive_frames(consumer)) as frames:
            async for frame in frames:
                with frame:
                    if replica.incarnation.over:
                        return  # all was delivered
                    listener.on_output(replica.address, frame.data)
    except RingError as error:
        replica.kill(f"{type(error).__name__}: {error}")


def deliver_rest(replica: Replica, consumer: Consumer, listener: Listener) -> None:
    """Deliver what is left in the ring of a dead worker, which may have reported that it has finished."""
    try:
        while (frame := consumer.try_recv()) is not None:
            with frame:
                listener.on_output(replica.address, frame.data)
    except RingClosed:
        pass  # the worker had closed it: nothing is left
    except RingError as error:
        replica.kill(f"{type(error).__name__}: {error}")
