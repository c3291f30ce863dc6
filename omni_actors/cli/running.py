"""How a command runs: signals, errors, and the terminal."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import trio
from rich.console import Console
from rich.text import Text

from omni_actors.cli import INTERRUPTED
from omni_actors.command_line import click_errors
from omni_actors.plain_text import clean
from omni_actors.system import OmniSystem

notes = Console(stderr=True, highlight=False, markup=False)
"""Reports the work of a command on standard error, without rich's markup: what it prints may come from others."""


def run(
    work: Callable[[], Awaitable[None]], *, verbose: bool = False, on_interrupt: Callable[[], bool] = lambda: False
) -> None:
    """Run ``work`` in trio.

    SIGINT and SIGTERM cancel it, and the command exits with code 130. At SIGINT, ``on_interrupt`` is called first; if
    it returns True, the signal has no other effect. A typed error becomes one sentence, followed with
    ``verbose`` by its notes: the last lines of a worker's stderr.
    """
    finished = False
    failure: Exception | None = None

    async def until_interrupted() -> None:
        nonlocal finished, failure
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_on_signal, signals, nursery.cancel_scope, on_interrupt)
                try:
                    await work()
                    finished = True
                except Exception as error:  # noqa: BLE001 - raised below, outside the nursery's exception group
                    failure = error
                nursery.cancel_scope.cancel()

    with suppress(KeyboardInterrupt):  # a second Ctrl-C, while the workers are being stopped
        trio.run(until_interrupted)
    if failure is not None:
        with click_errors(verbose=verbose):
            raise failure
    if not finished:
        sys.exit(INTERRUPTED)


async def _cancel_on_signal(
    signals: AsyncIterator[int], scope: trio.CancelScope, on_interrupt: Callable[[], bool]
) -> None:
    async for number in signals:
        if number == signal.SIGINT and on_interrupt():
            continue
        notes.print("interrupted", style="yellow")
        scope.cancel()


@asynccontextmanager
async def helper_tasks() -> AsyncIterator[trio.Nursery]:
    """Open a nursery for tasks that help the block. An error of the block cancels them.

    Raises an error of the block as it is, and not inside an exception group.
    """
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        except Exception as error:  # noqa: BLE001 - raised below, outside the nursery's exception group
            failure = error
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def wait_ready(omni: OmniSystem, *, quiet: bool = False) -> None:
    """Wait until every stage has loaded. On a terminal, show what each stage is doing.

    quiet: report nothing. Raises StageFailed, StartTimedOut.
    """
    began = time.monotonic()
    with notes.status(Text("starting")) as status:
        if quiet:
            status.stop()
        while not omni.health().ready and omni.dead_error is None and omni.start_error is None:
            stages = omni.health().stages
            doing = [(name, replica.note) for name, replicas in stages.items() for replica in replicas]
            shown = (Text.assemble((name, "bold"), f" {clean(note)}") for name, note in doing)
            status.update(Text("   ").join(shown))
            await omni.wait_changed()
    await omni.wait_ready()
    if not quiet:
        notes.print(f"{len(omni.pipeline.stages)} stages ready in {time.monotonic() - began:.1f} s", style="dim")


def seconds(value: float | None) -> str:
    """Return a time for people."""
    return "–" if value is None else f"{value:.3f} s"
