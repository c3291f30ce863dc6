"""Fetching from a real server on this machine, and all that must not be fetched.

Rules
1. A test that may connect to this machine shows this in the addresses that it allows; the attacks run under the policy
   that a server has, against a server that counts its connections.
2. Names are resolved by the test (trio's own hook), so that they lead where an attacker would have them lead.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from omni_actors.serve.media.fetch import CONNECT_S, MAX_REDIRECTS, MAX_URL, Fetcher, MediaUnavailable, is_public

HOST = "files.example.org"
LOOPBACK = ip_address("127.0.0.1")
Answer = Callable[[bytes], Sequence[bytes]]


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


@pytest.fixture
async def site(nursery: trio.Nursery) -> Site:
    site = Site()
    [listener] = await nursery.start(partial(trio.serve_tcp, site.serve, 0, host="127.0.0.1"))
    site.port = listener.socket.getsockname()[1]
    return site


@pytest.fixture
async def names() -> Names:
    names = Names()
    trio.socket.set_custom_hostname_resolver(names)  # for as long as this test's trio.run
    return names


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
    """Why there is no file, as the client is reason, and under which code."""
    with pytest.raises(MediaUnavailable) as caught:
        await fetch(fetcher, url)
    return f"{caught.value.code}: {caught.value.reason}"


# what is allowed


async def test_a_file_arrives_unchanged(site: Site, names: Names) -> None:
    site.answers[b"/a%20b/%C3%A9.png?x=1&y=%7B"] = ok(bytes(range(256)))
    assert await fetch(fetcher(site), site.url("/a%20b/é.png?x=1&y={#part", HOST.upper())) == bytes(range(256))
    [request] = site.requests
    head = request.decode().lower().split("\r\n")
    assert f"host: {HOST}:{site.port}" in head
    assert "accept-encoding: identity" in head
    assert not any(line.startswith(("cookie", "authorization", "referer")) for line in head)
    assert names.asked == [HOST]


@pytest.mark.parametrize(
    "answer",
    [
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n6\r\n of it\r\n0\r\n\r\n"],
        [b"HTTP/1.0 200 OK\r\n\r\nhalf", b" of it"],
        [b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n", *ok(b"half of it")],
    ],
    ids=["chunked", "to the end of the connection", "after an informational answer"],
)
async def test_the_ways_a_body_may_come(site: Site, names: Names, answer: list[bytes]) -> None:
    site.answers[b"/a.png"] = answer
    assert await fetch(fetcher(site), site.url()) == b"half of it"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_on_the_same_host(site: Site, names: Names, status: int) -> None:
    site.answers = {b"/a.png": moved("b/../c.png", status), b"/c.png": ok(b"here")}
    assert await fetch(fetcher(site), site.url()) == b"here"
    assert set(names.asked) == {HOST}


async def test_as_many_redirects_as_allowed_and_one_more(site: Site, names: Names) -> None:
    site.answers = {f"/{n}".encode(): moved(f"/{n - 1}") for n in range(1, MAX_REDIRECTS + 2)}
    site.answers[b"/0"] = ok(b"here")
    assert await fetch(fetcher(site), site.url(f"/{MAX_REDIRECTS}")) == b"here"
    assert "more than 3 redirects" in await refusal(fetcher(site), site.url(f"/{MAX_REDIRECTS + 1}"))


async def test_the_next_address_if_one_accepts_no_connection(site: Site, names: Names) -> None:
    names.leads_to = [["127.0.0.2", "127.0.0.1"]]
    site.answers[b"/a.png"] = ok(b"here")
    assert await fetch(fetcher(site), site.url()) == b"here"


async def test_an_address_that_is_silent_is_given_up_for_the_next(
    site: Site, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a firewall that drops packets. The connection hangs in virtual time."""
    names.leads_to = [["127.0.0.2", "127.0.0.1"]]
    site.answers[b"/a.png"] = ok(b"here")
    really = trio.open_tcp_stream
    given_up: list[float] = []

    async def open_tcp_stream(host: str, port: int, **arguments: Any) -> trio.SocketStream:
        if host == "127.0.0.2":
            given_up.append(trio.current_effective_deadline() - trio.current_time())
            raise trio.TooSlowError
        return await really(host, port, **arguments)

    monkeypatch.setattr(trio, "open_tcp_stream", open_tcp_stream)
    assert await fetch(fetcher(site), site.url()) == b"here"
    [limit_s] = given_up
    assert 0 < limit_s <= CONNECT_S


