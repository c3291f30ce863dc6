"""How a command runs: signals, errors, and the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import click
import trio
from rich.console import Console

from omni_actors.command_line import BadConfig
from omni_actors.errors import ConfigError, OmniError

INTERRUPTED = 130

T = TypeVar("T")

notes = Console(stderr=True, highlight=False)
"""Reports the work of a command on standard error."""


def run(work: Callable[[], Coroutine[Any, Any, T]], *, verbose: bool = False) -> T:
    """Run ``work`` in trio and return its result.

    SIGINT and SIGTERM cancel it, and the command exits with code 130. A typed error becomes one sentence, followed with
    ``verbose`` by its notes: the last lines of a worker's stderr.
    """

    async def until_interrupted() -> tuple[T] | None:
        result: tuple[T] | None = None
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_on_signal, signals, nursery.cancel_scope)
                try:
                    result = (await work(),)
                except Exception as error:  # noqa: BLE001 - raised below, outside the nursery's exception group
                    failures.append(error)
                nursery.cancel_scope.cancel()
        return result

    failures: list[Exception] = []
    try:
        result = trio.run(until_interrupted)
    except KeyboardInterrupt:  # a second Ctrl-C, while the workers are being stopped
        result = None
    for failure in failures:
        raise click_error(failure, verbose=verbose) if isinstance(failure, OmniError) else failure
    if result is None:
        sys.exit(INTERRUPTED)
    return result[0]


def click_error(error: OmniError, *, verbose: bool = False) -> click.ClickException:
    """Return the exception with which a command ends because of ``error``."""
    details: list[str] = getattr(error, "__notes__", [])
    shown = "\n".join([str(error), *details] if verbose else [str(error)])
    if details and not verbose:
        shown += "\n(--verbose shows what the worker wrote to stderr)"
    return BadConfig(shown) if isinstance(error, ConfigError) else click.ClickException(shown)


async def _cancel_on_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    async for _ in signals:
        notes.print("interrupted", style="yellow")
        scope.cancel()


def seconds(value: float | None) -> str:
    """Return a time for people."""
    return "–" if value is None else f"{value:.3f} s"


def size(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
