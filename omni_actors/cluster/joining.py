"""How an agent joins: it connects to the parent until the parent accepts it.

Rules
1. An attempt whose connection fails is repeated for ``JOIN_S`` seconds: the parent may be busy, may have no room for a
   connection while others flood it, or cannot be reached for a moment. Pauses grow, and are random.
2. These end the attempts at once: the other side has another secret or certificate, or speaks another version; the
   parent does not expect the agent.
3. Once both sides are authenticated, the attempt lasts until the connection or ``JOIN_S`` ends: the parent accepts an
   agent once.
4. Once the parent has accepted it, the agent does not connect again. It ends with its connection, and its workers with
   it: the parent then has a lease to wait for, and starts a new agent.
"""

from __future__ import annotations

import random
from typing import Final

import trio

from omni_actors.cluster import control
from omni_actors.cluster.channel import Address, Tls
from omni_actors.cluster.connection import HANDSHAKE_S, Connection, ConnectionLost, shake_hands
from omni_actors.cluster.handshake import ROLE_OF_AGENTS, Connector, HandshakeFailed

JOIN_S: Final = 30.0
"""Seconds from the start of an agent within which the parent must accept it."""
PAUSE_S: Final = (0.05, 1.0)
"""The first and the longest pause between two attempts."""


class AgentFailed(Exception):
    """The agent could not reach the parent, or was refused."""


async def join(
    parent: Address, secret: bytes, number: int, *, local_host: str | None, tls: Tls | None
) -> tuple[Connection[control.ToAgent], str]:
    """Return the control connection of an agent that the parent has accepted, and this side's address of it.

    Args:
        parent: Host and port at which the parent accepts agents.
        secret: What both sides prove to know.
        number: The agent's.
        local_host: The address to connect from; None: any.
        tls: What to use TLS with; None: use none.

    The caller closes the connection. Raises AgentFailed.
    """
    pause_s, why = PAUSE_S[0], "no answer"
    with trio.move_on_after(JOIN_S):
        while True:
            try:
                return await _attempt(parent, Connector(secret, ROLE_OF_AGENTS, number), local_host, tls)
            except ConnectionLost as error:
                why = error.why
            except OSError as error:
                causes = error.__cause__  # trio's errors for all addresses of the host
                why = "; ".join(map(str, causes.exceptions)) if isinstance(causes, ExceptionGroup) else str(error)
            except (HandshakeFailed, control.ControlCorrupted) as error:
                raise AgentFailed(str(error)) from error
            await trio.sleep(random.uniform(0.5, 1.0) * pause_s)
            pause_s = min(2 * pause_s, PAUSE_S[1])
    raise AgentFailed(f"the parent at {parent[0]}:{parent[1]} has not accepted it within {JOIN_S:g} s: {why}")


async def _attempt(
    parent: Address, connector: Connector, local_host: str | None, tls: Tls | None
) -> tuple[Connection[control.ToAgent], str]:
    """Connect once. Raises OSError, ConnectionLost; HandshakeFailed, ControlCorrupted; AgentFailed (refused)."""
    with trio.move_on_after(HANDSHAKE_S) as connecting:
        stream = await trio.open_tcp_stream(*parent, local_address=local_host)
    if connecting.cancelled_caught:
        raise ConnectionLost(f"it could not be made within {HANDSHAKE_S:g} s")
    encrypted = stream if tls is None else trio.SSLStream(stream, tls.client)
    try:
        return await _accepted(encrypted, connector), stream.socket.getsockname()[0]
    except BaseException:
        await trio.aclose_forcefully(encrypted)
        raise


async def _accepted(stream: trio.abc.Stream, connector: Connector) -> Connection[control.ToAgent]:
    await shake_hands(stream, connector)
    connection = Connection(stream, connector.keys(), control.TO_AGENT)
    if isinstance(await connection.receive(), control.Accepted):
        return connection
    raise AgentFailed("the parent does not expect this agent any more")
