"""How an agent joins: attempts that fail are repeated, those that are refused are not."""

from __future__ import annotations

import itertools
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import trio
import trio.testing
from msgspec import structs

from omni_actors.cluster import connection, control, joining
from omni_actors.cluster.agent import AgentSettings
from omni_actors.cluster.channel import Address, Tls
from omni_actors.cluster.connection import Connection, ConnectionLost, shake_hands
from omni_actors.cluster.handshake import NAME, VERSION, Acceptor, Handshake
from omni_actors.cluster.interfaces import AgentEnd
from omni_actors.cluster.joining import AgentFailed, join
from omni_actors.cluster.spawner import open_cluster
from omni_actors.cluster.subprocess_agents import SubprocessAgents
from omni_actors.cluster.tls import make_credentials
from tests.cluster.subprocess_cluster import FixedPlaces, named
from tests.support.echo_systems import WATCHDOG_S
from tests.support.network import Forwarder

SECRET = secrets.token_bytes(32)
RESET = b"\1\0\0\0\0\0\0\0"
Way = Callable[[trio.SocketStream], Awaitable[None]]
"""What a parent does with a connection; it closes it at the end."""


async def joined(address: Address, tls: Tls | None = None) -> None:
    """Join, and leave."""
    control_connection, _ = await join(address, SECRET, 7, local_host=None, tls=tls)
    await control_connection.close()


