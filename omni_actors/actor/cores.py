"""The machine's cores, as its workers share them: with how many native threads each computes just now.

A language model with a thread on every core and a voice beside it get in each other's way: one of the model's threads
waits awake for the other, which the voice keeps from its core. So a worker with several threads computes with those
that the others leave, and with one at least.

Rules
1. One page of shared memory, a byte a worker. Its owner writes it, and the spawner once the owner is dead; all read.
   There are no locks: who sees an old value is slower for a moment, and nothing else follows.
2. Who looks only between its steps reacts too late: a step of a model may take as long as all that the others do.
3. What is computed must not depend on it (see ``StageContext.team``).
"""

from __future__ import annotations

import mmap
import os

from ringbuf._descriptors import create_memory

SIZE = 256
"""Workers of one spawner that have a byte of their own; those beyond share one."""
MOST = 255


class SharedCores:
    """The spawner's side. There is memory while a worker lives."""

    def __init__(self) -> None:
        self.fd = -1
        self._map: mmap.mmap | None = None
        self._workers: list[int] = []

    def join(self) -> int:
        """A new worker's number. Raises OSError (no memory, no descriptor)."""
        if self._map is None:
            self.fd = create_memory(SIZE)
            self._map = mmap.mmap(self.fd, SIZE)
        number = min(set(range(SIZE)).difference(self._workers), default=SIZE - 1)
        self._workers.append(number)
        return number

    def leave(self, number: int) -> None:
        """That worker is dead, or never was."""
        assert self._map is not None
        self._map[number] = 0
        self._workers.remove(number)
        if not self._workers:
            self._map.close()
            os.close(self.fd)
            self._map, self.fd = None, -1


class Cores:
    """A worker's side, for its engine's thread; a context in which it computes. Takes over ``fd``."""

    def __init__(self, fd: int, number: int) -> None:
        self._map = mmap.mmap(fd, SIZE)
        os.close(fd)
        self._number = number
        self._cores = len(os.sched_getaffinity(0))
        self.threads = 1
        """The most that it computes with."""

    def __enter__(self) -> None:
        self._map[self._number] = min(self.threads, MOST)

    def __exit__(self, *_: object) -> None:
        self._map[self._number] = 0

    def team(self) -> int:
        """With how many threads to compute from now on: ``threads``, or those that the other workers leave."""
        others = sum(self._map[:]) - self._map[self._number]
        team = max(1, min(self.threads, self._cores - others))
        self._map[self._number] = min(team, MOST)
        return team
