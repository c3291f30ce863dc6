"""A site on this machine, a resolver under a test's control, and fetchers that may or may not connect to it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import trio

from omni_actors.serve.media.fetch import Fetcher, MediaUnavailable

HOST = "files.example.org"
LOOPBACK = ip_address("127.0.0.1")


class Site:
    """A server on loopback. answers: what it sends for a path; it waits at an empty piece."""

    def __init__(self) -> None:
        self.answers: dict[bytes, Sequence[bytes]] = {}
        self.requests: list[bytes] = []
        self.connections = 0
        self.port = 0

    async def serve(self, stream: trio.abc.Stream) -> None:
        self.connections += 1
        async with stream:
            head = b""
            while b"\r\n\r\n" not in head:
                piece = await stream.receive_some()
                if not piece:
                    return
                head += piece
            self.requests.append(head)
            try:
                for piece in self.answers[head.split()[1]]:
                    if not piece:
                        await trio.sleep_forever()
                    await stream.send_all(piece)
            except trio.BrokenResourceError:
                pass  # it has seen enough

    def url(self, path: str = "/a.png", host: str = HOST) -> str:
        return f"http://{host}:{self.port}{path}"


class Names(trio.abc.HostnameResolver):
    """A resolver: each look-up takes the next result, and the last one repeats."""

    def __init__(self) -> None:
        self.leads_to: list[list[str]] = [["127.0.0.1"]]
        self.asked: list[str] = []

    async def getaddrinfo(self, host: Any, port: Any, family: int = 0, type: int = 0, *_: int) -> list[Any]:
        await trio.lowlevel.checkpoint()
        self.asked.append(host.decode() if isinstance(host, bytes) else host)
        found = self.leads_to.pop(0) if len(self.leads_to) > 1 else self.leads_to[0]
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6, type, 6, "", (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, type, 6, "", (address, port))
            for address in found
        ]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
        raise NotImplementedError


def ok(body: bytes, *headers: str) -> list[bytes]:
    head = "".join(f"{header}\r\n" for header in headers)
    return [f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body]


def moved(location: str, status: int = 302) -> list[bytes]:
    return [f"HTTP/1.1 {status} Found\r\nLocation: {location}\r\nContent-Length: 4\r\n\r\ngone".encode()]


PEM = Path(__file__).parent / f"{HOST}.pem"


def fetcher(site: Site, *more: str) -> Fetcher:
    """A fetcher that may also connect to loopback."""
    return Fetcher([f"{HOST}:{site.port}", *more], lambda address: address.is_loopback)


def guarded(site: Site) -> Fetcher:
    """A fetcher with the policy of a server."""
    return Fetcher([HOST, f"{HOST}:{site.port}", "localhost", f"localhost:{site.port}"])


async def fetch(fetcher: Fetcher, url: str, limit: int = 1000) -> bytes:
    with trio.fail_after(60):
        return await fetcher.fetch(url, Counter(limit).hold)


class TooMuch(Exception):
    pass


class Counter:
    def __init__(self, limit: int) -> None:
        self.left = limit

    def hold(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise TooMuch


async def refusal(fetcher: Fetcher, url: str) -> str:
    """Return the code and the reason of the refusal, as the client receives them."""
    with pytest.raises(MediaUnavailable) as caught:
        await fetch(fetcher, url)
    return f"{caught.value.code}: {caught.value.reason}"
