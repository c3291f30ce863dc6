"""One connection, byte by byte: requests and responses, invalid HTTP, deadlines, bodies."""

from __future__ import annotations

import contextlib
import http.client
import logging
from typing import Any

import pytest
import trio
import trio.testing

from omni_actors.serve.http import buffered_socket, connection, exchange
from tests.support.http_listener import GET, MAX_BODY_BYTES, POST, Server, error_of, read_all, read_answer

# requests and responses


async def test_a_response_has_a_date_and_the_connection_is_kept(server: Server) -> None:
    async with await server.connect() as stream:
        for _ in range(2):
            await stream.send_all(GET)
            status, headers, body = await read_answer(stream)
            assert (status, body, "connection" in headers) == (200, b"hello", False)
            assert headers["date"].endswith("GMT")


async def test_the_scope_of_a_request(server: Server) -> None:
    target = b"/a%20%C3%A9/%FF%00?x=%41"
    await server.ask(b"PATCH " + target + b" HTTP/1.1\r\nHost: x\r\nX-Name: caf\xe9\r\n\r\n")
    [scope] = server.app.scopes
    assert (scope["path"], scope["raw_path"], scope["query_string"]) == (
        "/a é/\ufffd\0",
        b"/a%20%C3%A9/%FF%00",
        b"x=%41",
    )
    assert (scope["method"], scope["http_version"], scope["scheme"]) == ("PATCH", "1.1", "http")
    assert (b"x-name", b"caf\xe9") in scope["headers"]
    assert scope["server"] == server.address


