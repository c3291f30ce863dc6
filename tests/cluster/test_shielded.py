"""The tasks on which a block depends: they end after it, whatever ends it."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from omni_actors.cluster.shielded import open_shielded_nursery


async def _note_end(ends: list[str], *, task_status: trio.TaskStatus[None]) -> None:
    try:
        task_status.started()
        await trio.sleep_forever()
    finally:
        ends.append("task")


async def test_a_cancellation_from_outside_ends_the_block_first() -> None:
    ends: list[str] = []
    with trio.fail_after(10), trio.CancelScope() as scope:
        async with open_shielded_nursery() as nursery:
            await nursery.start(_note_end, ends)
            scope.cancel()
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.testing.wait_all_tasks_blocked()
                ends.append("block")
    assert ends == ["block", "task"]


async def test_a_cancellation_before_the_first_task_has_started_ends_it() -> None:
    ends: list[str] = []

    async def start(*, task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep_forever()

    with trio.fail_after(10), trio.CancelScope() as scope:
        scope.cancel()
        async with open_shielded_nursery() as nursery:
            await nursery.start(start)
            ends.append("not reached")
    assert not ends


async def test_an_error_of_the_block_is_in_no_group() -> None:
    ends: list[str] = []

    async def run() -> None:
        async with open_shielded_nursery() as nursery:
            await nursery.start(_note_end, ends)
            raise ZeroDivisionError

    with trio.fail_after(10), pytest.raises(ZeroDivisionError):
        await run()
    assert ends == ["task"]


async def test_an_error_of_a_task_cancels_the_block() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with trio.fail_after(10), pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with open_shielded_nursery() as nursery:
            nursery.start_soon(fail)
            await trio.sleep_forever()
