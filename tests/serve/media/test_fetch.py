"""Fetching from a real server on this machine, over good and bad connections."""

from __future__ import annotations

import ssl
from functools import partial
from typing import Any

import pytest
import trio

from omni_actors.serve.media.fetch import CONNECT_S, MAX_REDIRECTS
from tests.serve.media.local_site import HOST, PEM, Names, Site, TooMuch, fetch, fetcher, moved, ok, refusal


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


async def test_a_cancelled_fetch_leaves_no_connection_open(site: Site, names: Names) -> None:
    site.answers[b"/a.png"] = [b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", b""]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fetcher(site).fetch, site.url(), lambda size: nursery.cancel_scope.cancel())
    assert site.connections == 1
