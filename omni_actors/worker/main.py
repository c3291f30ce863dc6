"""The worker process: a trio shell around the engine loop.

Rules
1. The engine loop has a thread of its own, which also loads the model. trio stays responsive whatever the engine does.
2. The worker outlives neither its parent nor its control socket.
3. An exception of the engine ends the process: traceback on stderr, exit code 1. The supervisor decides what follows.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
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

from omni_actors.platform import lifeline
from omni_actors.platform.cpu_sharing import CpuSharing
from omni_actors.protocol.mailbox import Mailbox, open_mailbox
from omni_actors.protocol.messages import (
    Abort,
    Configure,
    Connect,
    ControlMessage,
    EngineFailed,
    LoadFailed,
    Loading,
    Pause,
    Ping,
    Ready,
    Resend,
    Resume,
    Start,
    Stop,
)
from omni_actors.stages.base import StageContext, StageEngine
from omni_actors.worker.engine_loop import AttachRing, Command, EngineLoop
from ringbuf import Ring

PR_SET_PDEATHSIG = 1
SWITCH_INTERVAL_S = 0.001
MAILBOX_CAPACITY = 1024
LAST_WORDS_S = 1.0
SPIN_COUNT = 100_000
"""Turns, about a millisecond in all, that a native thread waits awake for its next share of work before it sleeps:
enough to stay awake from layer to layer of a model. Measured with two threads on two cores: asleep at once, the second
thread is worth nothing; awake for ever, as the library has it, another busy process makes both crawl."""
LONGEST_ERROR = 16_384
LONGEST_NOTE = 1000


def worker_main(
    control_fd: int, stderr_fd: int, lifeline_fd: int, cores_fd: int, number: int, parent_pid: int
) -> NoReturn:
    """Entry point of the process. Leaves by ``os._exit``: native libraries' exit handlers are not waited for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for fd in (1, 2):  # what an engine prints is a worker's talk, not the answer of the parent's command
        os.dup2(stderr_fd, fd)
    os.close(stderr_fd)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before prctl took effect
        os._exit(0)
    lifeline.acquire_death_mutex(lifeline_fd)
    cores = CpuSharing(cores_fd, number)
    # Engines hold the interpreter in long stretches of small operations: let control messages in between.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    os.set_inheritable(control_fd, False)
    sock = socket.socket(fileno=control_fd)
    sock.setblocking(False)
    code = 1
    try:
        engine_error = trio.run(_serve, sock, cores, restrict_keyboard_interrupt_to_checkpoints=True)
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


async def _serve(sock: socket.socket, cores: CpuSharing) -> Exception | None:
    """Until told to stop, or until the engine fails: with what."""
    async with open_mailbox(sock, MAILBOX_CAPACITY) as mailbox:
        configure, _ = await mailbox.incoming.receive()
        if not isinstance(configure, Configure):
            raise TypeError(f"the first message to a worker is Configure, not {type(configure).__name__}")

        def notify(message: ControlMessage) -> None:
            """For the engine's thread: queue a message, waiting for room."""
            trio.from_thread.run(mailbox.send, message)

        cores.threads, cores.nice = configure.threads, configure.nice
        loop = EngineLoop(configure.address, configure.fence, notify, cores)
        error: Exception | None = None  # what stays when the engine's thread is abandoned
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_obey, loop, mailbox, nursery.cancel_scope)
            error = await trio.to_thread.run_sync(_run_engine, configure, cores, loop, notify, abandon_on_cancel=True)
            with trio.move_on_after(LAST_WORDS_S):
                await mailbox.drain()
            nursery.cancel_scope.cancel()
    return error


async def _obey(loop: EngineLoop, mailbox: Mailbox, worker_scope: trio.CancelScope) -> None:
    """Pass commands to the loop; end the worker when told to stop, or when the parent is gone."""
    async for first in mailbox.incoming:
        commands: list[Command] = []
        for message, fds in chain([first], mailbox.available()):
            match message:
                case Start() | Resend() | Pause() | Resume() | Abort() | Ping() | Stop():
                    commands.append(message)
                case Connect(producer, consumer, generation):
                    commands.append(AttachRing(producer, consumer, Ring.attach(fds, generation=generation)))
                case _:
                    raise TypeError(f"a worker does not take {type(message).__name__}")
        loop.post(*commands)
        if stop := next((command for command in commands if isinstance(command, Stop)), None):
            if loop.running:
                await trio.sleep(stop.grace_s)
            break
    worker_scope.cancel()


def _run_engine(
    configure: Configure, cores: CpuSharing, loop: EngineLoop, notify: Callable[[ControlMessage], None]
) -> Exception | None:
    """The engine's thread: load, then serve until ``Stop``. An exception is returned, to be reported by itself."""
    began = time.monotonic()
    try:
        os.nice(configure.nice)  # on Linux that is this thread, and those that the libraries will start; not the mail's
        _prepare_libraries(configure.threads, spins=configure.spins)
        gc.disable()  # a library of a million objects, none of them garbage, would be looked through again and again
        factory = _import_factory(configure.factory)
        engine = factory(
            StageContext(
                stage=configure.address.stage,
                model=Path(configure.model) if configure.model else None,
                options=configure.options,
                threads=configure.threads,
                thread_budget=cores.thread_budget,
                device=configure.device,
                report=lambda note: notify(Loading(note[:LONGEST_NOTE])),
            )
        )
    except Exception as error:  # noqa: BLE001 - it ends the worker
        notify(LoadFailed(f"{type(error).__name__}: {error}"[:LONGEST_ERROR]))
        return error
    gc.collect()
    gc.freeze()  # nor while it serves: with transformers loaded, each full collection held up every request for 0.2 s
    gc.enable()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # glibc keeps what loading has freed: 0.4 GB of 1.4, where linear layers were packed
    notify(Ready(time.monotonic() - began))
    try:
        loop.run(engine)
    except Exception as error:  # noqa: BLE001 - it ends the worker
        notify(EngineFailed(loop.handling))
        return error
    return None


def _prepare_libraries(threads: int, *, spins: bool) -> None:
    """Before the engine's libraries load: two processes with two spinning threads each make two cores crawl.

    What serves people's questions reports to nobody: onnxruntime would, and leaves a file in the temporary directory.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    # Intel's "conditional numerical reproducibility": the same bits wherever a matrix lies. Without, those of attention
    # depend on how many threads there are; with it they did not, which Intel does not promise: a test looks. No slower.
    os.environ.setdefault("MKL_CBWR", "AUTO")
    if spins:
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def _import_factory(path: str) -> Callable[[StageContext], StageEngine]:
    module, _, name = path.partition(":")
    factory: Callable[[StageContext], StageEngine] = getattr(importlib.import_module(module), name)
    return factory
