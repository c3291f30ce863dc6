"""Tasks that a block needs until it has ended, also when the block is cancelled from outside."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def open_shielded_nursery() -> AsyncIterator[trio.Nursery]:
    """Give a nursery for tasks on which the block depends.

    A cancellation from outside reaches the block first, and the tasks once the block has ended. The end of the block
    cancels them. What the block raises is raised as it is, in no exception group. An exception of a task cancels the
    block, and is raised in a group.
    """
    body_error: BaseException | None = None
    async with trio.open_nursery() as outer:
        with trio.CancelScope(shield=True):  # ``_hold`` must have reached ``outer`` before it may be cancelled
            tasks = await outer.start(_hold)
        try:
            yield tasks
        except BaseException as error:  # noqa: BLE001
            body_error = error  # raised below, outside the nursery's exception group
        finally:
            outer.cancel_scope.shield = True  # a cancellation from outside must not replace ``body_error``
            tasks.cancel_scope.cancel()
    if body_error is not None:
        raise body_error


@trio.lowlevel.enable_ki_protection
async def _hold(*, task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """Keep a shielded nursery open until it is cancelled."""
    async with trio.open_nursery() as tasks:
        tasks.cancel_scope.shield = True
        task_status.started(tasks)
        await trio.sleep_forever()
