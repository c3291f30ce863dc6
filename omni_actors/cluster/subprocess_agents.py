"""Starts agents as processes of this machine: "nodes" that share it, for tests and for trying a cluster out.

Rules
1. An agent gets its settings, which contain the secret, on stdin.
2. Its process is a child, so its end is certain: cancelling ``run`` kills and reaps it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec
import trio

from omni_actors.cluster.agent import AgentSettings
from omni_actors.cluster.interfaces import AgentEnd


class SubprocessAgents:
    """See ``AgentStarter``. commands: what precedes the agent's command on some nodes, such as another namespace."""

    def __init__(self, commands: Mapping[str, Sequence[str]] | None = None) -> None:
        self._commands = commands or {}
        self.pids: dict[str, int] = {}
        """The process of the newest agent of each node."""

    async def run(self, node: str, settings: AgentSettings) -> AgentEnd:
        command = [*self._commands.get(node, ()), sys.executable, "-m", "omni_actors.cluster.agent"]
        process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, start_new_session=True)
        assert process.stdin is not None
        self.pids[node] = process.pid
        try:
            with suppress(trio.BrokenResourceError):  # it has ended already
                async with process.stdin:
                    await process.stdin.send_all(msgspec.json.encode(settings) + b"\n")
            await process.wait()
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                code = await process.wait()
        return AgentEnd(True, f"exit code {code}" if code >= 0 else signal.Signals(-code).name)