@asynccontextmanager
async def parent(*ways: Way) -> AsyncIterator[tuple[Address, list[Way]]]:
    """Run a parent that takes connections one after the other, each by the next way. Yields its address and what is
    left of the ways. One more connection fails the test.
    """
    left = [*ways]

    async def take(stream: trio.SocketStream) -> None:
        async with stream:
            await left.pop(0)(stream)

    with trio.fail_after(WATCHDOG_S):
        async with trio.open_nursery() as nursery:
            [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            async with listener:
                nursery.start_soon(trio.serve_listeners, take, [listener])
                yield listener.socket.getsockname(), left
                nursery.cancel_scope.cancel()


async def accept(stream: trio.abc.Stream) -> None:
    await shake_hands(stream, acceptor := Acceptor(SECRET))
    received, sent = acceptor.keys()
    await Connection(stream, (sent, received), control.FROM_AGENT).send_now(control.Accepted())
    await until_closed(stream)


async def until_closed(stream: trio.abc.Stream) -> None:
    with suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass


async def close(stream: trio.abc.Stream) -> None:
    """Close it at once."""


async def reset(stream: trio.SocketStream) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


async def close_after_the_hello(stream: trio.abc.Stream) -> None:
    await stream.receive_some(1)


async def close_after_the_handshake(stream: trio.abc.Stream) -> None:
    await shake_hands(stream, Acceptor(SECRET))


async def refuse(stream: trio.abc.Stream) -> None:
    await shake_hands(stream, acceptor := Acceptor(SECRET))
    received, sent = acceptor.keys()
    await Connection(stream, (sent, received), control.FROM_AGENT).send_now(control.Refused())


async def answer_with_another_secret(stream: trio.abc.Stream) -> None:
    acceptor = Acceptor(bytes(32))
    await stream.send_all(acceptor.receive(bytes(await stream.receive_some(acceptor.wanted))))
    await until_closed(stream)


async def answer_in_another_version(stream: trio.abc.Stream) -> None:
    await stream.send_all(NAME + b"\x09" + bytes(64))
    await until_closed(stream)


async def answer_in_http(stream: trio.abc.Stream) -> None:
    await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n".ljust(200))
    await until_closed(stream)


@pytest.mark.parametrize("way", [close, reset, close_after_the_hello, close_after_the_handshake, until_closed])
async def test_an_attempt_that_fails_is_repeated(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of these says nothing, as a parent that is busy."""
    failures = itertools.count(1)

    async def counted(stream: trio.abc.Stream, handshake: Handshake) -> None:
        try:
            await shake_hands(stream, handshake)
        except ConnectionLost:
            if next(failures) == 2:  # so the one that is accepted has time
                monkeypatch.setattr(connection, "HANDSHAKE_S", WATCHDOG_S)
            raise

    monkeypatch.setattr(joining, "shake_hands", counted)
    monkeypatch.setattr(connection, "HANDSHAKE_S", 1.0 if way is until_closed else WATCHDOG_S)
    async with parent(way, way, accept) as (address, left):
        await joined(address)
        assert not left


async def test_a_parent_that_is_not_there_for_a_moment_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    connect, refused = trio.open_tcp_stream, trio.Event()

    async def noted(host: str, port: int, *, local_address: str | None) -> trio.SocketStream:
        try:
            return await connect(host, port, local_address=local_address)
        except OSError:
            refused.set()
            raise

    async def come_later() -> None:
        await refused.wait()
        late.listen()
        async with trio.SocketStream((await late.accept())[0]) as stream:
            await accept(stream)

    monkeypatch.setattr(trio, "open_tcp_stream", noted)
    with trio.fail_after(WATCHDOG_S), trio.socket.socket() as late:
        await late.bind(("127.0.0.1", 0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(come_later)
            await joined(late.getsockname())


@pytest.mark.parametrize(
    ("way", "why"),
    [
        (refuse, "does not expect this agent"),
        (answer_with_another_secret, "another secret"),
        (answer_in_another_version, f"version 9 of the protocol; this is version {VERSION}"),
        (answer_in_http, "does not speak this protocol"),
    ],
)
async def test_an_agent_that_is_refused_does_not_try_again(way: Way, why: str) -> None:
    async with parent(way, accept) as (address, left):
        with pytest.raises(AgentFailed, match=why):
            await joined(address)
        assert left == [accept]


async def test_with_tls_a_cut_is_repeated_and_another_certificate_is_not() -> None:
    ours, others = make_credentials().contexts(), make_credentials().contexts()

    async def accept_with_tls(stream: trio.SocketStream) -> None:
        encrypted = trio.SSLStream(stream, ours.server, server_side=True)
        with suppress(trio.BrokenResourceError):
            await encrypted.do_handshake()
            await accept(encrypted)

    async with parent(close, reset, close_after_the_hello, accept_with_tls) as (address, left):
        await joined(address, ours)
        assert not left
    async with parent(accept_with_tls, accept_with_tls) as (address, left):
        with pytest.raises(AgentFailed, match="certificate verify failed"):
            await joined(address, others)
        assert left == [accept_with_tls]


async def test_a_parent_that_is_never_there_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    with trio.fail_after(WATCHDOG_S), socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(AgentFailed, match=r"has not accepted it within 30 s: .*refused"):
            await joined(closed.getsockname())


class ThroughALine(SubprocessAgents):
    """The agent's connections are cut after some bytes, until there were three."""

    def __init__(self, cut_after: int) -> None:
        super().__init__()
        self._cut_after = cut_after

    async def run(self, node: str, settings: AgentSettings) -> AgentEnd:
        with Forwarder(settings.parent, cut_after=self._cut_after) as line:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._mend, line)
                end = await super().run(node, structs.replace(settings, parent=line.address))
                nursery.cancel_scope.cancel()
        return end

    async def _mend(self, line: Forwarder) -> None:
        assert await trio.to_thread.run_sync(line.wait_connections, 3)
        line.cut_after(None)


@pytest.mark.parametrize("cut_after", [0, 30, 56, 70])
async def test_a_node_whose_first_connections_are_cut_is_there_at_the_start(cut_after: int) -> None:
    """Within the hello, behind it, within the proof. It needs no second agent."""
    async with open_cluster(named("a"), ThroughALine(cut_after), FixedPlaces({})) as cluster:
        assert cluster.nodes()["a"].state == "alive"
        assert cluster.agents["a"].number == 1