@pytest.fixture
async def secure_site(nursery: trio.Nursery) -> Site:
    """A server with a certificate for HOST."""
    site = Site()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(PEM)

    async def serve(stream: trio.SocketStream) -> None:
        secure = trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
        try:
            await secure.do_handshake()
        except trio.BrokenResourceError:
            return  # it does not like the certificate
        await site.serve(secure)

    [listener] = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
    site.port = listener.socket.getsockname()[1]
    return site


PEM = Path(__file__).parent / f"{HOST}.pem"


async def test_a_certificate_is_held_against_the_name_and_not_the_address(
    secure_site: Site, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"https://{HOST}:{secure_site.port}/a.png"
    secure_site.answers[b"/a.png"] = ok(b"here")
    assert "connection to its host failed" in await refusal(fetcher(secure_site), url)
    monkeypatch.setenv("SSL_CERT_FILE", str(PEM))
    known = fetcher(secure_site, f"other.example.org:{secure_site.port}")
    assert await fetch(known, url) == b"here"
    assert "connection to its host failed" in await refusal(known, url.replace("files.", "other."))
    assert len(secure_site.requests) == 1


async def test_a_redirect_does_not_leave_https(
    secure_site: Site, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(PEM))
    secure_site.answers[b"/a.png"] = moved(secure_site.url("/b.png"))
    url = f"https://{HOST}:{secure_site.port}/a.png"
    assert "from https to http" in await refusal(fetcher(secure_site), url)


# what is not


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/a.png",
        "http://files.example.org.evil.org/a.png",
        "http://evil-files.example.org/a.png",
        "http://evil.files.example.org/a.png",
        "http://files.example.org./a.png",
        "http://files.example.org:8080/a.png",
        "http://files.example.org:22/a.png",
        "http://files.example.org:0/a.png",
        "http://evil.org#files.example.org/a.png",
        "http://evil.org?files.example.org/a.png",
        "http://evil.org;files.example.org/a.png",
        "http://files。example。org/a.png",
        "http:/files.example.org/a.png",
        "http:files.example.org",
        "http:///a.png",
        "http://",
        "https:",
        "http://[::1]/a.png",
        "http://[::ffff:127.0.0.1]/a.png",
        "http://127.0.0.1/a.png",
        "http://127.1/a.png",
        "http://2130706433/a.png",
        "http://0x7f000001/a.png",
        "http://0177.0.0.1/a.png",
        "http://169.254.169.254/latest/meta-data/",
        "http://127.0.0.1.nip.io/a.png",
        # not a URL, or one that another reader would read differently
        "http://files.example.org:port/a.png",
        "http://files.example.org:99999/a.png",
        "http://[::1/a.png",
        "http://files.example.org\\@127.0.0.1/a.png",
        "http://127.0.0.1\t@files.example.org/a.png",
        "http://files.example.org/a.png HTTP/1.1\r\nHost: evil.org",
        "http://files.example.org/a\n.png",
        " http://files.example.org/a.png",
        f"http://files.example.org/{'a' * MAX_URL}",
        # credentials
        "http://user@files.example.org/a.png",
        "http://user:password@files.example.org/a.png",
        "http://@files.example.org/a.png",
        "http://evil.org@files.example.org/a.png",
    ],
)
async def test_urls_that_are_never_requested(site: Site, names: Names, url: str) -> None:
    assert (await refusal(guarded(site), url)).startswith("invalid_{}_url: ")
    assert (names.asked, site.connections) == ([], 0)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.0.0.53", "127.255.255.254", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1"),
        *("169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.192", "192.0.2.1", "198.18.0.1", "198.51.100.1"),
        *("203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255", "168.63.129.16"),
        *("::1", "::", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b:1::1"),
        *("fe80::1", "fe80::1%lo", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "100::1", "2001:db8::1"),
        *("2002:7f00:1::1", "2002:808:808::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2"),
    ],
)
async def test_an_address_that_is_not_public(site: Site, names: Names, address: str) -> None:
    assert not is_public(ip_address(address))
    names.leads_to = [[address]]
    reason = await refusal(guarded(site), site.url())
    assert reason == "invalid_{}_url: its host name resolves to no public address"
    assert site.connections == 0


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.215.14", "172.32.0.1", "100.128.0.1", "2606:4700:4700::1111", "2a00:1450:4001::200e"]
)
def test_a_public_address(address: str) -> None:
    assert is_public(ip_address(address))


