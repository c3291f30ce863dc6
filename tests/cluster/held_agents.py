"""Agents of nodes that are lost and stay away until a test lets them return."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence

import trio

from omni_actors.cluster.agent import AgentSettings
from omni_actors.cluster.interfaces import AgentEnd
from omni_actors.cluster.subprocess_agents import SubprocessAgents


class HeldAgents(SubprocessAgents):
    """Each node's first agent starts at once, and its later ones not before ``may_return``."""

    def __init__(self, commands: Mapping[str, Sequence[str]]) -> None:
        super().__init__(commands)
        self.may_return = trio.Event()

    async def run(self, node: str, settings: AgentSettings) -> AgentEnd:
        if node in self.pids:
            await self.may_return.wait()
        return await super().run(node, settings)

    def kill(self, node: str) -> None:
        os.kill(self.pids[node], signal.SIGKILL)
