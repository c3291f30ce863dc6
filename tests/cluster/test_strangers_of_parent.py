"""Connections of strangers to the parent's port: none is taken for an agent, none ends it, and memory is bounded."""

from __future__ import annotations

import os
import random
import signal
import sys
from contextlib import suppress

import psutil
import pytest
import trio

from omni_actors.cluster.agent import ROLE
from omni_actors.cluster.channel import Address
from omni_actors.cluster.handshake import Connector
from omni_actors.cluster.spawner import MOST_STRANGERS
from tests.cluster.long_answers import ask_long, check_exact, long_answers
from tests.cluster.strangers import authenticated, connect, wait_closed
from tests.cluster.subprocess_cluster import ClusterOf, open_on_nodes
from tests.cluster.test_strangers import FLOOD, MEMORY
from tests.support.echo_systems import read, wait_restarted

NODES = {"first": "a", "second": "parent"}
UNKNOWN = 1_000_000
"""The number of no agent."""


def say(address: Address, *parts: bytes) -> None:
    """Send a stranger's bytes, and read the answer to all but the last part. Returns when the parent has closed."""
    stranger = connect(address)
    with suppress(ConnectionResetError, BrokenPipeError):
        for part in parts[:-1]:
            stranger.sendall(part)
            assert stranger.recv(200)
        stranger.sendall(parts[-1])
    wait_closed(stranger)


def try_all(address: Address, secret: bytes, agent: int) -> None:
    """Try everything that a stranger may. secret: the right one. agent: the number of an agent that is connected."""
    source = random.Random(7)
    for _ in range(50):
        say(address, source.randbytes(200))
    hello = Connector(bytes(32), ROLE, agent).hello
    for size in range(len(hello)):
        say(address, hello[:size] + source.randbytes(200))
    say(address, hello, source.randbytes(200))  # another secret
    connection, said = authenticated(address, UNKNOWN, role=ROLE, secret=secret)
    wait_closed(connection)
    say(address, said[: len(hello)], said[len(hello) :])  # recorded
    for subject, role in ((agent, ROLE), (UNKNOWN, "link")):
        wait_closed(authenticated(address, subject, role=role, secret=secret)[0])


async def check_alive(cluster: ClusterOf) -> None:
    check_exact(generation := ask_long(cluster.omni), await read(generation))


async def test_nothing_that_a_stranger_says_makes_it_an_agent() -> None:
    async with open_on_nodes(long_answers(), NODES) as cluster:
        [agent] = cluster.spawner.agents.values()
        await trio.to_thread.run_sync(try_all, cluster.spawner.address, cluster.spawner._secret, agent.number)
        assert [*cluster.spawner.agents.values()] == [agent]
        assert agent.lost is None
        await check_alive(cluster)


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_a_flood_of_connections_costs_little_and_keeps_no_agent_out(count: int) -> None:
    process = psutil.Process()
    async with open_on_nodes(long_answers(), NODES) as cluster:
        await check_alive(cluster)
        host, port = cluster.spawner.address
        memory, descriptors = process.memory_info().rss, process.num_fds()
        flood = await trio.lowlevel.open_process([sys.executable, "-c", FLOOD, host, str(port), str(count)])
        most_memory = most_descriptors = 0
        try:
            while flood.poll() is None:
                await trio.sleep(0.01)
                most_memory = max(most_memory, process.memory_info().rss)
                most_descriptors = max(most_descriptors, process.num_fds())
            assert flood.returncode == 0
        finally:
            flood.kill()
            with trio.CancelScope(shield=True):
                await flood.wait()
        assert most_descriptors <= descriptors + MOST_STRANGERS + 16
        assert most_memory - memory < MEMORY
        os.kill(cluster.agents.pids["a"], signal.SIGKILL)
        await wait_restarted(cluster.omni, "first", 2)
        await check_alive(cluster)
