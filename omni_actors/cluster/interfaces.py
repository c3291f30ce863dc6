"""What the spawner of a cluster needs: something that starts agents, and something that says where workers run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from omni_actors.cluster.agent import AgentSettings
from omni_actors.cluster.placement import Node, Place
from omni_actors.protocol.messages import Address


class AgentEnd(NamedTuple):
    """How an agent ended, as far as the parent knows.

    certain: whether its process is known to have ended; False if the state of its node is unknown. why: the reason.
    """

    certain: bool
    why: str


class AgentStarter(Protocol):
    """Starts the processes of agents."""

    async def run(self, node: str, settings: AgentSettings) -> AgentEnd:
        """Run one agent on a node until it has ended; cancelling kills it."""
        ...


class Places(Protocol):
    """Where workers run, as nodes come and go."""

    def find(self, address: Address) -> Place:
        """Return the place of a worker that is to be started. Raises NoPlace."""
        ...

    async def wait_place(self, address: Address, on_waiting: Callable[[str], None]) -> Place:
        """Wait until a worker has a place, and return it. on_waiting: called with the reason when it waits."""
        ...

    def release(self, address: Address) -> None:
        """Let others have the place of a worker that is not started again for now."""
        ...

    def join(self, node: Node) -> None:
        """Use a node from now on."""
        ...

    def lose(self, name: str) -> None:
        """Start no worker on a node any more, until it joins again. It may not have joined yet."""
        ...

    def forget(self, name: str) -> None:
        """Forget a lost node: it is not mentioned any more when a worker has no place."""
        ...
