"""Fetch files at http(s) URLs, from the domains that the operator allows and from nowhere else.

Rules
1. A URL's host must equal an allowed domain, on an allowed port. No allowed domain is numeric, so every spelling of an
   address is refused.
2. The fetcher resolves the name for each connection, checks the addresses, and connects to a checked address. So it
   does not matter what the name resolves to later. TLS and ``Host`` still use the name.
3. A redirect must obey the same rules, stay on the same host, and not lead from https to http.
4. Each piece is counted before it is kept. The environment has no effect (proxies, .netrc), and fetches share nothing
   (connections, cookies).
5. An error reveals only what the client can find out itself: no address, and no target of a redirect.
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
"""The most characters of a URL that names a file; a data: URL contains its file."""
CONNECT_S = 5.0
"""The time to connect to one address. A host may have several."""

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = {301, 302, 303, 307, 308}
_HEADERS = [("user-agent", f"omni_actors/{__version__}"), ("accept", "*/*"), ("accept-encoding", "identity")]
_DOMAIN = re.compile(r"(?=.{1,253}(?::|$))(?:[a-z0-9_-]{1,63}\.)*[a-z][a-z0-9-]{0,62}(?::[0-9]{1,5})?", re.ASCII)
_NOT_OF_URLS = re.compile(r"[\x00-\x20\x7f\\]")
_KEPT = "!#$%&'()*+,/:;=?@[]~"

_UNICAST = IPv6Network("2000::/3")
_PLATFORM = (IPv4Network("192.0.0.0/24"), IPv4Network("192.88.99.0/24"), IPv4Network("168.63.129.16/32"))
"""Protocol assignments (cloud metadata services among them), 6to4 relays, and Azure's platform endpoint."""

Address = IPv4Address | IPv6Address


class MediaUnavailable(Exception):
    """A file cannot be loaded. reason: what the client may know. code: a format string for the kind of file."""

    def __init__(self, reason: str, code: str) -> None:
        self.reason, self.code = reason, code
        super().__init__(reason)


def _refused(reason: str) -> MediaUnavailable:
    return MediaUnavailable(reason, "invalid_{}_url")


def _failed(reason: str) -> MediaUnavailable:
    return MediaUnavailable(reason, "failed_to_download_{}")


def is_public(address: Address) -> bool:
    """Return whether an address is public: no private network, not this machine, no cloud metadata service.

    Of IPv6, only global unicast without an embedded IPv4 address is public (so not mapped, NAT64, 6to4 or Teredo).
    """
    if isinstance(address, IPv6Address):
        embeds_ipv4 = address.sixtofour is not None or address.teredo is not None
        return address in _UNICAST and address.is_global and not embeds_ipv4
    return address.is_global and not address.is_multicast and not any(address in network for network in _PLATFORM)


def split_url(url: str) -> SplitResult:
    """Parse a URL. Raises MediaUnavailable, also for a URL that different parsers read differently."""
    try:
        if len(url) <= MAX_URL and not _NOT_OF_URLS.search(url):
            parts = urlsplit(url)
            _ = parts.port, url.encode()  # raises ValueError for a bad port or a lone surrogate
            return parts
    except ValueError as error:
        raise _refused("not a URL") from error
    raise _refused("not a URL" if len(url) <= MAX_URL else f"a URL of more than {MAX_URL} characters")


