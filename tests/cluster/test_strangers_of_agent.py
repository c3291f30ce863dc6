"""Connections of strangers to an agent's port for links: they cost it bounded memory, and keep no link out."""

from __future__ import annotations

import os
import signal

import pytest
import trio

from omni_actors.cluster.tls import make_credentials
from tests.cluster.long_answers import ask_long, check_exact, long_answers
from tests.cluster.strangers import MEMORY, Cost, client_hello, kept_up
from tests.cluster.subprocess_cluster import open_on_nodes
from tests.support.echo_systems import pid_of, read, wait_restarted

NODES = {"first": "a", "second": "b"}
MEMORY_WITH_TLS = 32 << 20
"""Several times what 64 handshakes of OpenSSL take (below 100 kB each), and far less than 10,000 do."""


@pytest.mark.slow
@pytest.mark.parametrize(("has_tls", "host"), [(False, "127.0.0.1"), (True, "127.0.0.2")], ids=["plain", "TLS"])
async def test_a_flood_that_is_kept_up_costs_an_agent_little_and_links_open_meanwhile(has_tls: bool, host: str) -> None:
    """With TLS, each connection gets as far as a stranger can: its handshake waits for a certificate.

    host: where the flood comes from. Without a word, it keeps no node of its own address out, and else none of others.
    """
    credentials = make_credentials() if has_tls else None
    async with (
        open_on_nodes(long_answers(), NODES, tls=credentials) as cluster,
        trio.open_nursery() as nursery,
    ):
        check_exact(before := ask_long(cluster.omni), await read(before))
        agent = cluster.spawner.agents["b"]
        nursery.start_soon(Cost(agent.pid, MEMORY_WITH_TLS if has_tls else MEMORY).watch)
        async with kept_up(agent.links, 10_000, said=client_hello() if has_tls else b"", host=host):
            for generation in (2, 3):
                os.kill(pid_of(cluster.omni, "first"), signal.SIGKILL)
                await wait_restarted(cluster.omni, "first", generation)
                check_exact(during := ask_long(cluster.omni), await read(during))
        assert cluster.spawner.agents["b"] is agent
        nursery.cancel_scope.cancel()
