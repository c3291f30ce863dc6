"""How the workers of one machine share its cores: which ones compute, with how many threads, where and how urgently.

If a language model has a thread on every core while a voice engine runs, one of its threads is preempted and the others
spin while they wait for it. So a worker with several threads uses only the cores that other workers leave free, and at
least one. A worker that begins to compute moves off the cores on which other engines run, because the kernel tends to
wake a receiver on its sender's core. The parent does so at each wake-up. Without that, it received the first of 32
concurrent texts a millisecond late.

First outputs have priority. A prompt is prefilled 5 to 8% more slowly beside a voice engine, even with a core for each,
because they share cache and memory bandwidth. So a worker with a higher ``nice`` yields its next step while a worker
with a lower one computes the first output that a client waits for. It yields for at most ``YIELD_MAX_S`` at a time, and
again only after as much idle time, or ``YIELD_MAX_S / YIELD_SHARE`` of computing. It completes a step in progress.

Rules
1. One page of shared memory has three bytes per worker: its threads (0 while it does not compute), its engine's core,
   and its urgency. The worker writes them, and the spawner once the worker is dead; all processes read them. There are
   no locks. An old value makes one step slower, or a worker yield in vain for a bounded time, and has no other effect.
2. An engine asks for its thread budget within its steps, because a step of a model may take as long as all that the
   other workers do.
3. The result of a computation must not depend on the budget (see ``StageContext.thread_budget``).
4. A thread is moved, not pinned: afterwards the kernel decides again where it runs, among the same cores as before, and
   threads that it starts may run on all of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from contextlib import suppress

from ringbuf import create_memory

WORKERS = 128
"""How many workers of one spawner have a row of their own. Any further workers share the last row."""
CORES, URGENCIES = WORKERS, 2 * WORKERS
"""Offsets of the second and the third bytes. The first bytes, the threads, begin at 0."""
SIZE = 3 * WORKERS
NO_PAGE = -1
MAX_BYTE = 255
YIELD_MAX_S, YIELD_SHARE = 1.0, 0.1
YIELD_POLL_S = 0.02
"""How often a worker that yields its step checks whether it still has to."""

_current_core = ctypes.CDLL(None).sched_getcpu


class CpuSharingPage:
    """The spawner's side of the page. The memory exists while there are workers; ``fd`` is ``NO_PAGE`` otherwise."""

    def __init__(self) -> None:
        self.fd = NO_PAGE
        self._map: mmap.mmap | None = None
        self._workers: list[int] = []

    def join(self) -> int:
        """Return the row of a new worker. Raises OSError (no memory, no descriptor)."""
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
        """Clear the row of a worker that is dead, or was never started."""
        assert self._map is not None
        self._map[number] = self._map[CORES + number] = self._map[URGENCIES + number] = 0
        self._workers.remove(number)
        if not self._workers:
            self._map.close()
            os.close(self.fd)
            self._map, self.fd = None, NO_PAGE

    def move_off_busy_core(self) -> None:
        """Move the calling thread off a core on which an engine runs, if another core is free."""
        if self._map is not None:
            _move_off_busy_core(self._map)


class NoCpuSharing:
    """The interface of ``CpuSharing`` for an engine loop that shares its cores with no other one.

    It is a context manager, in which the engine computes.
    """

    yield_poll_s: float | None = None
    """Seconds after which a loop that yields its step checks again; None while it does not yield."""
    threads = 1
    """The most threads that the engine computes with."""
    nice = 0
    """Workers with a lower value go first."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def announce_first_output(self, *, pending: bool) -> None:
        """Announce whether clients wait for a first output of this worker."""

    def should_yield(self) -> bool:
        """Return whether to leave the context without a step, so that a more urgent worker computes first."""
        return False

    def thread_budget(self) -> int:
        """Return how many threads to compute with from now on."""
        return self.threads


class CpuSharing(NoCpuSharing):
    """A worker's side of the page, for its engine's thread.

    fd: the page; this object closes it. number: the worker's row.
    """

    def __init__(self, fd: int, number: int) -> None:
        self._map = mmap.mmap(fd, SIZE)
        os.close(fd)
        self._number = number
        self._core_count = len(os.sched_getaffinity(0))
        self._yield_left_s = YIELD_MAX_S
        """How long it may still yield."""
        self._entered = self._left = time.monotonic()

    def __enter__(self) -> None:
        now = time.monotonic()
        if self.yield_poll_s is None:
            computed, rested = self._left - self._entered, now - self._left
            self._yield_left_s = min(self._yield_left_s + YIELD_SHARE * computed + rested, YIELD_MAX_S)
        else:
            self._yield_left_s -= now - self._entered
        self._entered, self.yield_poll_s = now, None
        self._publish(self.threads, 0)
        _move_off_busy_core(self._map)
        self._publish(self.threads, _core_byte())

    def __exit__(self, *_: object) -> None:
        self._publish(0, 0)
        self._left = time.monotonic()

    def thread_budget(self) -> int:
        """Return at most ``threads``, and at least one: the cores that other workers leave."""
        others = sum(self._map[:WORKERS]) - self._map[self._number]
        budget = max(1, min(self.threads, self._core_count - others))
        self._publish(budget, _core_byte())
        return budget

    def announce_first_output(self, *, pending: bool) -> None:
        self._map[URGENCIES + self._number] = self.nice + 1 if pending else 0

    def should_yield(self) -> bool:
        most_urgent = min(self._map[URGENCIES:].translate(None, b"\0"), default=MAX_BYTE)
        yields = most_urgent <= self.nice and self._yield_left_s > 0
        self.yield_poll_s = YIELD_POLL_S if yields else None
        return yields

    def _publish(self, threads: int, core: int) -> None:
        self._map[self._number] = min(threads, MAX_BYTE)
        self._map[CORES + self._number] = core


def _move_off_busy_core(page: mmap.mmap) -> None:
    """Move the calling thread from a core on which an engine runs to one on which none runs, if there is one."""
    here, busy = _core_byte(), page[CORES:URGENCIES]
    if here and here in busy:
        allowed = os.sched_getaffinity(0)
        if free := allowed.difference(core - 1 for core in busy if core):
            with suppress(OSError):  # these cores were taken from this process a moment ago
                os.sched_setaffinity(0, free)
                os.sched_setaffinity(0, allowed)


def _core_byte() -> int:
    """Return the calling thread's core as the page has it: counted from 1, or 0 if its number does not fit a byte."""
    core: int = _current_core()
    return core + 1 if core < MAX_BYTE else 0