class Fetcher:
    """Fetches files from ``domains``: "example.org" (ports 80 and 443), "example.org:8443" (that port only).

    may_connect: whether the fetcher may connect to an address. Raises ValueError for an argument that is not a domain.
    """

    def __init__(self, domains: Iterable[str], may_connect: Callable[[Address], bool] = is_public) -> None:
        self._ports: dict[str, set[int]] = {}
        for domain in domains:
            host, _, port = domain.lower().partition(":")
            if not (_DOMAIN.fullmatch(domain.lower()) and 0 < int(port or 1) < 1 << 16):
                accepted = "a host name with or without a port (example.org, example.org:8443); not an address"
                raise ValueError(f"{domain!r} is not a domain; accepted: {accepted}")
            self._ports.setdefault(host, set()).update({int(port)} if port else _PORTS.values())
        self._network = _CheckedNetwork(may_connect)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return httpcore2.default_ssl_context()  # loads the system's certificates, which takes time

    async def fetch(self, url: str, add_bytes: Callable[[int], None]) -> bytes:
        """Return the file at ``url``. There is no time limit.

        add_bytes: called with each piece's size. Raises MediaUnavailable, and what ``add_bytes`` raises.
        """
        target = self._target(url)
        try:
            for _ in range(MAX_REDIRECTS + 1):
                tls = self._tls if target.scheme == b"https" else None
                connection = httpcore2.AsyncHTTPConnection(target.origin, tls, network_backend=self._network)
                async with connection, connection.stream("GET", target, headers=_HEADERS) as response:
                    if response.status not in _REDIRECTS:
                        return await _body(response, add_bytes)
                    url, target = self._redirect(url, target, _header(response, b"location"))
        except (httpcore2.NetworkError, httpcore2.TimeoutException, httpcore2.ProtocolError) as error:
            raise _failed("the connection to its host failed") from error
        raise _failed(f"there are more than {MAX_REDIRECTS} redirects")

    def _target(self, url: str) -> httpcore2.URL:
        """Check rule 1. Raises MediaUnavailable."""
        parts = split_url(url)
        if "@" in parts.netloc:
            raise _refused("the URL contains credentials")
        host, port = parts.hostname or "", _PORTS.get(parts.scheme) if parts.port is None else parts.port
        if parts.scheme not in _PORTS or port not in self._ports.get(host, ()):
            raise _refused("this server does not fetch from this host and port; a data: URL is always accepted")
        path = quote(parts.path or "/", _KEPT) + (f"?{quote(parts.query, _KEPT)}" if parts.query else "")
        return httpcore2.URL(scheme=parts.scheme, host=host, port=port, target=path)

    def _redirect(self, url: str, source: httpcore2.URL, location: bytes) -> tuple[str, httpcore2.URL]:
        """Check rule 3, and return the new URL. Raises MediaUnavailable."""
        try:
            url = urljoin(url, location.decode(errors="replace"))
            target = self._target(url)
        except (MediaUnavailable, ValueError) as error:
            raise _failed("the redirect leads to where this server does not fetch from") from error
        if target.host != source.host or (source.scheme, target.scheme) == (b"https", b"http"):
            raise _failed("the redirect leads to another host, or from https to http")
        return url, target


class _CheckedNetwork(httpcore2.AsyncNetworkBackend):
    """Implements rule 2."""

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
            raise _failed("its host name does not resolve") from error
        addresses = [address for *_, (name, *_) in found if self._may_connect(address := ip_address(name))]
        if not addresses:
            raise _refused("its host name resolves to no public address")
        for address in addresses:
            try:
                return await self._trio.connect_tcp(str(address), port, CONNECT_S)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        raise _failed("its host accepts no connection")


def _header(response: httpcore2.Response, name: bytes) -> bytes:
    return next((value for key, value in response.headers if key.lower() == name), b"")


async def _body(response: httpcore2.Response, add_bytes: Callable[[int], None]) -> bytes:
    """Return the body of a response. Raises MediaUnavailable, and what ``add_bytes`` raises."""
    if response.status != 200:
        raise _failed(f"its host responds with status {response.status}")
    if _header(response, b"content-encoding").lower() not in (b"", b"identity"):
        raise _failed("its host sends a compressed file, which was not requested")
    pieces = []
    async with aclosing(response.aiter_stream()) as stream:
        async for piece in stream:
            add_bytes(len(piece))
            pieces.append(piece)
    return b"".join(pieces)
