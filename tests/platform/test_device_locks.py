"""Device locks: exclusive, taken in one order, released by any death, refused at a deadline with the holder's pid."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest
import trio
import trio.testing

from omni_actors.platform.device_locks import DeviceBusy, DeviceLocks
from omni_actors.worker.device_locks import InheritedLocks

WATCHDOG_S = 60.0


@pytest.fixture
def names() -> list[str]:
    """Two devices that no other process locks."""
    tag = uuid.uuid4()
    return [f"GPU-{tag}-{number}" for number in range(2)]


def lock_names() -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line.rpartition(" ")[2] for line in lines if "@omni-actors/device/" in line]


async def test_free_locks_are_taken_without_a_checkpoint_and_leave_nothing(names: list[str]) -> None:
    locks = DeviceLocks()
    with trio.testing.assert_no_checkpoints():
        await locks.acquire(reversed(names), 1.0)
    assert [name for name in lock_names() if names[0] in name] == [f"@omni-actors/device/{names[0]}"]
    assert len(locks.fds) == 2
    locks.release()
    locks.release()
    assert not [name for name in lock_names() if names[0] in name]


async def test_a_busy_device_is_refused_with_its_holder_and_no_lock_is_kept(names: list[str]) -> None:
    holder, late, free = DeviceLocks(), DeviceLocks(), DeviceLocks()
    await holder.acquire(names[1:], 1.0)
    with pytest.raises(DeviceBusy) as caught:
        await late.acquire(names, 0.02)
    assert (caught.value.device, caught.value.holder_pid, late.fds) == (names[1], os.getpid(), ())
    await free.acquire(names[:1], 0.02)
    for locks in (holder, free):
        locks.release()


async def test_waiters_get_a_lock_one_after_another(names: list[str]) -> None:
    holding = 0

    async def take_both(order: list[str]) -> None:
        nonlocal holding
        locks = DeviceLocks()
        await locks.acquire(order, WATCHDOG_S)
        holding += 1
        assert holding == 1
        await trio.testing.wait_all_tasks_blocked()
        holding -= 1
        locks.release()

    with trio.fail_after(WATCHDOG_S):
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(take_both, names[:: 1 if number % 2 else -1])


async def test_a_cancelled_waiter_holds_nothing(names: list[str]) -> None:
    holder, late = DeviceLocks(), DeviceLocks()
    await holder.acquire(names[1:], 1.0)
    with trio.move_on_after(0.02):
        await late.acquire(names, WATCHDOG_S)
    assert late.fds == ()
    holder.release()


async def test_a_lock_lasts_until_parent_and_worker_have_released_it(names: list[str]) -> None:
    parent, late = DeviceLocks(), DeviceLocks()
    await parent.acquire(names, 1.0)
    worker = InheritedLocks([os.dup(fd) for fd in parent.fds])
    parent.release()
    with pytest.raises(DeviceBusy):
        await late.acquire(names, 0.02)
    worker.release()
    await late.acquire(names, 0.02)
    late.release()


async def test_a_name_that_is_bound_and_does_not_listen_yet_is_waited_for(names: list[str]) -> None:
    late = DeviceLocks()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"\0omni-actors/device/{names[0]}")
        with pytest.raises(DeviceBusy, match="an unknown process"):
            await late.acquire(names, 0.05)
    await late.acquire(names, 1.0)
    late.release()


HOLDER = """
    import sys, time, trio
    from omni_actors.platform.device_locks import DeviceLocks

    async def hold():
        locks = DeviceLocks()
        await locks.acquire(sys.argv[1:], 60.0)
        print("held", flush=True)
        time.sleep(3600)

    trio.run(hold)
"""


def start_holder(names: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(HOLDER), *names], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


async def test_a_killed_holder_holds_nothing(names: list[str]) -> None:
    locks = DeviceLocks()
    with start_holder(names) as process, trio.fail_after(WATCHDOG_S):
        with pytest.raises(DeviceBusy) as caught:
            await locks.acquire(names, 0.02)
        assert caught.value.holder_pid == process.pid
        async with trio.open_nursery() as nursery:
            nursery.start_soon(locks.acquire, names, WATCHDOG_S)
            await trio.testing.wait_all_tasks_blocked()
            process.kill()
    assert len(locks.fds) == len(names)
    locks.release()
    assert not [name for name in lock_names() if names[0] in name]


async def test_long_names_that_differ_have_locks_that_differ(names: list[str]) -> None:
    long = [f"GPU-{'é' * 80}-{name}" for name in names]
    one, other, late = DeviceLocks(), DeviceLocks(), DeviceLocks()
    await one.acquire(long[:1], 0.02)
    await other.acquire(long[1:], 0.02)
    with pytest.raises(DeviceBusy):
        await late.acquire(long[:1], 0.02)
    for locks in (one, other):
        locks.release()


async def test_a_forked_process_has_no_part_of_the_locks(names: list[str]) -> None:
    holder, late = DeviceLocks(), DeviceLocks()
    await holder.acquire(names, 1.0)
    wait, end = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(end)
        os.read(wait, 1)
        os._exit(0)
    try:
        with pytest.raises(DeviceBusy):
            await late.acquire(names, 0.02)
        holder.release()
        await late.acquire(names, WATCHDOG_S / 2)
        late.release()
    finally:
        os.close(wait)
        os.close(end)
        os.waitpid(pid, 0)  # noqa: ASYNC222 - it has ended
