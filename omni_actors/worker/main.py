"""The worker process: a trio shell around the engine loop.

Rules
1. The engine loop has a thread of its own, which also loads the model. trio stays responsive whatever the engine does.
2. The worker outlives neither its parent nor its control socket.
3. Only the parent ends a worker. It ignores SIGINT and SIGTERM, which a terminal and systemd send to all processes of a
   server: the parent may still drain the requests that the worker serves.
4. An exception of the engine ends the process: traceback on stderr, exit code 1. The supervisor decides what follows.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pkgutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import NoReturn

import trio

from omni_actors.platform import death_mutex
from omni_actors.platform.cpu_sharing import CpuSharing
from omni_actors.protocol import messages
from omni_actors.protocol.mailbox import Mailbox, open_mailbox
from omni_actors.stages.base import StageContext, StageEngine, WarmsUp
from omni_actors.worker.engine_loop import AttachRing, Command, EngineLoop
from ringbuf import Ring

Notify = Callable[[messages.ControlMessage], None]

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
"""Signals that a worker ignores. The parent blocks them while it spawns one, so that none arrives before that."""
PR_SET_PDEATHSIG = 1
SWITCH_INTERVAL_S = 0.001
MAILBOX_CAPACITY = 1024
DRAIN_TIMEOUT_S = 1.0
"""How long an ending worker waits for the parent to read its last messages."""
SPIN_COUNT = 100_000
"""Turns, about a millisecond in all, that a native thread waits by spinning for its next share of work before it
sleeps: enough to stay awake from layer to layer of a model. Measured with two threads on two cores: if it sleeps at
once, the second thread gains nothing; if it spins for ever, the library's default, another busy process slows both."""
LONGEST_ERROR = 16_384
LONGEST_NOTE = 1000


def worker_main(
    control_fd: int, stderr_fd: int, death_mutex_fd: int, cpu_sharing_fd: int, number: int, parent_pid: int
) -> NoReturn:
    """Run the process. It ends by ``os._exit``, so that exit handlers of native libraries cannot delay its end.

    control_fd, stderr_fd, death_mutex_fd, cpu_sharing_fd: inherited descriptors, which the worker now owns.
    number: the worker's row in the page of ``cpu_sharing``.
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
    death_mutex.acquire_death_mutex(death_mutex_fd)
    cpu_sharing = CpuSharing(cpu_sharing_fd, number)
    # Engines hold the interpreter in long stretches of small operations: let control messages in between.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    os.set_inheritable(control_fd, False)
    sock = socket.socket(fileno=control_fd)
    sock.setblocking(False)
    code = 1
    try:
        engine_error = trio.run(_serve, sock, cpu_sharing, restrict_keyboard_interrupt_to_checkpoints=True)
        if engine_error is None:
            code = 0
        else:
            traceback.print_exception(engine_error)
    except BaseException:  # noqa: BLE001 - reported here, and by the exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


async def _serve(sock: socket.socket, cpu_sharing: CpuSharing) -> Exception | None:
    """Run the engine until the parent stops the worker, or until the engine fails: then return its exception."""
    async with open_mailbox(sock, MAILBOX_CAPACITY) as mailbox:
        configure, _ = await mailbox.incoming.receive()
        if not isinstance(configure, messages.Configure):
            raise TypeError(f"the first message to a worker is Configure, not {type(configure).__name__}")
        spec = configure.spec

        def notify(message: messages.ControlMessage) -> None:
            """Queue a message, waiting for room. Called by the engine's thread."""
            trio.from_thread.run(mailbox.send, message)

        cpu_sharing.threads, cpu_sharing.nice = spec.threads, spec.nice
        loop = EngineLoop(spec.address, configure.fence, notify, cpu_sharing, resumable=spec.resumable)
        error: Exception | None = None  # the result if the engine's thread is abandoned
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_handle_commands, loop, mailbox, nursery.cancel_scope)
            error = await trio.to_thread.run_sync(_run_engine, spec, cpu_sharing, loop, notify, abandon_on_cancel=True)
            with trio.move_on_after(DRAIN_TIMEOUT_S):
                await mailbox.drain()
            nursery.cancel_scope.cancel()
    return error


async def _handle_commands(loop: EngineLoop, mailbox: Mailbox, worker_scope: trio.CancelScope) -> None:
    """Pass commands to the loop. End the worker at ``Stop``, and when the parent is gone."""
    async for first in mailbox.incoming:
        commands: list[Command] = []
        for message, fds in chain([first], mailbox.available()):
            if isinstance(message, messages.LoopCommand):
                commands.append(message)
            elif isinstance(message, messages.Connect):
                ring = Ring.attach(fds, generation=message.generation)
                commands.append(AttachRing(message.producer, message.consumer, ring))
            else:
                raise TypeError(f"a worker does not accept {type(message).__name__}")
        loop.post(*commands)
        if stop := next((command for command in commands if isinstance(command, messages.Stop)), None):
            if loop.running:
                await trio.sleep(stop.grace_s)
            break
    worker_scope.cancel()


def _run_engine(
    spec: messages.WorkerSpec, cpu_sharing: CpuSharing, loop: EngineLoop, notify: Notify
) -> Exception | None:
    """Load the engine and serve until ``Stop``, in the engine's thread. Return the exception that ended it, if any."""
    began = time.monotonic()
    try:
        engine = _load(spec, cpu_sharing, notify)
    except Exception as error:  # noqa: BLE001 - it ends the worker
        notify(messages.LoadFailed(f"{type(error).__name__}: {error}"[:LONGEST_ERROR]))
        return error
    notify(messages.Ready(time.monotonic() - began))
    try:
        loop.run(engine)
    except Exception as error:  # noqa: BLE001 - it ends the worker
        notify(messages.EngineFailed(loop.handling))
        return error
    return None


def _load(spec: messages.WorkerSpec, cpu_sharing: CpuSharing, notify: Notify) -> StageEngine:
    """Build the engine and warm it up, so that no request pays for either."""
    os.nice(spec.nice)  # on Linux: for this thread and those that it starts, not for the one that reads commands
    _prepare_libraries(spec.threads, spins=spec.spins)
    gc.disable()  # loading makes a million objects, none of them garbage, that each collection would traverse
    context = StageContext(
        stage=spec.address.stage,
        model=Path(spec.model) if spec.model else None,
        options=spec.options,
        threads=spec.threads,
        thread_budget=cpu_sharing.thread_budget,
        device=spec.device,
        report=lambda note: notify(messages.Loading(note[:LONGEST_NOTE])),
    )
    engine: StageEngine = pkgutil.resolve_name(spec.factory)(context)
    if isinstance(engine, WarmsUp):
        notify(messages.Loading("warming up"))
        with cpu_sharing:
            engine.warm_up()
    gc.collect()
    gc.freeze()  # with transformers loaded, each full collection while serving delayed every request by 0.2 s
    gc.enable()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # glibc keeps what loading has freed: 0.4 GB of 1.4 GB, where linear layers were packed
    return engine


def _prepare_libraries(threads: int, *, spins: bool) -> None:
    """Set the environment variables that native libraries read when they are loaded."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # it would also leave a file in the temporary directory
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # spinning threads take cores from other processes
    # MKL's conditional numerical reproducibility: results do not depend on the alignment of operands. As measured, the
    # results of attention then do not depend on the number of threads either, which MKL does not guarantee.
    os.environ.setdefault("MKL_CBWR", "AUTO")
    if spins:
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
