"""The descriptors of this process."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


def open_descriptors() -> set[str]:
    """Return the numbers of the open descriptors, after those that only garbage of earlier tests held are closed."""
    gc.collect()
    gc.freeze()  # with torch loaded a collection takes half a second; the next one visits only what is new
    return set(os.listdir("/proc/self/fd"))


def weights_in_memory() -> list[int]:
    """Return the descriptors of the files that ``update_weights`` has written for tensors."""
    links = {number: f"/proc/self/fd/{number}" for number in open_descriptors()}
    targets = {int(number): os.readlink(link) for number, link in links.items() if os.path.lexists(link)}
    return [number for number, target in targets.items() if "memfd:weights" in target]


@contextmanager
def few_descriptors(free: int = 0) -> Iterator[None]:
    """Leave this process no descriptors but ``free`` ones, within the block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, open_descriptors())) + 8, before[1]))
    held = list[int]()
    try:
        try:
            while True:
                held.append(os.dup(0))
        except OSError:
            for each in held[:free]:
                os.close(each)
            del held[:free]
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in held:
            os.close(each)
