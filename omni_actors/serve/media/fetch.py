"""Files at http(s) URLs, from where the operator allows it and from nowhere else.

Rules
1. A URL's host is one that the operator has named, letter for letter, on a port that goes with it. No name that can be
   given is a number, so an address in its place, in whatever spelling, is refused.
2. A name is resolved here, for each connection, and the connection goes to an address that was checked: what the name
   leads to a moment later does not matter. The certificate and ``Host`` are still the name's.
3. A redirect is a URL under the same rules, on the same host, and not from https to http.
4. Each piece is counted before it is kept. Nothing of the environment has a part in this (proxies, .netrc), and nothing
   of one fetch in another (connections, cookies).
5. Of a failure the client is told what it could see itself: no address, and not where a redirect leads.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import aclosing
from functools import cached_property
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import httpcore2
import trio

from omni_actors import __version__

MAX_REDIRECTS = 3
MAX_URL = 8192
"""Characters, of a URL that names a file; a data: URL is one."""
CONNECT_S = 5.0
"""For one address. A host may have more."""

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = {301, 302, 303, 307, 308}
_HEADERS = [("user-agent", f"omni_actors/{__version__}"), ("accept", "*/*"), ("accept-encoding", "identity")]
_DOMAIN = re.compile(r"(?=.{1,253}(?::|$))(?:[a-z0-9_-]{1,63}\.)*[a-z][a-z0-9-]{0,62}(?::[0-9]{1,5})?", re.ASCII)
_NOT_OF_URLS = re.compile(r"[\x00-\x20\x7f\\]")
_KEPT = "!#$%&'()*+,/:;=?@[]~"

_UNICAST = IPv6Network("2000::/3")
_PLATFORM = (IPv4Network("192.0.0.0/24"), IPv4Network("192.88.99.0/24"), IPv4Network("168.63.129.16/32"))
"""Protocol assignments (a cloud's metadata among them), 6to4 relays, and where Azure's machines find their platform."""

Address = IPv4Address | IPv6Address


class MediaUnavailable(Exception):
    """There is no such file for this request. reason: what the client may know. code: with a place for the kind."""

    def __init__(self, reason: str, code: str) -> None:
        self.reason, self.code = reason, code
        super().__init__(reason)


def _refused(reason: str) -> MediaUnavailable:
    return MediaUnavailable(reason, "invalid_{}_url")


def _failed(reason: str) -> MediaUnavailable:
    return MediaUnavailable(reason, "failed_to_download_{}")


def is_public(address: Address) -> bool:
    """Whether everybody reaches the same machine there: no private network, no machine itself, no cloud's metadata.

    Of IPv6 only plain global unicast is: an IPv4 address may hide in the rest (mapped, NAT64), in 6to4 and in Teredo.
    """
    if isinstance(address, IPv6Address):
        hides_another = address.sixtofour is not None or address.teredo is not None
        return address in _UNICAST and address.is_global and not hides_another
    return address.is_global and not address.is_multicast and not any(address in network for network in _PLATFORM)


def split_url(url: str) -> SplitResult:
    """Raises MediaUnavailable for what is read differently by different readers, too."""
    try:
        if len(url) <= MAX_URL and not _NOT_OF_URLS.search(url):
            parts = urlsplit(url)
            _ = parts.port, url.encode()  # may raise, too: a port that is none, half a character
            return parts
    except ValueError as error:
        raise _refused("this is not a URL") from error
    raise _refused("this is not a URL" if len(url) <= MAX_URL else f"a URL of more than {MAX_URL} characters")


class Fetcher:
    """Gets files from ``domains``: "example.org" (ports 80 and 443), "example.org:8443" (that one).

    may_connect: which addresses a name may lead to. Raises ValueError for a domain that is none.
    """

    def __init__(self, domains: Iterable[str], may_connect: Callable[[Address], bool] = is_public) -> None:
        self._ports: dict[str, set[int]] = {}
        for domain in domains:
            host, _, port = domain.lower().partition(":")
            if not (_DOMAIN.fullmatch(domain.lower()) and 0 < int(port or 1) < 1 << 16):
                accepted = "a host's name, with or without a port (example.org, example.org:8443), and no address"
                raise ValueError(f"{domain!r} is not a domain; accepted: {accepted}")
            self._ports.setdefault(host, set()).update({int(port)} if port else _PORTS.values())
        self._network = _Checked(may_connect)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return httpcore2.default_ssl_context()  # reads a hundred certificates

    async def fetch(self, url: str, hold: Callable[[int], None]) -> bytes:
        """What is there, however long it takes. hold: called with each piece's size; what it raises ends the fetch.

        Raises MediaUnavailable.
        """
        place = self._place(url)
        try:
            for _ in range(MAX_REDIRECTS + 1):
                async with (
                    self._connection(place) as connection,
                    connection.stream("GET", place, headers=_HEADERS) as answer,
                ):
                    if answer.status not in _REDIRECTS:
                        return await _body(answer, hold)
                    url, place = self._redirected(url, place, _header(answer, b"location"))
        except (httpcore2.NetworkError, httpcore2.TimeoutException, httpcore2.ProtocolError) as error:
            raise _failed("the connection to its host failed") from error
        raise _failed(f"it is redirected more than {MAX_REDIRECTS} times")

    def _place(self, url: str) -> httpcore2.URL:
        """Rule 1. Raises MediaUnavailable."""
        parts = split_url(url)
        if "@" in parts.netloc:
            raise _refused("a URL with credentials in it")
        host, port = parts.hostname or "", _PORTS.get(parts.scheme) if parts.port is None else parts.port
        if parts.scheme not in _PORTS or port not in self._ports.get(host, ()):
            raise _refused("this server fetches nothing from there; a data: URL is always accepted")
        target = quote(parts.path or "/", _KEPT) + (f"?{quote(parts.query, _KEPT)}" if parts.query else "")
        return httpcore2.URL(scheme=parts.scheme, host=host, port=port, target=target)

    def _connection(self, place: httpcore2.URL) -> httpcore2.AsyncHTTPConnection:
        tls = self._tls if place.scheme == b"https" else None
        return httpcore2.AsyncHTTPConnection(place.origin, tls, network_backend=self._network)

    def _redirected(self, url: str, place: httpcore2.URL, location: bytes) -> tuple[str, httpcore2.URL]:
        """Rule 3. Raises MediaUnavailable."""
        try:
            url = urljoin(url, location.decode(errors="replace"))
            target = self._place(url)
        except (MediaUnavailable, ValueError) as error:
            raise _failed("it is redirected to where this server fetches nothing from") from error
        if target.host != place.host or (place.scheme, target.scheme) == (b"https", b"http"):
            raise _failed("it is redirected to another host, or from https to http")
        return url, target


class _Checked(httpcore2.AsyncNetworkBackend):
    """Rule 2."""

    def __init__(self, may_connect: Callable[[Address], bool]) -> None:
        self._may_connect, self._trio = may_connect, httpcore2.TrioBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 (the base class has it)
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Raises MediaUnavailable."""
        try:
            found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise _failed("the name of its host leads nowhere") from error
        addresses = [address for *_, (name, *_) in found if self._may_connect(address := ip_address(name))]
        if not addresses:
            raise _refused("the name of its host leads to no public address")
        for address in addresses:
            try:
                return await self._trio.connect_tcp(str(address), port, CONNECT_S)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        raise _failed("its host takes no connection")


def _header(answer: httpcore2.Response, name: bytes) -> bytes:
    return next((value for key, value in answer.headers if key.lower() == name), b"")


async def _body(answer: httpcore2.Response, hold: Callable[[int], None]) -> bytes:
    """Raises MediaUnavailable, and what ``hold`` raises."""
    if answer.status != 200:
        raise _failed(f"its host answers with status {answer.status}")
    if _header(answer, b"content-encoding").lower() not in (b"", b"identity"):
        raise _failed("its host sends it compressed, unasked")
    pieces = []
    async with aclosing(answer.aiter_stream()) as stream:
        async for piece in stream:
            hold(len(piece))
            pieces.append(piece)
    return b"".join(pieces)
