"""Which devices each worker of a stage gets: pure functions.

Rules
1. ``devices`` lists places among the visible devices (0, 1, …), or names as in CUDA_VISIBLE_DEVICES ("GPU-…", "MIG-…").
2. A list as long as one worker's share is a *template*: worker r takes each place plus r × ``devices_per_replica``.
3. A list as long as all workers' shares together is a *pool*: worker r takes the r-th slice.
4. Two workers never get one device, unless ``share_devices``: then every worker takes the template as it is, and a pool
   may list a device twice.
5. Standbys count as workers. A pool of n × ``devices_per_replica`` devices has room for n workers at most, also later.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import TypeAlias

from omni_actors.config.schema import Stage
from omni_actors.errors import OmniError

Device: TypeAlias = int | str
"""A place among the visible devices, or a name as in CUDA_VISIBLE_DEVICES."""
Layout: TypeAlias = tuple[tuple[str, ...], ...]
"""For each worker, the names of its devices as in CUDA_VISIBLE_DEVICES."""

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable by which a process is shown some of a machine's devices."""


class DeviceLayoutError(OmniError):
    """The devices that a stage lists do not fit its number of workers.

    Attributes:
        devices: What the stage lists: places among the visible devices, or names.
        workers: Number of workers, standbys included.
        per_worker: Devices of each worker (``devices_per_replica``).
        reason: What does not fit, in words.
        accepted: Both lengths that would fit, in words.
    """

    def __init__(self, devices: Sequence[int | str], workers: int, per_worker: int, reason: str) -> None:
        self.devices, self.workers, self.per_worker, self.reason = tuple(devices), workers, per_worker, reason
        self.accepted = (
            f"a pool of {workers * per_worker} ({workers} workers with {per_worker} each), or a template of"
            f" {per_worker}, which each further worker takes shifted by {per_worker}"
        )
        super().__init__(f"devices {list(self.devices)}: {reason}; accepted: {self.accepted}")


class NoSuchDevice(OmniError):
    """A process sees no device at a place. visible: those that it sees, as in CUDA_VISIBLE_DEVICES."""

    def __init__(self, place: str, visible: Sequence[str]) -> None:
        self.place, self.visible = place, tuple(visible)
        super().__init__(f"there is no device {place}: the process that starts the worker sees {list(visible)}")


def visible_devices(variable: str | None, present: int) -> tuple[str, ...] | None:
    """Return the names of the devices that a process sees; None: unknown.

    As in CUDA, an empty name or -1 in ``variable`` hides all that follows.

    Args:
        variable: The value of CUDA_VISIBLE_DEVICES; None if it is not set.
        present: Number of devices of the machine; 0: unknown.

    >>> visible_devices("3,1,-1,0", 4)
    ('3', '1')
    """
    if variable is None:
        return tuple(map(str, range(present))) or None
    names = [name.strip() for name in variable.split(",")]
    end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    return tuple(names[:end])


def at_places(places: Sequence[str], variable: str | None) -> tuple[str, ...]:
    """Return the names of the devices at some places among those that a process sees. Other names are left as they are.

    variable: The process's value of CUDA_VISIBLE_DEVICES; None if it is not set, so that it sees all devices.

    Raises NoSuchDevice.

    >>> at_places(["0", "GPU-5a"], "6,7")
    ('6', 'GPU-5a')
    """
    visible = visible_devices(variable, 0)
    if visible is None:
        return tuple(places)
    for place in places:
        if place.isdigit() and int(place) >= len(visible):
            raise NoSuchDevice(place, visible)
    return tuple(visible[int(place)] if place.isdigit() else place for place in places)


def configured_devices(stage: Stage) -> tuple[Device, ...]:
    """Return the devices that a stage lists, a single ``device: cuda:1`` included; none for other kinds of devices."""
    found = re.fullmatch(r"cuda(?::(\d+))?", stage.device)
    if found is None:
        return ()
    first = int(found[1] or 0)
    return stage.devices or tuple(range(first, first + stage.devices_per_replica))


