"""What a replica needs for a worker: a place, devices that no other worker loads onto, and the memory it shares."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import trio

from omni_actors.config.devices import VISIBLE, is_one_device
from omni_actors.protocol.messages import WorkerSpec
from omni_actors.supervisor.process import Spawner, SpawnFailed, Worker
from omni_actors.supervisor.replica import Replica


async def wait_place(spawner: Spawner, replica: Replica, changes: trio.lowlevel.ParkingLot) -> tuple[str, ...]:
    """Wait until a worker of a replica can be started somewhere. It is no checkpoint if one can be.

    The time does not count as loading. Meanwhile the replica's note says what it waits for. changes: woken when it
    begins to wait, or the reason changes. Returns which devices of this machine the worker gets.
    """
    note, incarnation = replica.note, replica.incarnation

    def on_waiting(reason: str) -> None:
        replica.note = incarnation.no_place = reason
        changes.unpark_all()

    devices = await spawner.wait_place(replica.address, on_waiting)
    replica.note, incarnation.no_place = note, None
    return replica.spec.devices if devices is None else devices


async def lock_devices(replica: Replica, devices: tuple[str, ...]) -> None:
    """Lock devices of this machine for the current incarnation of a replica. It is no checkpoint if all are free.

    The supervisor releases the locks when the worker is ready, or has ended. Raises DeviceBusy, SpawnFailed.
    """
    incarnation = replica.incarnation
    if devices:
        note, replica.note = replica.note, f"waiting for {', '.join(devices)}"
        try:
            await incarnation.device_locks.acquire(devices, replica.stage.device_lock_timeout_s)
        except OSError as error:
            raise SpawnFailed(f"the device locks of worker {replica.address} could not be opened: {error}") from error
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


def same_memory(producer: WorkerSpec, consumer: WorkerSpec) -> bool:
    """Return whether two workers of this machine hand tensors over by handle, in a memory that both compute in.

    With ``device_handles: cuda``: each has one device, and it is the same. With "host": both compute on the CPU. A
    place ("0") and a UUID may name one device, which cannot be seen here: then the tensors travel as bytes.
    """
    kind, workers = producer.device_handles, (producer, consumer)
    if kind != consumer.device_handles:
        return False
    if kind == "host":
        return all(each.device == "cpu" and not each.devices for each in workers)
    one_each = all(each.device.startswith("cuda") and len(each.devices) == 1 for each in workers)
    return kind == "cuda" and one_each and is_one_device(producer.devices[0], consumer.devices[0])