async def test_this_machine_by_its_name(site: Site) -> None:
    """With the machine's own resolver."""
    reason = await refusal(guarded(site), site.url(host="localhost"))
    assert reason == "invalid_{}_url: its host name resolves to no public address"
    assert site.connections == 0


async def test_of_several_addresses_only_those_that_are_allowed_are_connected_to(site: Site, names: Names) -> None:
    names.leads_to = [["::1", "10.0.0.1", "127.0.0.1"]]
    allowing = Fetcher([f"{HOST}:{site.port}"], lambda address: address == LOOPBACK)
    site.answers[b"/a.png"] = ok(b"here")
    assert await fetch(allowing, site.url()) == b"here"


async def test_a_name_that_resolves_differently_later_has_no_effect(site: Site, names: Names) -> None:
    """The fetcher connects to the checked address: it resolves the name once."""
    names.leads_to = [["127.0.0.1"], ["127.0.0.2"]]
    seen: list[str] = []

    def only_the_first(address: Any) -> bool:
        seen.append(str(address))
        return str(address) == "127.0.0.1"

    site.answers[b"/a.png"] = ok(b"here")
    assert await fetch(Fetcher([f"{HOST}:{site.port}"], only_the_first), site.url()) == b"here"
    assert (seen, len(names.asked)) == (["127.0.0.1"], 1)


async def test_a_name_that_resolves_to_a_private_address_at_the_redirect(site: Site, names: Names) -> None:
    """Each connection is checked, also to the same host."""
    names.leads_to = [["127.0.0.1"], ["10.0.0.1"]]
    site.answers = {b"/a.png": moved("/b.png"), b"/b.png": ok(b"here")}
    allowing = Fetcher([f"{HOST}:{site.port}"], lambda address: address == LOOPBACK)
    assert "no public address" in await refusal(allowing, site.url())
    assert site.connections == 1


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:{port}/b.png",
        "http://[::1]:{port}/b.png",
        "//localhost:{port}/b.png",
        "http://localhost:{port}/b.png",
        "http://other.example.org:{port}/b.png",
        "http://user:password@files.example.org:{port}/b.png",
        "http://files.example.org:22/b.png",
        "file:///etc/passwd",
        "data:image/png;base64,AAAA",
        "ftp://files.example.org/b.png",
        "http://files.example.org:{port}\\@127.0.0.1/b.png",
        "http://[",
    ],
)
async def test_a_redirect_to_anywhere_else(site: Site, names: Names, location: str) -> None:
    """Also to another allowed host. The error does not reveal the target."""
    site.answers = {b"/a.png": moved(location.format(port=site.port)), b"/b.png": ok(b"here")}
    allowing = fetcher(site, f"localhost:{site.port}", f"other.example.org:{site.port}")
    reason = await refusal(allowing, site.url())
    assert reason.startswith("failed_to_download_{}: the redirect leads to ")
    assert not any(word in reason for word in ("localhost", "127", "example", "passwd", str(site.port)))
    assert len(site.requests) == 1


