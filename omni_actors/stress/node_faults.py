"""Injects faults into the agents of nodes and into their connections.

Rules
1. Losing an agent costs all workers of its node, and nothing else: each is a fault of its own, of its stage.
2. A fault of an agent explains, for ``EXPLAINED_S``, the ends of workers for which the runtime names its node, and
   starts of workers that came to nothing. A cut of links into a node explains the ends for which it names a link.
3. Without nodes, nothing happens (``schedule``, rule 2). Nor does a cut where cuts are not allowed (``cuts``, rule 2):
   a warning says so.
"""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Generic, TypeVar

import trio

from omni_actors.cluster.remote_agent import RemoteAgent
from omni_actors.cluster.spawner import LINK_S, ClusterSpawner
from omni_actors.errors import LINK_LOST, NODE_LOST
from omni_actors.stress import cuts
from omni_actors.stress.faults import KillHelper, Victim
from omni_actors.stress.judge import Explanation
from omni_actors.stress.nodes import LEASE_S
from omni_actors.stress.schedule import CutControl, CutLinks, FreezeAgent, KillAgent
from omni_actors.system import ReplicaHealth

EXPLAINED_S: Final = 2 * LEASE_S
LINKS_EXPLAINED_S: Final = 4 * LINK_S
Injection = TypeVar("Injection")


class NodeFaults(Generic[Injection]):
    """The faults of the nodes of one run.

    Args:
        cluster: The nodes; None: there are none.
        replicas: Returns every replica with the name of its stage.
        inject: Notes a fault (its name, its stage, the worker's pid), and returns it.
        follow: Follows a fault that it has noted, and the order to the kill helper that causes it.
        killed: Receives the pids of workers that end with an agent.
    """

    def __init__(
        self,
        cluster: ClusterSpawner | None,
        kill_helper: KillHelper,
        replicas: Callable[[], Iterable[tuple[str, ReplicaHealth]]],
        inject: Callable[[str, str, int | None], Injection],
        follow: Callable[[Injection, int | None], None],
        killed: set[int],
    ) -> None:
        self._cluster, self._kill_helper, self._replicas = cluster, kill_helper, replicas
        self._inject, self._follow, self._killed = inject, follow, killed
        self.explanations: list[Explanation] = []

    def hit(self, fault: KillAgent | FreezeAgent | CutControl | CutLinks) -> None:
        """Inject a fault that ends workers."""
        match fault:
            case KillAgent(node):
                self._end_agent("SIGKILL of an agent", node, signal.SIGKILL)
            case FreezeAgent(node):
                self._end_agent("SIGSTOP of an agent", node, signal.SIGSTOP)
            case CutControl(node):
                self._cut_control(node)
            case CutLinks(node):
                self._cut_links(node)

    def _end_agent(self, fault: str, node: int, number: signal.Signals) -> None:
        """Send a signal to an agent that ends it at once, or lets its lease end."""
        if (agent := self._agent(node)) is None:
            return
        with ExitStack() as stack, suppress(ProcessLookupError):
            victim = stack.enter_context(Victim(agent.pid))
            lost = self._lose(fault, agent)
            order = self._kill_helper.send(number, [victim])
            for injection in lost:
                self._follow(injection, order)

    def _cut_control(self, node: int) -> None:
        """Cut the connection between an agent and the parent."""
        if (agent := self._agent(node)) is None or self._cluster is None:
            return
        _, port = self._cluster.address
        with suppress(ProcessLookupError):
            if _warned_of(cuts.why_not(agent.pid)):
                return
            lost = self._lose("control connection cut", agent)
            cuts.cut(agent.pid, lambda each: each.remote_port == port)
            for injection in lost:
                self._follow(injection, None)

    def _cut_links(self, node: int) -> None:
        """Cut every link into a node. Each worker there has one (``nodes``, rule 1), and ends for it."""
        if (agent := self._agent(node)) is None:
            return
        with suppress(ProcessLookupError):
            if _warned_of(cuts.why_not(agent.pid)):
                return
            serving = [(stage, pid) for stage, pid, state in self._workers(agent) if state == "ready"]
            now = time.monotonic()
            self.explanations.append(Explanation((LINK_LOST,), now, now + LINKS_EXPLAINED_S))
            injections = [self._inject("links into a node cut", stage, pid) for stage, pid in serving]
            self._killed.update(pid for _, pid in serving)
            if cuts.cut(agent.pid, cuts.accepted(agent.pid)) < len(serving):
                return  # a link was not connected yet, so its worker may live
            for injection in injections:
                self._follow(injection, None)

    async def pause_agent(self, node: int, for_s: float) -> None:
        """Stop an agent for a time that its lease and its workers' heartbeats allow."""
        if (agent := self._agent(node)) is None:
            return
        with ExitStack() as stack, suppress(ProcessLookupError):
            victim = stack.enter_context(Victim(agent.pid))
            self._inject("SIGSTOP of an agent, then SIGCONT", "", None)
            victim.send(signal.SIGSTOP)
            try:
                await trio.sleep(for_s)
            finally:
                if agent.pid not in self._killed:  # it may have been stopped for good meanwhile
                    victim.send(signal.SIGCONT)

    def _agent(self, number: int) -> RemoteAgent | None:
        """Return the agent of a node, if it is up."""
        if self._cluster is None:
            return None
        agents: Sequence[RemoteAgent] = [*self._cluster.agents.values()]
        agent = agents[number % len(agents)]
        return agent if agent.up.is_set() and agent.lost is None and agent.pid not in self._killed else None

    def _workers(self, agent: RemoteAgent) -> list[tuple[str, int, str]]:
        """Return stage, pid and state of the agent's workers that are not being killed yet."""
        found = [(stage, each.pid, each.state) for stage, each in self._replicas() if each.pid]
        return [each for each in found if each[1] not in self._killed and parent_of(each[1]) == agent.pid]

    def _lose(self, fault: str, agent: RemoteAgent) -> list[Injection]:
        """Note that an agent is about to end."""
        now = time.monotonic()
        explained = Explanation((NODE_LOST + agent.node,), now, now + EXPLAINED_S, failed_starts=True)
        self.explanations.append(explained)
        workers = self._workers(agent)
        self._killed.update([agent.pid, *(pid for _, pid, _ in workers)])
        if not workers:
            self._inject(fault, "", None)
        return [self._inject(fault, stage, pid) for stage, pid, _ in workers]


def _warned_of(why: str | None) -> bool:
    if why is not None:
        warnings.warn(f"connections are not cut here: {why}", RuntimeWarning, stacklevel=2)
    return why is not None


def parent_of(pid: int) -> int | None:
    """Return the pid of a process's parent; None: it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
