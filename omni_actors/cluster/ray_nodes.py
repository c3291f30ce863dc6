"""The nodes of a Ray cluster, and agents on them, through the helper (``ray_helper``).

Rules
1. The helper may end at any time: Ray does so to a process whose head node is gone. Agents go on without it. The next
   agent that is to be started starts a new helper first.
2. What Ray says of the end of an actor is not taken for the end of its workers: their lease is waited for. Only an
   agent that has returned has surely ended.
3. An order to the helper has ``ORDER_S`` seconds: a helper that has not carried it out by then is killed. Ray may keep
   it waiting for a head that is gone.
4. A node that Ray has later is taken in, while a helper runs; if none does, one is started after ``RECONNECT_S``. A
   node that has left Ray stays known, since it may come back, and since a helper may come before the nodes of a new
   head. After ``GONE_S`` it may be forgotten, and is a new one if it comes back.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeAlias

import msgspec
import trio

from omni_actors.cluster.agent import AgentSettings
from omni_actors.cluster.interfaces import AgentEnd
from omni_actors.cluster.placement import PARENT
from omni_actors.cluster.ray_messages import (
    AUTO,
    LOCAL,
    Ended,
    Failed,
    Found,
    Look,
    News,
    Obeyed,
    Order,
    RayNode,
    StartAgent,
    Started,
    StopAgent,
)
from omni_actors.cluster.shielded import open_shielded_nursery
from omni_actors.errors import RayUnavailable
from omni_actors.installed import is_importable

HELPER_S: Final = 90.0
"""Seconds in which the helper must be connected with Ray, or have started one."""
END_S: Final = 20.0
"""Seconds in which the helper must end after its stdin."""
ORDER_S: Final = 20.0
"""Seconds in which the helper must carry out an order."""
GONE_S: Final = 600.0
"""Seconds after which a node that has left Ray is not expected back."""
RECONNECT_S: Final = 30.0
_HEAD: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^][:/\s]+):\d{1,5}")
Resources: TypeAlias = tuple[float, float]
"""CPUs and GPUs."""


class RayAgents:
    """Starts agents as Ray actors. See ``AgentStarter``. Open it with ``open_ray``.

    address: of Ray's head, "auto" or "local". labels: what all nodes have besides their own in Ray. resources: returns
    what the agent of a node reserves there. on_found: called when Ray's nodes were looked at, with the names of those
    that may be forgotten (rule 4).
    """

    def __init__(self, address: str, labels: Collection[str], nursery: trio.Nursery) -> None:
        self._address, self._labels, self._nursery = address, labels, nursery
        self._process: trio.Process | None = None
        self._starting, self._ordering = trio.Lock(), trio.Lock()
        self._obeyed = trio.Event()
        """Set when the helper has carried out the newest order, or could not, or has ended."""
        self._refusal: str | None = None
        """Why it could not."""
        self._nodes: dict[str, RayNode] = {}
        self._seen: dict[str, float] = {}
        """When each node was in Ray last, by trio's clock."""
        self._others: list[str] = []
        """The ids of nodes with agents of other helpers, when they were looked for last."""
        self._ends: dict[int, trio.MemorySendChannel[Ended]] = {}
        self.resources: Callable[[str], Resources] = lambda node: (0.0, 0.0)
        self.on_found: Callable[[Collection[str]], None] = lambda gone: None

    @property
    def nodes(self) -> list[RayNode]:
        """All known nodes, as they were in Ray last. Their names are unique."""
        return [
            msgspec.structs.replace(node, name=name, labels=(*node.labels, *self._labels))
            for name, node in self._nodes.items()
        ]

    async def look(self) -> set[str]:
        """Look at the nodes again. Return the names of those with agents of other systems, or of one that has ended."""
        self._others = []
        await self._order(Look())
        return {name for name, node in self._nodes.items() if node.node_id in self._others}

    def forget(self, name: str) -> None:
        """Forget a node that has no agent."""
        del self._nodes[name], self._seen[name]

    def _find(self, alive: Iterable[RayNode]) -> None:
        """Take new nodes in, and note which ones are in Ray, and what is free there."""
        ids = {node.node_id: node for node in alive}
        places = {(node.name, node.address): node for node in alive}
        for name, node in self._nodes.items():
            self._nodes[name] = ids.get(node.node_id) or places.get((node.name, node.address), node)
        known = {(node.name, node.address) for node in self._nodes.values()}
        new = [node for node in alive if (node.name, node.address) not in known]
        self._nodes |= _by_unique_name(new, self._nodes)
        present = [name for name, node in self._nodes.items() if (node.name, node.address) in places]
        self._seen |= dict.fromkeys(present, trio.current_time())

    async def run(self, node: str, settings: AgentSettings) -> AgentEnd:
        """Run one agent on a node until it has ended; cancelling kills it. See ``AgentStarter.run``."""
        try:
            await self.connect()
        except RayUnavailable as error:
            return AgentEnd(False, str(error))
        if (at := self._nodes.get(node)) is None:  # forgotten while the helper was started
            return AgentEnd(False, "its node has left Ray")
        send, receive = trio.open_memory_channel[Ended](1)
        self._ends[settings.number] = send
        try:
            if (why := await self._order(StartAgent(at, settings, *self.resources(node)))) is not None:
                return AgentEnd(False, why)
            ended = await receive.receive()
        except trio.EndOfChannel:  # the helper has ended, and with it the news of the agent
            await trio.sleep_forever()
        finally:
            if self._ends.pop(settings.number, None) is not None:
                await self._order(StopAgent(settings.number))
        return AgentEnd(ended.certain, ended.why)

    async def connect(self) -> None:
        """Start a helper unless one runs. Raises RayUnavailable: it cannot be started, or connected with Ray."""
        async with self._starting:
            if self._process is not None:
                return
            try:
                process = await trio.lowlevel.open_process(
                    [sys.executable, "-m", "omni_actors.cluster.ray_helper", self._address],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                    env=os.environ | (_secret_of_local_ray() if self._address == LOCAL else {}),
                )
            except (OSError, RuntimeError) as error:  # no descriptors or memory; no thread, in which trio starts it
                raise RayUnavailable(self._address, f"its helper cannot be started: {error}") from error
            with trio.move_on_after(HELPER_S):
                first = await self._nursery.start(self._follow, process)
                if isinstance(first, Started):
                    return
                raise RayUnavailable(self._address, first.why)
            process.kill()
            raise RayUnavailable(self._address, f"Ray did not answer within {HELPER_S:g} s")

    async def reconnect(self) -> None:
        """Start a helper again whenever one has ended, until cancelled: without one, no node that joins is seen."""
        while True:
            await trio.sleep(RECONNECT_S)
            with suppress(RayUnavailable):
                await self.connect()

    async def _order(self, order: Order) -> str | None:
        """Have the helper carry out an order; return why it has not. Not cancelled: it has a time limit."""
        ended = "the helper that uses Ray has ended"
        why: str | None = f"{ended}, or has not carried out an order within {ORDER_S:g} s"
        with trio.CancelScope(shield=True):
            async with self._ordering:
                if (process := self._process) is None or process.stdin is None:
                    return ended
                self._obeyed = trio.Event()
                with trio.move_on_after(ORDER_S), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    await process.stdin.send_all(msgspec.json.encode(order) + b"\n")
                    await self._obeyed.wait()
                    why = self._refusal if self._process is process else ended
                if self._process is process and not self._obeyed.is_set():
                    process.kill()
                    await self._obeyed.wait()  # ``_follow`` notices that it has ended
        return why

    @trio.lowlevel.enable_ki_protection
    async def _follow(self, process: trio.Process, task_status: trio.TaskStatus[Started | Failed]) -> None:
        """Take a helper's news until it ends, or says what cannot be read. Cancelling ends it."""
        told = False
        try:
            async for news in _news(process):
                if isinstance(news, Ended):
                    if (send := self._ends.pop(news.number, None)) is not None:
                        send.send_nowait(news)
                elif isinstance(news, Found):
                    self._find(news.nodes)
                    self._others = self._others if news.agents is None else news.agents
                    gone_before = trio.current_time() - GONE_S
                    self.on_found([name for name, seen in self._seen.items() if seen <= gone_before])
                elif isinstance(news, Obeyed):
                    self._refusal = news.why
                    self._obeyed.set()
                else:
                    if isinstance(news, Started):  # not later: the helper may end at once
                        self._process = process
                        self._find(news.nodes)
                    told = True
                    task_status.started(news)
            if not told:
                task_status.started(Failed("the helper has ended"))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            process.kill()  # the agents go on without it (rule 1)
            if not told:
                task_status.started(Failed(f"the helper says what cannot be read: {error}"))
        finally:
            if self._process is process:
                self._forget_helper()
            with trio.CancelScope(shield=True):
                await _end(process)

    def _forget_helper(self) -> None:
        self._process = None
        self._obeyed.set()
        for send in self._ends.values():
            send.close()
        self._ends.clear()


