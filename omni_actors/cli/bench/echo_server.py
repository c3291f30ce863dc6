"""A bare server for ``omni-actors bench --self-test``: it answers each conversation at a fixed pace, without a model.

Each event says when it was sent, on the machine's monotonic clock. So the generator sees what it adds itself, together
with this server's socket and the kernel. The server runs in a process of its own, prints its URL, and ends when its
standard input does: it never outlives the program that started it.
"""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

import h11
import msgspec
import trio

INTERVAL_S = 0.02
"""Between two events."""
TOKENS = 32
"""Events of an answer that sets no ``max_tokens``."""
SOUND = base64.b64encode(bytes(960)).decode()
"""20 ms of silence at 24 kHz: as much as one interval lasts."""
HEADERS = [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]


class _Body(msgspec.Struct):
    max_tokens: int = TOKENS
    modalities: list[str] = []


async def _serve(stream: trio.SocketStream) -> None:
    """Answer the requests of one connection, one after the other."""
    stream.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
    connection = h11.Connection(h11.SERVER)
    with suppress(trio.BrokenResourceError, h11.RemoteProtocolError):
        while (body := await _request(stream, connection)) is not None:
            await _send(stream, connection, h11.Response(status_code=200, headers=HEADERS))
            async for data in _answer(msgspec.json.decode(body, type=_Body)):
                await _send(stream, connection, h11.Data(data=data))
            await _send(stream, connection, h11.EndOfMessage())
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                return
            connection.start_next_cycle()


async def _request(stream: trio.SocketStream, connection: h11.Connection) -> bytes | None:
    """Return the body of the next request; None at the end of the connection."""
    body = b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some())
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return body
        elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            return None


async def _send(stream: trio.SocketStream, connection: h11.Connection, event: h11.Event) -> None:
    data = connection.send(event)
    assert data is not None
    await stream.send_all(data)


async def _answer(body: _Body) -> AsyncIterator[bytes]:
    """Yield the events of an answer, each when it is due."""
    began = trio.current_time()
    for number in range(body.max_tokens):
        await trio.sleep_until(began + (number + 1) * INTERVAL_S)
        yield _event({"content": "word "})
        if "audio" in body.modalities:
            yield _event({"audio": {"data": SOUND}})
    usage = {"prompt_tokens": 1, "completion_tokens": body.max_tokens}
    yield _event({}, finish_reason="stop", usage=usage) + b"data: [DONE]\n\n"


def _event(delta: dict[str, object], finish_reason: str | None = None, usage: object = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    chunk = {"choices": [choice], "usage": usage, "sent_s": time.monotonic()}
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


async def main() -> None:
    """Serve on a free port of this machine until standard input ends."""
    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, _serve, 0, host="127.0.0.1"))
        print(f"http://127.0.0.1:{listener.socket.getsockname()[1]}", flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()
