"""What a replica needs of its devices: that no other worker loads onto them, and that its worker sees no others."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from omni_actors.config.devices import VISIBLE
from omni_actors.supervisor.process import Spawner, Worker
from omni_actors.supervisor.replica import Replica


async def lock_devices(replica: Replica) -> None:
    """Lock the devices of a replica for its current incarnation. It is no checkpoint if all are free.

    The supervisor releases the locks when the worker is ready, or has ended. Raises DeviceBusy.
    """
    devices, incarnation = replica.spec.devices, replica.incarnation
    if devices:
        note, replica.note = replica.note, f"waiting for {', '.join(devices)}"
        await incarnation.device_locks.acquire(devices, replica.stage.device_lock_timeout_s)
        replica.note = note
    incarnation.may_load.set()


def spawn(spawner: Spawner, replica: Replica, mailbox_capacity: int) -> AbstractAsyncContextManager[Worker]:
    """Spawn a worker of a replica (``Spawner.spawn``), with its environment variables and its part of the locks."""
    devices = replica.spec.devices
    return spawner.spawn(
        replica.address,
        mailbox_capacity,
        environment={**replica.stage.env, **({VISIBLE: ",".join(devices)} if devices else {})},
        lock_fds=replica.incarnation.device_locks.fds,
    )
