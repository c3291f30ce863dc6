"""The command ``omni-actors top``."""

from __future__ import annotations

import errno
import os
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import click
import trio
from rich.console import Console, RenderableType
from rich.live import Live

from omni_actors.cli.running import helper_tasks, run
from omni_actors.cli.server_client import open_server
from omni_actors.cli.top.rates import Rates
from omni_actors.cli.top.screen import Space, screen
from omni_actors.cli.top.source import StateSource
from omni_actors.command_line import KEY_OPTION, TEXT, URL, URL_OPTION, Number

SILENCE_S = 30.0
"""A server that sends nothing for so long is lost: it sends a comment every ten seconds."""
WIDTH_OF_A_FILE = 200
"""The columns of a screen that goes to a pipe or a file: everything fits."""
QUIT = b"q\x03\x04"
"""The keys that end the command: q, Ctrl-C, Ctrl-D."""


@click.command()
@URL_OPTION
@KEY_OPTION
@click.option("--pipeline", type=TEXT, help="One of several that the server has. By default its first one.")
@click.option("--interval", type=Number(min=0.1), default=0.5, show_default=True, help="Seconds a screen.")
@click.option("--once", is_flag=True, help="Print one screen after an interval, and end.")
def top(url: str | None, api_key: str | None, pipeline: str | None, interval: float, once: bool) -> None:
    """Show the live state of a server: stages, rings and requests. The key q ends.

    The server must be one of omni_actors. Without a terminal, use --once.
    """
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH_OF_A_FILE
    if not once and not (console.is_terminal and sys.stdin.isatty()):
        raise click.UsageError("standard input and output must be a terminal; --once prints one screen")
    if not once and console.is_dumb_terminal:
        raise click.UsageError(f"this terminal (TERM={os.environ['TERM']}) has no cursor; --once prints one screen")
    screens = _Top(console, url or URL, interval)
    run(partial(screens.run, api_key, pipeline, once=once))
    if once:
        assert screens.last is not None, "the command has not failed"
        console.print(screens.last, crop=False)


class _Top:
    def __init__(self, console: Console, url: str, interval: float) -> None:
        self._console, self._url, self._interval = console, url, interval
        self._rates = Rates()
        self.last: RenderableType | None = None
        """The screen of ``--once``. It is printed outside trio: rich ends the program when its pipe is closed."""

    async def run(self, api_key: str | None, pipeline: str | None, *, once: bool) -> None:
        """Show the state until a key ends it. Raises ServerError: the first connection failed."""
        async with open_server(self._url, api_key, read_timeout_s=SILENCE_S) as server, helper_tasks() as nursery:
            source = StateSource(server, pipeline)
            nursery.start_soon(self._once if once else self._live, source, nursery.cancel_scope)
            await source.follow()

    async def _once(self, source: StateSource, scope: trio.CancelScope) -> None:
        await source.arrived.wait()
        self._update(source)
        await trio.sleep(self._interval)
        self._update(source)
        self.last = self._screen(source, lines=None)
        scope.cancel()

    async def _live(self, source: StateSource, scope: trio.CancelScope) -> None:
        await source.arrived.wait()
        try:
            async with trio.open_nursery() as nursery:
                with _unbuffered(sys.stdin.fileno()) as keys:
                    nursery.start_soon(_wait_quit, keys, scope)
                    with Live(console=self._console, screen=True, auto_refresh=False) as live:
                        while True:
                            self._update(source)
                            live.update(self._screen(source, lines=self._console.height), refresh=True)
                            await trio.sleep(self._interval)
        except* OSError as group:
            _, others = group.split(_is_terminal_gone)
            if others is not None:
                raise others from None
            scope.cancel()

    def _update(self, source: StateSource) -> None:
        assert source.state is not None
        self._rates.update(source.state, time.monotonic())

    def _screen(self, source: StateSource, *, lines: int | None) -> RenderableType:
        assert source.state is not None
        space = Space(self._console.width, lines)
        return screen(source.state, self._rates, now=source.now(), url=self._url, lost=source.lost, space=space)


def _is_terminal_gone(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EIO


async def _wait_quit(keys: int, scope: trio.CancelScope) -> None:
    """Cancel the scope when a key of ``QUIT`` is pressed, or the input ends.

    Raises OSError (EIO): the terminal was closed.
    """
    while True:
        await trio.lowlevel.wait_readable(keys)
        pressed = os.read(keys, 64)
        if not pressed or any(key in QUIT for key in pressed):
            scope.cancel()


@contextmanager
def _unbuffered(terminal: int) -> Iterator[int]:
    """Let the block read single keys of a terminal, which is then as before, unless it was closed."""
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    keys = termios.tcgetattr(terminal)
    keys[3] &= ~termios.ISIG  # Ctrl-C is a key too
    termios.tcsetattr(terminal, termios.TCSANOW, keys)
    try:
        yield terminal
    finally:
        with suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
