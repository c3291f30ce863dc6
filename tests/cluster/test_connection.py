"""The control connection as trio uses it: what waits to be sent is bounded, and nothing is left out."""

from __future__ import annotations

import secrets

import pytest
import trio
import trio.testing

from omni_actors.cluster import connection, control
from omni_actors.cluster.connection import Connection, ConnectionLost

KEYS = secrets.token_bytes(32), secrets.token_bytes(32)


async def test_a_connection_that_has_left_a_message_out_is_lost_also_when_it_is_empty_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More is posted than may wait while one frame is being sent. The queue is empty when the bound is checked."""
    monkeypatch.setattr(connection, "MOST_WAITING", 1000)
    near, far = trio.testing.lockstep_stream_pair()  # sending waits until the other side has received
    sender = Connection(near, KEYS, control.TO_AGENT)
    sender.post(control.FromWorker(1, bytes(10)))
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_write_until_lost, sender)
            await trio.testing.wait_all_tasks_blocked()
            for n in range(3):
                sender.post(control.FromWorker(n, bytes(600)))
            while await far.receive_some(1 << 20):
                pass


async def _write_until_lost(sender: Connection[control.ToAgent]) -> None:
    with pytest.raises(ConnectionLost, match="more than 1000 bytes wait to be sent"):
        await sender.write()
    await sender.close()
