"""The heartbeat of a worker: it has to load, and its engine loop to make progress, in the time its stage allows."""

from __future__ import annotations

import trio

from omni_actors.protocol.messages import Ping
from omni_actors.supervisor.replica import Replica

PARTS = 20
"""A ping follows the last answer after ``step_timeout_s / PARTS``, so a hang is found within 1.05 times the timeout."""


@trio.lowlevel.enable_ki_protection
async def watch_progress(replica: Replica) -> None:
    """Kill a worker that is not ready in ``load_timeout_s``, or whose engine loop takes no turn in ``step_timeout_s``.

    At most one ping is unanswered at a time, and a sleeping loop answers at once. So a hang is detected when the next
    ping has waited for ``step_timeout_s``. Returns once it has killed the worker; otherwise runs until cancelled.
    """
    stage, incarnation = replica.stage, replica.incarnation
    await incarnation.may_load.wait()
    if not await set_within(stage.load_timeout_s, incarnation.ready):
        replica.kill(f"not loaded within {stage.load_timeout_s:g} s (load_timeout_s)")
        return
    while True:
        incarnation.ping += 1
        incarnation.pong = trio.Event()
        # A call that is posted already, such as new weights, may take as long as its caller waits.
        call_s = incarnation.calls.remaining_s()
        timeout_s = max(stage.step_timeout_s, call_s)
        replica.post(Ping(incarnation.ping))
        if not await set_within(timeout_s, incarnation.pong):
            setting = "step_timeout_s" if call_s <= stage.step_timeout_s else "the timeout of a call to its engine"
            replica.kill(f"no progress for {timeout_s:g} s ({setting})")
            return
        await trio.sleep(stage.step_timeout_s / PARTS)


async def set_within(timeout_s: float, event: trio.Event) -> bool:
    """Return whether ``event`` is set within ``timeout_s`` seconds during which this process itself runs.

    A time in which this process does not run (a caller that computes, SIGSTOP) counts as one part of ``PARTS`` at the
    most, because the worker's answer may have arrived meanwhile and still be unread.
    """
    for _ in range(PARTS):
        with trio.move_on_after(timeout_s / PARTS):
            await event.wait()
            return True
    return False
