"""How a command runs: signals, errors, and the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import trio
from rich.console import Console

from omni_actors.command_line import click_errors

INTERRUPTED = 130

notes = Console(stderr=True, highlight=False)
"""Reports the work of a command on standard error."""


def run(work: Callable[[], Awaitable[None]], *, verbose: bool = False) -> None:
    """Run ``work`` in trio.

    SIGINT and SIGTERM cancel it, and the command exits with code 130. A typed error becomes one sentence, followed with
    ``verbose`` by its notes: the last lines of a worker's stderr.
    """
    finished = False
    failure: Exception | None = None

    async def until_interrupted() -> None:
        nonlocal finished, failure
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_on_signal, signals, nursery.cancel_scope)
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


async def _cancel_on_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    async for _ in signals:
        notes.print("interrupted", style="yellow")
        scope.cancel()


def seconds(value: float | None) -> str:
    """Return a time for people."""
    return "–" if value is None else f"{value:.3f} s"