def _secret_of_local_ray() -> dict[str, str]:
    """Return environment variables with a new secret. Without them Ray may keep one in the home directory."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


async def _news(process: trio.Process) -> AsyncIterator[News]:
    assert process.stdout is not None
    pending = b""
    async for data in process.stdout:
        *lines, pending = (pending + bytes(data)).split(b"\n")
        for line in lines:
            yield msgspec.json.decode(line, type=News)


async def _end(process: trio.Process) -> None:
    """Let a helper end by itself, so that it stops a Ray that it has started; kill it if it does not."""
    assert process.stdin is not None
    await process.stdin.aclose()
    with trio.move_on_after(END_S):
        await process.wait()
    process.kill()
    await process.wait()


def _by_unique_name(nodes: Iterable[RayNode], known: Collection[str]) -> dict[str, RayNode]:
    """Return nodes by name; the second of a name gets a number, and so does one with the name of a label, "parent".

    known: names that others have.
    """
    found: dict[str, RayNode] = {}
    for node in nodes:
        names = itertools.chain([node.name], (f"{node.name}-{n}" for n in itertools.count(2)))
        found[next(name for name in names if name not in (PARENT, *known, *found))] = node
    return found


@asynccontextmanager
async def open_ray(address: str, labels: Collection[str] = ()) -> AsyncIterator[RayAgents]:
    """Connect with a Ray cluster, or start one, and give its nodes and what starts agents there.

    address: of Ray's head ("10.0.0.1:6379"); "auto": the Ray of this machine; "local": start one on this machine, which
    ends with the block. labels: what all nodes have besides their own in Ray. Raises RayUnavailable.
    """
    if address not in (AUTO, LOCAL) and _HEAD.fullmatch(address) is None:
        raise RayUnavailable(address, f'accepted: HOST:PORT, where its head listens; "{AUTO}"; "{LOCAL}"')
    if not is_importable("ray"):
        raise RayUnavailable(address, "Ray is not installed (pip install '.[cluster]' in the clone)")
    async with open_shielded_nursery() as nursery:
        agents = RayAgents(address, labels, nursery)
        await agents.connect()
        nursery.start_soon(agents.reconnect)
        yield agents