@pytest.mark.parametrize(
    "domain",
    [
        *("127.0.0.1", "127.1", "2130706433", "0x7f000001", "1.0x7f", "[::1]", "::1", "10.0.0.1:80"),
        *("", "*", "*.example.org", ".org", "example..org", "example.org.", "http://example.org", "example.org/x"),
        *("example.org:", "example.org:0", "example.org:65536", "example.org:http", "user@example.org", "exämple.org"),
        *("example.org\n", " example.org", "a" * 64 + ".org", "a." * 127 + "org"),
    ],
)
def test_an_invalid_domain(domain: str) -> None:
    with pytest.raises(ValueError, match="is not a domain"):
        Fetcher([domain])


@pytest.mark.parametrize(
    ("domains", "url", "allowed"),
    [
        (["files.example.org"], "http://files.example.org/", True),
        (["files.example.org"], "https://files.example.org/", True),
        (["files.example.org"], "http://files.example.org:443/", True),
        (["Files.Example.Org"], "http://files.example.org/", True),
        (["files.example.org:8443"], "https://files.example.org:8443/", True),
        (["files.example.org:8443"], "https://files.example.org/", False),
        (["files.example.org:8443", "files.example.org"], "https://files.example.org/", True),
        ([], "https://files.example.org/", False),
    ],
)
async def test_a_port_goes_with_its_domain(names: Names, domains: list[str], url: str, allowed: bool) -> None:
    names.leads_to = [[]]
    reason = await refusal(Fetcher(domains), url)
    assert ("does not resolve" in reason) == allowed == bool(names.asked)


# what goes wrong


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([b"HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\n\r\nsecret"], "its host responds with status 404"),
        ([b"HTTP/1.1 206 Partial Content\r\nContent-Length: 4\r\n\r\nhalf"], "its host responds with status 206"),
        ([b"HTTP/1.1 304 Not Modified\r\n\r\n"], "its host responds with status 304"),
        ([b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n"], "more than 3 redirects"),
        (ok(b"\x1f\x8b", "Content-Encoding: gzip"), "compressed"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"], "the connection to its host failed"),
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], "the connection to its host failed"),
        ([b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000], "the connection to its host failed"),
        ([], "the connection to its host failed"),
    ],
)
async def test_a_response_that_is_not_a_file(site: Site, names: Names, answer: list[bytes], words: str) -> None:
    site.answers[b"/a.png"] = answer
    reason = await refusal(fetcher(site), site.url())
    assert reason.startswith("failed_to_download_{}: ")
    assert words in reason
    assert "secret" not in reason


@pytest.mark.parametrize(("leads_to", "words"), [([], "does not resolve"), (["127.0.0.2"], "accepts no connection")])
async def test_a_host_that_is_not_there(site: Site, names: Names, leads_to: list[str], words: str) -> None:
    names.leads_to = [leads_to]
    reason = await refusal(fetcher(site), site.url())
    assert words in reason
    assert "127" not in reason


@pytest.mark.parametrize("declared", [True, False])
async def test_a_file_that_is_too_large_is_not_read_to_its_end(site: Site, names: Names, declared: bool) -> None:
    head = b"Content-Length: 4000000000" if declared else b"Connection: close"
    site.answers[b"/a.png"] = [b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + bytes(2000), b""]
    with pytest.raises(TooMuch):
        await fetch(fetcher(site), site.url())


async def test_who_does_not_wait_for_a_slow_host_leaves_nothing_open(site: Site, names: Names) -> None:
    site.answers[b"/a.png"] = [b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", b""]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fetcher(site).fetch, site.url(), lambda size: nursery.cancel_scope.cancel())
    assert site.connections == 1