@pytest.mark.parametrize("target", [b"http://other/now?x=1", b"/now", b"//now", b"*", b"now"])
async def test_odd_targets(server: Server, target: bytes) -> None:
    status, _, body = await server.ask(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (status, body) in [(200, b"hello"), (404, target)]


async def test_requests_byte_by_byte_and_pipelined(server: Server) -> None:
    body = POST + b"Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: 1\r\n\r\n"
    last = b"GET /now HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    async with await server.connect() as stream:
        for byte in body + b"\r\n" + last:
            await stream.send_all(bytes([byte]))
        both = await read_all(stream)
    assert both.count(b"HTTP/1.1 200") == 2
    assert both.index(b"abcde") < both.index(b"hello")


async def test_the_first_bytes_of_a_chunk_are_not_read_as_its_size(server: Server) -> None:
    async with await server.connect() as stream:
        for piece in (POST + b"Transfer-Encoding: chunked\r\n\r\n9\r\n", b"ffffffff", b"f\r\n", b"9", b"\r\n"):
            await stream.send_all(piece)
            await trio.testing.wait_all_tasks_blocked(0.01)
        await stream.send_all(b"eeeeeeeee\r\n0\r\n\r\n")
        assert (await read_answer(stream))[2] == b"fffffffffeeeeeeeee"


async def test_head_has_no_body_and_http_1_0_no_keep_alive(server: Server) -> None:
    async with await server.connect() as stream:
        await stream.send_all(b"HEAD /now HTTP/1.1\r\nHost: x\r\n\r\n" + b"GET /now HTTP/1.0\r\n\r\n")
        both = await read_all(stream)
    assert both.count(b"content-length: 5") == 2
    assert both.count(b"hello") == 1


async def test_an_upgrade_is_answered_as_an_ordinary_request(server: Server) -> None:
    upgrade = b"h2c\r\nHTTP2-Settings: \xff?"
    async with await server.connect() as stream:
        await stream.send_all(b"GET /now HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: " + upgrade)
        await stream.send_all(b"\r\n\r\n" + GET)
        assert (await read_answer(stream))[0] == 200


# invalid requests


@pytest.mark.parametrize(
    ("packet", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"G\xc3\x89T / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nna\xc3\xafve: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\na: \0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\na:" + b" " * 60000 + b"\x0b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: gzip\r\n\r\n", 501),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % 2**80, 413),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % 2**79, 413),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n%x" % (MAX_BODY_BYTES + 1), 413),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n%x;a=b\r\nab" % 2**79, 413),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcde", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\na:" + b" " * 60000 + b"\x0b\r\n\r\n", 431),
        (b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"CONNECT", 408),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", 505),
        (b"GET / HTTP/1.1\r\nHost: x\r\na: " + b"x" * 70000, 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20000 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 300 + b"\r\n", 431),
    ],
)
async def test_invalid_http_is_answered_and_the_connection_closed(
    server: Server, packet: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes at once, and the next client is served."""
    with monkeypatch.context() as patch:
        patch.setattr(connection, "HEAD_TIMEOUT_S", 0.2 if packet == b"CONNECT" else 60.0)
        found = await server.ask(packet)
    assert error_of(found)[0] == status
    assert not server.app.scopes or server.app.scopes[0]["path"] == "/body"
    assert (await server.ask(GET))[0] == 200


async def test_an_exception_ends_its_connection_with_a_log_record(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with await server.connect() as other, await server.connect() as stream:
        await stream.send_all(b"GET /bug HTTP/1.1\r\nHost: x\r\n\r\n")
        assert error_of(await read_answer(stream)) == (500, "internal_error")
        await other.send_all(GET)
        assert (await read_answer(other))[0] == 200
        port = stream.socket.getsockname()[1]
    while not caplog.records:
        await trio.lowlevel.checkpoint()
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert f"127.0.0.1:{port}" in record.getMessage()
    assert "an app's bug" in caplog.text


async def test_an_exception_in_the_connections_own_code_is_contained_too(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def broken(*_: Any) -> None:
            raise UnicodeDecodeError("ascii", b"\xe9", 0, 1, "as a library does")

        patch.setattr(exchange, "_scope", broken)
        assert (await server.ask(GET))[0] == 500
        while not caplog.records:
            await trio.lowlevel.checkpoint()
    assert "as a library does" in caplog.text
    assert (await server.ask(GET))[0] == 200


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_cut_response_does_not_look_complete(server: Server, version: bytes) -> None:
    async with await server.connect() as stream:
        await stream.send_all(b"GET /half HTTP/" + version + b"\r\nHost: x\r\n\r\n")
        if version == b"1.0":
            with pytest.raises(trio.BrokenResourceError):
                await read_all(stream)
        else:
            with pytest.raises(http.client.IncompleteRead):
                await read_answer(stream)


# deadlines


async def test_slow_bytes_do_not_extend_the_time_for_a_head(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for the first request and for the next one."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 1.0)
    for before in (b"", GET):
        async with await server.connect() as stream, trio.open_nursery() as nursery:
            if before:
                await stream.send_all(before)
                assert (await read_answer(stream))[0] == 200

            async def drip(stream: trio.SocketStream = stream) -> None:
                with contextlib.suppress(trio.BrokenResourceError):
                    for byte in GET * 100:
                        await stream.send_all(b"x" if byte == 13 else bytes([byte]))
                        await trio.sleep(0.02)

            nursery.start_soon(drip)
            assert error_of(await read_answer(stream)) == (408, "head_too_slow")
            nursery.cancel_scope.cancel()


async def test_idle_connections_are_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that served a request has a time of its own."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 1000.0)
    monkeypatch.setattr(connection, "IDLE_TIMEOUT_S", 0.4)
    async with await server.connect() as kept:
        began = trio.current_time()
        await kept.send_all(GET)
        assert (await read_answer(kept))[0] == 200
        assert await read_all(kept) == b""
        assert trio.current_time() - began >= 0.4
    async with await server.connect() as kept:
        await kept.send_all(GET + b"\r\n\r\n")  # some clients send an empty line behind a body: no request begins
        assert (await read_answer(kept))[0] == 200
        assert await read_all(kept) == b""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(connection, "IDLE_TIMEOUT_S", 1000.0)
    began = trio.current_time()
    async with await server.connect() as new:
        assert await read_all(new) == b""
        assert trio.current_time() - began >= 0.2


def test_idle_connections_outlive_those_of_proxies() -> None:
    assert connection.IDLE_TIMEOUT_S > 60


# bodies


async def test_100_continue_is_sent_when_the_app_wants_the_body(server: Server) -> None:
    head = b" HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"
    async with await server.connect() as stream:
        await stream.send_all(b"POST /body" + head)
        assert await stream.receive_some() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await stream.send_all(b"abcd")
        assert (await read_answer(stream))[2] == b"abcd"
    async with await server.connect() as stream:
        await stream.send_all(b"POST /early" + head)
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 401")


async def test_an_incomplete_body_on_a_closed_connection_ends_the_request_at_once(server: Server) -> None:
    async with await server.connect() as stream:
        await stream.send_all(POST + b"Content-Length: 4\r\nExpect: 100-continue\r\n\r\n")
        await stream.receive_some()
        await stream.send_all(b"ab")
        await stream.send_eof()
        assert await read_all(stream) == b""


async def test_a_refused_upload_is_answered_at_once_and_ends_soon(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that continues to send can still read its response; one that never stops is disconnected."""
    monkeypatch.setattr(buffered_socket, "LINGER_BYTES", 8_000_000)
    monkeypatch.setattr(buffered_socket, "LINGER_S", 60.0)
    head = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n"
    async with await server.connect() as stream:
        await stream.send_all(head + bytes(4_000_000))
        assert (await read_answer(stream))[::2] == (401, b"early")
    async with await server.connect() as stream:
        with pytest.raises(trio.BrokenResourceError):
            await stream.send_all(head + bytes(99_000_000))