def stage_layout(stage: Stage, workers: int, visible: Sequence[str] | None) -> Layout:
    """Return the devices of each of ``workers`` workers of ``stage``, by the rules above; none for a stage on the CPU.

    Raises DeviceLayoutError.

    >>> stage_layout(Stage(engine="echo", device="cuda:1"), 2, visible=["0", "1", "5"])
    (('1',), ('5',))
    """
    devices = configured_devices(stage)
    if not devices:
        return ((),) * workers
    return layout(devices, workers, stage.devices_per_replica, visible=visible, shared=stage.share_devices)


def layout(
    devices: Sequence[Device],
    workers: int,
    per_worker: int = 1,
    *,
    visible: Sequence[str] | None = None,
    shared: bool = False,
) -> Layout:
    """Return the devices of each worker, by the rules above. The same arguments give the same layout.

    Args:
        devices: The template or the pool. A pool may be larger than the workers need.
        workers: Number of workers; 0 is allowed.
        per_worker: Devices of each worker.
        visible: Names of the visible devices; None: unknown, and place 3 has the name "3".
        shared: Whether two workers may get one device.

    Raises:
        DeviceLayoutError: The list has the wrong length or mixes places and names, a place is not visible, or two
            workers would get one device.

    >>> layout([0, 1, 2, 3], 2, 2)  # a pool
    (('0', '1'), ('2', '3'))
    >>> layout([4], 3)  # a template
    (('4',), ('5',), ('6',))
    """

    def refuse(reason: str) -> DeviceLayoutError:
        return DeviceLayoutError(tuple(devices), workers, per_worker, reason)

    if len({isinstance(device, int) for device in devices}) > 1:
        raise refuse("places (0, 1, …) and names cannot be mixed")
    if len(devices) == per_worker:
        places = [_shifted(devices, 0 if shared else worker * per_worker) for worker in range(workers)]
        if None in places:
            raise refuse("names cannot be shifted; list the devices of every worker, or set share_devices")
    elif len(devices) % per_worker == 0 and len(devices) >= workers * per_worker:
        places = [tuple(devices[at : at + per_worker]) for at in range(0, workers * per_worker, per_worker)]
    else:
        raise refuse(f"a pool of {len(devices)} devices has no room for {workers} workers with {per_worker} each")
    try:
        named = tuple(tuple(_name(device, visible) for device in each or ()) for each in places)
    except IndexError:
        raise refuse(f"only {len(visible or ())} devices are visible") from None
    if any(_overlap(each) for each in named):
        raise refuse("one worker would get a device twice")
    if not shared and _overlap([name for each in named for name in each]):
        raise refuse("two workers would get one device; share_devices: true allows it")
    return named


def check_length(stage: Stage) -> None:
    """Check that a stage lists exactly as many devices as its workers need. Raises DeviceLayoutError that says both.

    ``layout`` itself takes a pool that is too large: a stage may get fewer workers later. A stage that begins without
    workers may list any pool. With ``autoscale``, the list has room for the largest number of workers.
    """
    devices, each, workers = configured_devices(stage), stage.devices_per_replica, stage.most_workers
    fits = len(devices) == each or (len(devices) == workers * each if workers else not len(devices) % each)
    if devices and not fits:
        reason = f"{len(devices)} devices are neither a template nor a pool"
        raise DeviceLayoutError(devices, workers or 1, each, reason)


def _shifted(devices: Sequence[Device], offset: int) -> tuple[Device, ...] | None:
    """Return a template shifted by ``offset`` places; None if it has names, which cannot be shifted."""
    if offset == 0:
        return tuple(devices)
    places = tuple(device + offset for device in devices if isinstance(device, int))
    return places if len(places) == len(devices) else None


def _name(device: Device, visible: Sequence[str] | None) -> str:
    """Return the name of a device. Raises IndexError: the place is not visible."""
    if isinstance(device, str):
        return device
    return str(device) if visible is None else visible[device]


def is_one_device(first: str, second: str) -> bool:
    """Whether two names, both places or both UUIDs, are one device. CUDA takes the unique beginning of a UUID for it.

    >>> is_one_device("1", "11"), is_one_device("GPU-8932f937", "GPU-89")
    (False, True)
    """
    name, longer = sorted((first, second))
    return longer == name or (longer.startswith(name) and not name.isdigit())


def _overlap(names: Sequence[str]) -> bool:
    """Whether two names are one device."""
    return any(is_one_device(name, later) for name, later in itertools.pairwise(sorted(names)))
