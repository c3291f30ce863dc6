"""A request's files from hosts: how many at a time, and what ends the loading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from omni_actors.serve.access.admission import AdmissionTicket
from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.media.loader import LOAD_TIMEOUT_S, MediaLoader, MediaReference
from tests.serve.media.loading import bring, image, refusal, ticket

Host = Callable[[Callable[[trio.SocketStream], Any]], Any]


@pytest.fixture
def host(nursery: trio.Nursery) -> Host:
    """Start a server on loopback; gives its port."""

    async def start(serve: Callable[[trio.SocketStream], Any]) -> int:
        [listener] = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        port: int = listener.socket.getsockname()[1]
        return port

    return start


def reachable(port: int) -> MediaLoader:
    return MediaLoader([f"localhost:{port}"], may_connect=lambda address: address.is_loopback)


async def answer(stream: trio.SocketStream, body: bytes) -> None:
    await stream.receive_some()
    await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


async def test_files_are_fetched_some_at_a_time(host: Host) -> None:
    """Four of them; the fifth when one of these is here."""
    may_answer, inside, most = trio.Event(), 0, 0

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if most == 4:
            await trio.testing.wait_all_tasks_blocked(0.01)
            may_answer.set()
        await may_answer.wait()
        inside -= 1
        await answer(stream, b"x" * 7)

    port = await host(serve)
    into = ticket()
    files = await bring(reachable(port), *[image(f"http://localhost:{port}/{n}.png") for n in range(10)], into=into)
    assert (files, into.bytes, most) == ([b"x" * 7] * 10, 70, 4)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"])
async def test_a_host_that_goes_to_sleep_is_given_up(
    host: Host, sent: bytes, mock_clock: trio.testing.MockClock
) -> None:
    """Time stands still until the host has sent its last byte."""
    ended = trio.Event()

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(sent)
        mock_clock.autojump_threshold = 0
        assert await stream.receive_some() == b""
        ended.set()

    port = await host(serve)
    began = trio.current_time()
    with pytest.raises(HTTPError, match=f"within {LOAD_TIMEOUT_S:g} s") as caught:
        await reachable(port).load([image(f"http://localhost:{port}/a.png")], ticket())
    assert caught.value.code == "files_too_slow"
    assert trio.current_time() - began == pytest.approx(LOAD_TIMEOUT_S, abs=1)
    mock_clock.autojump_threshold = float("inf")
    await ended.wait()


async def test_a_refused_file_cancels_the_others(host: Host) -> None:
    ended = trio.Event()

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        bad.set()
        assert await stream.receive_some() == b""
        ended.set()

    bad = trio.Event()
    port = await host(serve)
    references: Sequence[MediaReference] = [
        image(f"http://localhost:{port}/a.png"),
        MediaReference("image", "data:,", "other"),
    ]

    class Late(MediaLoader):
        async def _read(self, reference: MediaReference, ticket: AdmissionTicket) -> bytes:
            if reference.param == "other":
                await bad.wait()
            return await super()._read(reference, ticket)

    late = Late([f"localhost:{port}"], may_connect=lambda address: address.is_loopback)
    with pytest.raises(HTTPError) as caught:
        await bring(late, *references)
    assert caught.value.param == "other"
    with trio.fail_after(60):
        await ended.wait()


async def test_a_fetched_file_is_cut_where_the_request_is_full(host: Host) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        try:
            await answer(stream, bytes(10_000_000))
        except trio.BrokenResourceError:
            cut.set()

    cut = trio.Event()
    port = await host(serve)
    into = ticket(100_000, 1_000_000)
    code, _ = await refusal(reachable(port), image(f"http://localhost:{port}/a.png"), into)
    assert code == "image_file_too_large"
    assert into.bytes <= 100_000
    with trio.fail_after(60):
        await cut.wait()
