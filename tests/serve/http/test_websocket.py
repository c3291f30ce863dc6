"""WebSockets of a listener: the handshake, frames, limits, silent clients, the drain."""

from __future__ import annotations

import socket
import struct

import pytest
import trio
import trio.testing
from wsproto import events

from omni_actors.serve.http import websocket
from tests.support.http_listener import GET, MAX_MESSAGE_BYTES, Server, error_of, listening, read_all, read_answer
from tests.support.websocket_client import connected, head


async def test_messages_go_both_ways_and_the_application_closes(server: Server) -> None:
    async with connected(server, "/echo?x=1") as client:
        for sent in (events.TextMessage("héllo"), events.BytesMessage(b"\0" * 70_000), events.TextMessage("")):
            await client.send(sent)
            size = 0
            while True:
                found = await client.receive()
                assert type(found) is type(sent)
                size += len(found.data)
                if found.message_finished:
                    break
            assert size == len(sent.data)
        await client.send(events.Ping(b"there?"))
        assert await client.receive() == events.Pong(b"there?")
        await client.send(events.TextMessage("close"))
        assert await client.receive() == events.CloseConnection(4000, "asked")
    [scope] = server.app.scopes
    assert (scope["type"], scope["scheme"], scope["path"], scope["query_string"]) == (
        "websocket",
        "ws",
        "/echo",
        b"x=1",
    )


async def test_a_fragmented_message_arrives_whole_and_control_frames_between_its_parts_are_answered(
    server: Server,
) -> None:
    async with connected(server, "/echo") as client:
        await client.send(events.TextMessage("one ", message_finished=False), events.Ping(b"p"))
        assert await client.receive() == events.Pong(b"p")
        await client.send(*(events.TextMessage("", message_finished=False) for _ in range(50)))
        await client.send(events.TextMessage("message"))
        assert await client.receive() == events.TextMessage("one message")


def frames_of(data: bytes) -> list[tuple[int, bool, bytes]]:
    """Return a server's frames: the opcode, whether the message ends there, and the payload."""
    found = []
    while data:
        size, start = data[1], 2
        if size >= 126:
            start = 4 if size == 126 else 10
            size = int.from_bytes(data[2:start], "big")
        found.append((data[0] & 15, data[0] >= 128, data[start : start + size]))
        data = data[start + size :]
    return found


@pytest.mark.parametrize("text", ["x" * 1_000_000, "\u00e9" * 500_000, "x" * websocket.FRAGMENT])
async def test_a_long_message_is_sent_in_fragments_with_no_other_frame_between_them(server: Server, text: str) -> None:
    async with connected(server, "/echo") as client:
        await client.send(events.TextMessage(text))
        data = bytearray(await client.stream.receive_some(1000))
        await client.send(events.Ping(b"there?"))
        while not data.endswith(b"there?"):
            data += await client.stream.receive_some()
    *parts, pong = frames_of(bytes(data))
    assert pong == (10, True, b"there?")
    assert [part[:2] for part in parts] == [(0 if at else 1, at == len(parts) - 1) for at in range(len(parts))]
    assert b"".join(payload for _, _, payload in parts).decode() == text
    assert max(len(payload.decode()) for _, _, payload in parts) == websocket.FRAGMENT


@pytest.mark.parametrize("code", [1000, 4321])
async def test_the_client_closes(server: Server, code: int) -> None:
    async with connected(server, "/echo") as client:
        await client.send(events.CloseConnection(code, "bye"))
        assert await client.receive() == events.CloseConnection(code, "bye")
        assert await client.stream.receive_some() == b""
    assert server.app.disconnects == [code]


