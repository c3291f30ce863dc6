"""Runs the bare server of ``echo_server`` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio

from omni_actors.cli.running import helper_tasks
from omni_actors.cli.server_client import ServerError

MODEL = "echo-server"
"""The model of its requests. The server does not look at it."""


@asynccontextmanager
async def bare_server() -> AsyncIterator[str]:
    """Run the server for the block, and give its URL. Raises ServerError: the server did not start."""
    # Imported by a program of its own: ``-m`` would import the module twice.
    program = "import trio; from omni_actors.cli.bench.echo_server import main; trio.run(main)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "check": False}
    async with helper_tasks() as nursery:
        process: trio.Process = await nursery.start(partial(trio.run_process, [sys.executable, "-c", program], **pipes))
        assert process.stdin is not None
        assert process.stdout is not None
        url = b""
        while not url.endswith(b"\n"):
            piece = await process.stdout.receive_some()
            if not piece:
                raise ServerError("connection", "the bare server ended before it printed its URL")
            url += piece
        try:
            yield url.decode().strip()
        finally:
            await process.stdin.aclose()
