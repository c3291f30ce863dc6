"""The descriptors of this process."""

from __future__ import annotations

import gc
import os


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
