"""The worker process: the engine loop, and a main thread that waits for the end.

Rules
1. The engine loop has a thread of its own, which also loads the model and has the control connection to itself.
2. The worker outlives neither its parent nor its control connection, whatever the engine does: the main thread ends it.
3. Only the parent ends a worker. It ignores SIGINT and SIGTERM, which a terminal and systemd send to all processes of a
   server: the parent may still drain the requests that the worker serves.
4. An exception of the engine ends the process: traceback on stderr, exit code 1. The supervisor decides what follows.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pkgutil
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

from omni_actors.platform import death_mutex
from omni_actors.platform.allocator import keep_freed_memory
from omni_actors.protocol import messages
from omni_actors.stages.base import StageContext, StageEngine, WarmsUp
from omni_actors.worker import priority
from omni_actors.worker.arena import Arena
from omni_actors.worker.control import ControlSocket
from omni_actors.worker.device_locks import InheritedLocks
from omni_actors.worker.engine_loop import EngineLoop
from omni_actors.worker.pinning import Pinning

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
"""Signals that a worker ignores. The parent blocks them while it spawns one, so that none arrives before that."""
PR_SET_PDEATHSIG = 1
MEMORIES = {
    "cuda": "omni_actors.stages.cuda_memory:CudaMemory",
    "host": "omni_actors.worker.host_memory:HostMemory",
}
"""The ``worker.arena.SharedMemory`` of each kind of ``device_handles``. A worker imports no library of its engine."""
LONGEST_NOTE = 1000


def worker_main(
    control_fd: int,
    bell_fd: int,
    stderr_fd: int,
    death_mutex_fd: int,
    parent_pid: int,
    lock_fds: Sequence[int],
) -> NoReturn:
    """Run the process. It ends by ``os._exit``, so that exit handlers of native libraries cannot delay its end.

    control_fd, bell_fd, stderr_fd, death_mutex_fd, lock_fds: inherited descriptors, which the worker now owns.
    bell_fd: the eventfd that wakes the worker for control messages.
    parent_pid: the process that spawned it.
    """
    for stop_signal in STOP_SIGNALS:  # with a handler, not SIG_IGN: programs that an engine starts do not inherit it
        signal.signal(stop_signal, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    for fd in (1, 2):  # an engine's prints belong to the worker's log, not to the output of the parent's command
        os.dup2(stderr_fd, fd)
    os.close(stderr_fd)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before prctl took effect
        os._exit(0)
    os.set_inheritable(control_fd, False)
    sock = socket.socket(fileno=control_fd)
    sock.setblocking(False)
    engine = _EngineThread(ControlSocket(sock, bell_fd), death_mutex_fd, InheritedLocks(lock_fds))
    engine.start()
    poll = select.poll()
    poll.register(engine.ended, select.POLLIN)
    poll.register(sock, 0)  # POLLHUP: the parent has closed its end
    poll.poll()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(engine.exit_code)


class _EngineThread(threading.Thread):
    """Loads the engine and runs its loop until ``Stop``."""

    def __init__(self, control: ControlSocket, death_mutex_fd: int, locks: InheritedLocks) -> None:
        super().__init__(name="engine", daemon=True)
        self._locks = locks
        self._control, self._death_mutex_fd = control, death_mutex_fd
        self.ended = os.eventfd(0, os.EFD_CLOEXEC)
        """Readable when the engine has ended. The thread keeps the death mutex until the process ends."""
        self.exit_code = 0

    def run(self) -> None:
        try:
            death_mutex.acquire_death_mutex(self._death_mutex_fd)
            _serve(self._control, self._locks)
        except BaseException:  # noqa: BLE001 - reported here, and by the exit code
            traceback.print_exc()
            self.exit_code = 1
        os.eventfd_write(self.ended, 1)
        while True:
            signal.pause()


def _serve(control: ControlSocket, locks: InheritedLocks) -> None:
    """Load the engine and serve until ``Stop``. Raises what the engine raises."""
    configure = control.configure()
    spec = configure.spec
    loop = EngineLoop(
        spec,
        configure.fence,
        control,
        pinning=Pinning(spec.device, enabled=spec.pin_rings, warn=control.warn),
        arena=_arena(spec, control),
    )
    began = time.monotonic()
    os.nice(spec.nice)  # on Linux: for this thread and those that it starts
    try:
        with priority.lowered() if configure.behind and spec.shares_cores else nullcontext():
            engine = _load(spec, control)
            loop.calls.establish(engine, configure.desired)
    except Exception as error:
        part = loop.calls.establishing
        control.send(messages.LoadFailed(messages.sendable(f"{type(error).__name__}: {error}"), part))
        raise
    locks.release()
    control.add(messages.Ready(time.monotonic() - began))  # sent with the first turn, which attaches the rings
    try:
        loop.run(engine)
    except Exception:
        control.send(messages.EngineFailed(loop.handling, loop.calls.calling))
        raise


def _arena(spec: messages.WorkerSpec, control: ControlSocket) -> Arena | None:
    """Return the arena of a worker that hands tensors over by handle. Its libraries are loaded when it is used."""
    factory = MEMORIES.get(spec.device_handles)
    on_device = spec.device.startswith("cuda")
    if factory is None or on_device != (spec.device_handles == "cuda"):
        return None
    return Arena(lambda: pkgutil.resolve_name(factory)(spec.device), control.warn)


def _load(spec: messages.WorkerSpec, control: ControlSocket) -> StageEngine:
    """Build the engine and warm it up, so that no request pays for either."""
    prepare_libraries(spec.threads, spins=spec.spins)
    gc.disable()  # loading makes a million objects, none of them garbage, that each collection would traverse
    context = StageContext(
        stage=spec.address.stage,
        model=Path(spec.model) if spec.model else None,
        tokenizer=Path(spec.tokenizer) if spec.tokenizer else None,
        options=spec.options,
        threads=spec.threads,
        device=spec.device,
        device_count=max(1, len(spec.devices)),
        report=lambda note: control.send(messages.Loading(messages.sendable(note)[:LONGEST_NOTE])),
    )
    engine: StageEngine = pkgutil.resolve_name(spec.factory)(context)
    if isinstance(engine, WarmsUp):
        control.send(messages.Loading("warming up"))
        engine.warm_up()
    gc.collect()
    gc.freeze()  # with transformers loaded, each full collection while serving delayed every request by 0.2 s
    gc.enable()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # glibc keeps what loading has freed: 0.4 GB of 1.4 GB, where linear layers were packed
    keep_freed_memory()
    return engine


def prepare_libraries(threads: int, *, spins: bool) -> None:
    """Set the environment variables that native libraries read when they are loaded. spins: see ``WorkerSpec``."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # it would also leave a file in the temporary directory
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)
    # MKL's conditional numerical reproducibility: results do not depend on the alignment of operands. As measured, the
    # results of attention then do not depend on the number of threads either, which MKL does not guarantee.
    os.environ.setdefault("MKL_CBWR", "AUTO")
    if not spins:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # spinning threads take cores from other processes
