"""A server process, as its operator sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import openai

END_S = 30.0
HEALTH_S = 60.0
"""How long /health may take: a busy machine runs the server, its workers and the users of the sessions."""


class Worker(NamedTuple):
    """A replica of a stage, as /health describes it. pid: None if it has no process."""

    pid: int | None
    state: str
    standby: bool


class Server:
    """A running server. client: OpenAI's own."""

    def __init__(self, url: str, http: httpx.AsyncClient, client: openai.AsyncOpenAI) -> None:
        self.url, self.client, self._http = url, client, http

    async def workers(self) -> dict[str, list[Worker]]:
        """Return the replicas by stage."""
        answer = (await self._http.get(f"{self.url}/health")).json()
        return {
            stage: [Worker(each["pid"], each["state"], each["standby"]) for each in replicas]
            for stage, replicas in answer["stages"].items()
        }

    async def kill(self, stage: str) -> int:
        """Send SIGKILL to the worker that serves a stage. Return its pid. Raises LookupError: there is none."""
        for worker in (await self.workers())[stage]:
            if worker.pid is not None and not worker.standby:
                os.kill(worker.pid, signal.SIGKILL)
                return worker.pid
        raise LookupError(f"no worker serves {stage}")

    async def serves(self, stage: str, *, but: int) -> bool:
        """Return whether a worker other than ``but``, a pid, serves a stage."""
        return any(
            each.state == "ready" and not each.standby and each.pid != but for each in (await self.workers())[stage]
        )


@asynccontextmanager
async def serving(overrides: Sequence[str] = (), pipeline: str = "voice") -> AsyncIterator[Server]:
    """Run a server until the block ends, and yield it when its stages are ready.

    overrides: changes of the pipeline, ``PATH=VALUE``.
    """
    command = ["-u", "-m", "omni_actors.serve", pipeline, "--port", "0"]
    command += [part for override in overrides for part in ("-s", override)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, env=environment
    )
    try:
        url = await _wait_ready(process)
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        async with httpx.AsyncClient(timeout=HEALTH_S) as http, client:
            yield Server(url, http, client)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _wait_ready(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async for line in process.stdout:
        if line.startswith(b"ready: "):
            return line.decode().removeprefix("ready: ").partition("/v1")[0]
    raise RuntimeError(f"the server ended with code {await process.wait()}")


def config(**audio_input: Any) -> dict[str, Any]:
    """Return the configuration of a session with these settings of ``audio.input``."""
    return {"type": "realtime", "audio": {"input": audio_input}}
