"""The machine's cores, as its workers share them: who computes now, with how many native threads, where, and for whom.

A language model with a thread on every core and a voice beside it get in each other's way: one of the model's threads
waits awake for the other, which the voice keeps from its core. So a worker with several threads computes with those
that the others leave, and with one at least. And whoever begins to compute moves off the cores on which the engines of
others run: the kernel likes to wake a receiver on its sender's core, and the sender has more to do. So does the parent,
whenever it wakes up: with the first text of 32 in hand it waited a millisecond, until all were sent.

First words go first: a prompt that is read beside a voice is read 5 to 8% later, though each has a core, since they
share the cache and the memory. So a worker that stands back (``nice``) lets those that stand back less give out the
first of what clients wait for: ``LONGEST_S`` at a time, and again after as much time with nothing to do, or after
``LONGEST_S / SHARE`` of computing. Its step that is under way it ends.

Rules
1. One page of shared memory, three bytes a worker: its threads, 0 while it does not compute, its engine's core, and how
   urgent it is. Its owner writes them, and the spawner once the owner is dead; all read. There are no locks: who sees
   an old value is slower for a step, or waits in vain for as long as it waits at all, and nothing else follows.
2. Who looks for threads to take only between its steps reacts too late: a step of a model may take as long as all that
   the others do.
3. What is computed must not depend on it (see ``StageContext.thread_budget``).
4. A thread is moved and not kept: where it runs from then on the kernel decides, among the cores that it was allowed
   before, and threads that it starts may run on all of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from contextlib import suppress

from ringbuf import create_memory

WORKERS = 128
"""Of one spawner that have bytes of their own; those beyond share two, and are seen or not."""
PLACES, URGENT = WORKERS, 2 * WORKERS
"""Where the second and the third bytes begin."""
SIZE = 3 * WORKERS
MOST = 255
"""That a byte can tell of. A core with a higher number is not told of."""
LONGEST_S, SHARE = 1.0, 0.1
LOOK_AGAIN_S = 0.02

_current_core = ctypes.CDLL(None).sched_getcpu


class CpuSharingPage:
    """The spawner's side. There is memory while a worker lives: ``fd`` is -1 without."""

    def __init__(self) -> None:
        self.fd = -1
        self._map: mmap.mmap | None = None
        self._workers: list[int] = []

    def join(self) -> int:
        """A new worker's number. Raises OSError (no memory, no descriptor)."""
        if self._map is None:
            fd = create_memory(SIZE)
            try:
                self._map = mmap.mmap(fd, SIZE)
            except BaseException:
                os.close(fd)
                raise
            self.fd = fd
        number = min(set(range(WORKERS)).difference(self._workers), default=WORKERS - 1)
        self._workers.append(number)
        return number

    def leave(self, number: int) -> None:
        """That worker is dead, or never was."""
        assert self._map is not None
        self._map[number] = self._map[PLACES + number] = self._map[URGENT + number] = 0
        self._workers.remove(number)
        if not self._workers:
            self._map.close()
            os.close(self.fd)
            self._map, self.fd = None, -1

    def move_off_busy_core(self) -> None:
        """To whatever engine runs on the calling thread's core."""
        if self._map is not None:
            _move_off(self._map)


class NoCpuSharing:
    """CpuSharing that are shared with nobody. A context in which an engine computes."""

    yield_poll_s: float | None = None
    """While it stands back: when to enter again at the latest."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def announce_first_output(self, *, pending: bool) -> None:
        """Whether clients wait for the first that is given out."""

    def should_yield(self) -> bool:
        """Whether to let others go first now: to leave, and enter again."""
        return False


class CpuSharing(NoCpuSharing):
    """A worker's side, for its engine's thread. Takes over ``fd``."""

    def __init__(self, fd: int, number: int) -> None:
        self._map = mmap.mmap(fd, SIZE)
        os.close(fd)
        self._number = number
        self._cores = len(os.sched_getaffinity(0))
        self.threads = 1
        """The most that it computes with."""
        self.nice = 0
        """How far it stands back."""
        self._patience = LONGEST_S
        """For how long it would let others go first."""
        self._entered = self._left = time.monotonic()

    def __enter__(self) -> None:
        now = time.monotonic()
        if self.yield_poll_s is None:
            computed, rested = self._left - self._entered, now - self._left
            self._patience = min(self._patience + SHARE * computed + rested, LONGEST_S)
        else:
            self._patience -= now - self._entered
        self._entered, self.yield_poll_s = now, None
        self._say(self.threads, 0)
        _move_off(self._map)
        self._say(self.threads, _here())

    def __exit__(self, *_: object) -> None:
        self._say(0, 0)
        self._left = time.monotonic()

    def thread_budget(self) -> int:
        """With how many threads to compute from now on: ``threads``, or those that the other workers leave."""
        others = sum(self._map[:WORKERS]) - self._map[self._number]
        team = max(1, min(self.threads, self._cores - others))
        self._say(team, _here())
        return team

    def announce_first_output(self, *, pending: bool) -> None:
        self._map[URGENT + self._number] = self.nice + 1 if pending else 0

    def should_yield(self) -> bool:
        most_urgent = min(self._map[URGENT:].translate(None, b"\0"), default=MOST)
        stands_back = most_urgent <= self.nice and self._patience > 0
        self.yield_poll_s = LOOK_AGAIN_S if stands_back else None
        return stands_back

    def _say(self, threads: int, place: int) -> None:
        self._map[self._number] = min(threads, MOST)
        self._map[PLACES + self._number] = place


def _move_off(page: mmap.mmap) -> None:
    """From a core on which an engine runs to one on which none does, if there is one: the calling thread."""
    here, places = _here(), page[PLACES:URGENT]
    if here and here in places:
        allowed = os.sched_getaffinity(0)
        if free := allowed.difference(core - 1 for core in places if core):
            with suppress(OSError):  # these cores were taken from this process a moment ago
                os.sched_setaffinity(0, free)
                os.sched_setaffinity(0, allowed)


def _here() -> int:
    """The core of the calling thread, as the page tells of it: counted from 1, and 0 where it cannot be told."""
    core: int = _current_core()
    return core + 1 if core < MOST else 0
