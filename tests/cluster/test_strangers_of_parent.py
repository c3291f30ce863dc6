"""Connections of strangers to the parent's port: none is taken for an agent, none ends it, and memory is bounded."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
from contextlib import ExitStack, suppress

import pytest
import trio

from omni_actors.cluster import connection
from omni_actors.cluster.channel import Address
from omni_actors.cluster.handshake import ROLE_OF_AGENTS, Connector
from omni_actors.cluster.spawner import open_cluster
from omni_actors.cluster.strangers import MOST_STRANGERS
from omni_actors.cluster.subprocess_agents import SubprocessAgents
from tests.cluster.long_answers import ask_long, check_exact, long_answers
from tests.cluster.strangers import FLOOD, Cost, authenticated, connect, kept_up, wait_closed
from tests.cluster.subprocess_cluster import ClusterOf, FixedPlaces, named, open_on_nodes
from tests.support.echo_systems import WATCHDOG_S, read, wait_restarted

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
    hello = Connector(bytes(32), ROLE_OF_AGENTS, agent).hello
    for size in range(len(hello)):
        say(address, hello[:size] + source.randbytes(200))
    say(address, hello, source.randbytes(200))  # another secret
    stranger, said = authenticated(address, UNKNOWN, role=ROLE_OF_AGENTS, secret=secret)
    wait_closed(stranger)
    say(address, said[: len(hello)], said[len(hello) :])  # recorded
    for subject, role in ((agent, ROLE_OF_AGENTS), (UNKNOWN, "link")):
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


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_a_flood_of_connections_costs_little_and_keeps_no_agent_out(count: int) -> None:
    async with open_on_nodes(long_answers(), NODES) as cluster:
        await check_alive(cluster)
        host, port = cluster.spawner.address
        cost = Cost()
        flood = await trio.lowlevel.open_process([sys.executable, "-c", FLOOD, host, str(port), str(count)])
        try:
            while flood.poll() is None:
                await trio.sleep(0.01)
                cost.check()
            assert flood.returncode == 0
        finally:
            flood.kill()
            with trio.CancelScope(shield=True):
                await flood.wait()
        os.kill(cluster.agents.pids["a"], signal.SIGKILL)
        await wait_restarted(cluster.omni, "first", 2)
        await check_alive(cluster)


def connect_from(host: str, address: Address) -> socket.socket:
    return socket.create_connection(address, WATCHDOG_S, source_address=(host, 0))


@pytest.mark.parametrize(
    ("host", "speaks"), [("127.0.0.1", False), ("127.0.0.2", True)], ids=["silent", "from another address"]
)
async def test_a_flood_displaces_no_agent_while_it_shakes_hands(
    host: str, speaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent has said hello, and is slow to go on. host: of the flood. speaks: whether it says hello, too."""
    monkeypatch.setattr(connection, "HANDSHAKE_S", WATCHDOG_S)  # a busy machine may be slow, too

    def flood_meanwhile(address: Address, secret: bytes) -> bytes:
        with connect(address) as slow, ExitStack() as closing:
            handshake = Connector(secret, ROLE_OF_AGENTS, UNKNOWN)
            slow.sendall(handshake.hello)
            answer = slow.recv(handshake.wanted, socket.MSG_WAITALL)
            flood = [closing.enter_context(connect_from(host, address)) for _ in range(4 * MOST_STRANGERS)]
            for stranger in flood if speaks else ():
                with suppress(ConnectionResetError, BrokenPipeError):
                    stranger.sendall(Connector(bytes(32), ROLE_OF_AGENTS, 1).hello)
            if speaks:  # the parent has taken the last one: it has answered, or closed it
                with suppress(ConnectionResetError):
                    flood[-1].recv(1)
            else:  # the parent has taken those behind it
                wait_closed(flood[2 * MOST_STRANGERS])
            with suppress(BrokenPipeError):
                slow.sendall(handshake.receive(answer))
            with suppress(ConnectionResetError):
                return slow.recv(200)
            return b""

    async with open_cluster(named(), SubprocessAgents(), FixedPlaces({})) as spawner:
        verdict = await trio.to_thread.run_sync(flood_meanwhile, spawner.address, spawner._secret)
        assert verdict, "it had to make room"


@pytest.mark.slow
@pytest.mark.parametrize("count", [1000, 10_000])
async def test_an_agent_joins_during_a_flood_that_is_kept_up_and_costs_little(count: int) -> None:
    async with open_on_nodes(long_answers(), NODES) as cluster, trio.open_nursery() as nursery:
        nursery.start_soon(Cost().watch)
        async with kept_up(cluster.spawner.address, count):
            for generation in (2, 3, 4):
                os.kill(cluster.agents.pids["a"], signal.SIGKILL)
                await wait_restarted(cluster.omni, "first", generation)
        await check_alive(cluster)
        nursery.cancel_scope.cancel()