async def test_a_client_that_vanishes_is_a_disconnect(server: Server) -> None:
    async with connected(server, "/echo") as client:
        await client.stream.send_eof()
        assert await read_all(client.stream) == b""
    assert server.app.disconnects == [1006]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"\x81\x01a", 1002),  # not masked
        (b"\xf1\x80\0\0\0\0", 1002),  # a reserved bit
        (b"\x83\x80\0\0\0\0", 1002),  # an unknown opcode
        (b"\x80\x80\0\0\0\0", 1002),  # a continuation of nothing
        (b"\x89\xfe\0\x7e\0\0\0\0", 1002),  # a ping of 126 bytes
        (b"\x81\x81\0\0\0\0\xff", 1007),  # not UTF-8
        (b"\x88\x81\0\0\0\0\0", 1002),  # a close code of one byte
    ],
)
async def test_what_breaks_the_framing_ends_the_connection_with_a_code(server: Server, sent: bytes, code: int) -> None:
    async with connected(server, "/echo") as client:
        await client.stream.send_all(sent)
        found = await client.receive()
        assert isinstance(found, events.CloseConnection)
        assert found.code == code
        assert await client.stream.receive_some() == b""
    assert server.app.disconnects == [code]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"\x88\x82\0\0\0\0\x03\xe8", 1000),  # a close frame
        (b"\x88\x82\0\0\0\0\x03\xe8" * 2, 1000),
        (b"\x81\x01a", 1002),  # not masked
        (b"\x81\x81\0\0\0\0\xff", 1007),  # not UTF-8
    ],
)
@pytest.mark.parametrize("behind", [b"\x89\x80\0\0\0\0" * 4000, b"\xff" * 20_000])
async def test_data_behind_the_end_of_the_connection_is_discarded(
    server: Server, sent: bytes, code: int, behind: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The data is more than the server gives wsproto at a time. A reset would make reading fail."""
    assert len(behind) > websocket.PARSED_BYTES
    async with connected(server, "/echo") as client:
        await client.stream.send_all(sent + behind)
        found = await client.receive()
        assert isinstance(found, events.CloseConnection)
        assert found.code == code
        assert await client.stream.receive_some() == b""
    while not server.app.disconnects:
        await trio.lowlevel.checkpoint()
    assert server.app.disconnects == [code]
    assert not caplog.records


async def test_the_limit_of_a_text_counts_its_bytes_in_utf_8(server: Server) -> None:
    async with connected(server, "/echo") as client:
        fits, too_large = "\u00e9" * (MAX_MESSAGE_BYTES // 2), "\u00e9" * (MAX_MESSAGE_BYTES // 2 + 1)
        await client.send(events.TextMessage(fits))
        echoed = ""
        while len(echoed) < len(fits):
            part = await client.receive()
            assert isinstance(part, events.TextMessage)
            echoed += part.data
        assert echoed == fits
        await client.send(events.TextMessage(too_large))
        found = await client.receive()
        assert isinstance(found, events.CloseConnection)
        assert found.code == 1009


@pytest.mark.parametrize("fragments", [1, 1000])
async def test_a_message_is_refused_when_it_exceeds_the_limit_and_not_when_it_is_complete(
    server: Server, fragments: int
) -> None:
    async with connected(server, "/echo") as client:
        size = MAX_MESSAGE_BYTES // fragments + 1
        if fragments == 1:  # a frame that declares 30 MB, of which a little more than the limit arrives
            declared = b"\x82\xff" + (30_000_000).to_bytes(8, "big") + b"\0\0\0\0"
            await client.stream.send_all(declared + b"x" * size)
        else:
            await client.send(*(events.BytesMessage(b"x" * size, message_finished=False) for _ in range(fragments)))
        found = await client.receive()
        assert found == events.CloseConnection(1009, f"a message is larger than {MAX_MESSAGE_BYTES} bytes")
        assert await read_all(client.stream) == b""  # the application has ended
    assert server.app.disconnects == [1006]


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (head("/echo", version=8), 426, "unsupported_websocket_version"),
        (head("/echo", key=""), 400, "invalid_http"),
        (head("/echo", key="short"), 400, "invalid_http"),
        (head("/echo", more="Content-Length: 5\r\n"), 400, "invalid_http"),
    ],
)
async def test_bad_handshakes(server: Server, sent: bytes, status: int, code: str) -> None:
    assert error_of(await server.ask(sent)) == (status, code)
    assert not server.app.scopes


async def test_a_handshake_of_another_version_is_told_which_one_there_is(server: Server) -> None:
    _, headers, _ = await server.ask(head("/echo", version=8))
    assert headers["sec-websocket-version"] == "13"
    assert (headers["upgrade"], headers["connection"]) == ("websocket", "Upgrade, close")


async def test_the_application_refuses(server: Server) -> None:
    assert (await server.ask(head("/denied")))[::2] == (429, b"not now")
    status, headers, body = await server.ask(head("/closed"))
    assert (status, headers["content-type"]) == (403, "application/json")
    assert b"refused" in body


async def test_subprotocols_that_are_not_ascii_are_passed_on(server: Server) -> None:
    request = head("/closed", more="Sec-WebSocket-Protocol: realtime, x").replace(b", x", b", \xe9,")
    assert (await server.ask(request))[0] == 403
    assert server.app.scopes[0]["subprotocols"] == ["realtime", "é"]


async def test_a_bug_in_the_application_is_a_close_code(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async with connected(server, "/bug") as client:
        assert await client.receive() == events.CloseConnection(1011, "")
        await read_all(client.stream)
    while not caplog.records:
        await trio.lowlevel.checkpoint()
    assert "failed" in caplog.text


@pytest.mark.parametrize("path", ["/denied", "/closed", "/echo"])
async def test_a_client_that_resets_the_connection_during_the_handshake_leaves_nothing(
    server: Server, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        stream = await server.connect()
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await stream.send_all(head(path))
        await stream.aclose()
    while (await server.ask(GET))[0] != 200:  # the connections are gone
        await trio.lowlevel.checkpoint()
    assert not caplog.records


async def pass_time(clock: trio.testing.MockClock, seconds: float) -> None:
    """Let time pass, which stands still otherwise. Before and after, everything that was sent has arrived."""
    await trio.testing.wait_all_tasks_blocked(0.05)
    clock.jump(seconds)
    await trio.testing.wait_all_tasks_blocked(0.05)


async def test_a_silent_client_is_pinged_and_then_disconnected(
    server: Server, mock_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "PING_S", 1.0)
    async with connected(server, "/echo") as client:
        for _ in range(3):
            await pass_time(mock_clock, websocket.PING_S)
            assert await client.receive() == events.Ping(b"")
            await client.send(events.Pong(b""))
            await pass_time(mock_clock, websocket.PING_S)  # the client was not silent
        await pass_time(mock_clock, websocket.PING_S)
        assert await client.receive() == events.Ping(b"")
        await pass_time(mock_clock, websocket.PING_S)
        assert await read_all(client.stream) == b""  # the ping was not answered
    assert server.app.disconnects == [1006]


async def test_an_application_that_does_not_receive_holds_the_client_back(
    server: Server, mock_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the client is not disconnected for a pong that the server has not read."""
    monkeypatch.setattr(websocket, "PING_S", 1.0)
    sent = 0
    async with connected(server, "/quiet") as client, trio.open_nursery() as nursery:

        async def send() -> None:
            nonlocal sent
            for _ in range(1000):
                await client.send(events.BytesMessage(b"x" * 100_000))
                sent += 1

        nursery.start_soon(send)
        for _ in range(4):
            await pass_time(mock_clock, websocket.PING_S)
        assert sent < 1000
        server.app.may_end.set()
        await pass_time(mock_clock, 0.0)
        assert server.app.disconnects == []
        nursery.cancel_scope.cancel()
    mock_clock.rate = 1.0


async def test_a_client_that_does_not_read_delays_the_close_for_a_while(
    server: Server, mock_clock: trio.testing.MockClock
) -> None:
    async with connected(server, "/unread"):
        await pass_time(mock_clock, 1.0)
        server.app.may_end.set()
        await pass_time(mock_clock, 0.9 * websocket.CLOSE_S)
        assert not server.app.closed.is_set()
        await pass_time(mock_clock, 0.2 * websocket.CLOSE_S)
        assert server.app.closed.is_set()
    mock_clock.rate = 1.0


async def test_a_drain_tells_the_application_and_ends_with_1001() -> None:
    async with listening(drain_s=0.2) as server, connected(server, "/echo") as client:
        await client.send(events.TextMessage("hello"))
        await client.receive()
        server.stop.set()
        assert await client.receive() == events.CloseConnection(1001, "")
        drain = server.app.scopes[0][websocket.DRAIN]
        assert drain.begun.is_set()
        assert drain.over.is_set()
        assert server.requests_were_ended.is_set()


async def test_a_websocket_that_begins_in_the_drain_is_told() -> None:
    """The beginning of its request has arrived before. The drain lasts until the client leaves."""
    async with listening(drain_s=60) as server, await server.connect() as stream:
        await stream.send_all(b"GET /echo HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n")
        await trio.testing.wait_all_tasks_blocked(0.01)
        server.stop.set()
        await stream.send_all(b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n")
        assert b" 101 " in await stream.receive_some(64)
        assert server.app.scopes[0][websocket.DRAIN].begun.is_set()


async def test_websockets_count_as_connections(server: Server) -> None:
    async with connected(server, "/echo"), connected(server, "/echo"), connected(server, "/echo") as client:
        assert error_of(await server.ask()) == (503, "too_many_connections")
        await client.send(events.CloseConnection(1000))
        await client.stream.aclose()
        while (await server.ask(GET))[0] != 200:
            await trio.lowlevel.checkpoint()


async def test_a_request_may_come_before_the_handshake(server: Server) -> None:
    stream = await server.connect()
    async with stream:
        await stream.send_all(GET)
        assert (await read_answer(stream))[0] == 200
        await stream.send_all(head("/echo") + b"\x81\x82\0\0\0\0hi")  # a frame in the same packet
        answer = b""
        while b"\x02hi" not in answer:
            answer += await stream.receive_some()
        assert answer.startswith(b"HTTP/1.1 101 ")
        assert answer.endswith(b"\x81\x02hi")
