"""The settings of a server, and their checks. Imports nothing of the web stack, so that a command line starts fast."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from ipaddress import ip_address

SSL_PASSWORD_VARIABLE = "OMNI_ACTORS_SSL_KEYFILE_PASSWORD"
"""The environment variable from which the command takes the password of the TLS key."""
API_KEY_VARIABLE = "OMNI_ACTORS_API_KEY"
"""The environment variable from which the command takes the API key."""

ANY_ORIGIN = "*"
"""Stands for all origins."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+", re.ASCII)
_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a server listens, which requests it refuses, and when it ends.

    Args:
        host, port: the address to listen on. Port 0: a free port.
        api_key: the key that clients must send. None: no key.
        max_body_bytes: the limit of a request's body and the files that its URLs name.
        max_event_bytes: the limit of one event that a client sends over a WebSocket. The longest turn of a user, 120 s
            of PCM in base64, has 7.7 MB.
        max_sessions: the limit of realtime sessions.
        max_sessions_per_address: the limit of those from one address. None: half of ``max_sessions``, at least 1.
        session_s: the longest realtime session, in seconds.
        session_items, session_bytes: the most items of a session's conversation, and bytes of text and recordings.
        allow_origins: the origins whose web pages may use the server; "*": all.
        allow_credentials: whether pages of these origins may send cookies and certificates.
        allow_hosts: the accepted values of the header Host, without a port. Empty: all.
        drain_notice_s: the time after the first signal in which /health reports 503 and new requests are still served.
        drain_s: the time that requests in progress have to end after that.
        max_connections: the limit of connections, which is lower if the process may not open that many files.
        max_connections_per_address: the limit of connections from one address.
        enable_admin: have the routes of an operator (``routes.admin``), for which there must be a key.
        exit_on_failed_stage: raise StageFailed when a stage is given up, instead of trying it again.
        page: serve the page at ``/``. None: only on a loopback address.
        chaos: let the page inject faults into workers, which needs a loopback address.
        otlp_endpoint: the URL of the OpenTelemetry collector (OTLP/HTTP) that receives traces. None: that of the
            environment, or no traces.
        cluster: where the workers run: the address of a Ray cluster's head, "auto" or "local". None: here.
        access_log: whether to log each request.
        ssl_certfile: a PEM file with the certificate of the server, which then speaks TLS only.
        ssl_keyfile: a PEM file with its private key. None: the certificate's file has it.
        ssl_keyfile_password: of an encrypted key.
        ssl_ca_certs: a PEM file; every client must have a certificate that one of these has signed.

    Raises ValueError for a bad key, origin, host or endpoint. The attributes have the normalized ones.
    """

    host: str = "127.0.0.1"
    port: int = 8091
    api_key: str | None = None
    max_body_bytes: int = 32 * 1024 * 1024
    max_event_bytes: int = 8 * 1024 * 1024
    max_sessions: int = 64
    max_sessions_per_address: int | None = None
    session_s: float = 3600.0
    session_items: int = 1000
    session_bytes: int = 16 * 1024 * 1024
    allow_origins: Collection[str] = ()
    allow_credentials: bool = False
    allow_hosts: Collection[str] = ()
    drain_notice_s: float = 0.0
    drain_s: float = 5.0
    max_connections: int = 1024
    max_connections_per_address: int = 512
    enable_admin: bool = False
    exit_on_failed_stage: bool = False
    otlp_endpoint: str | None = None
    cluster: str | None = None
    access_log: bool = False
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = field(default=None, repr=False)
    ssl_ca_certs: str | None = None
    page: bool | None = None
    chaos: bool = False

    @property
    def has_page(self) -> bool:
        """Whether the server has the page."""
        return is_loopback(self.host) if self.page is None else self.page

    def __post_init__(self) -> None:
        normalized = {
            "api_key": None if self.api_key is None else normalize_key(self.api_key),
            "allow_origins": frozenset(map(normalize_origin, self.allow_origins)),
            "allow_hosts": frozenset(map(normalize_host, self.allow_hosts)),
        }
        if self.enable_admin and self.api_key is None:
            raise ValueError(f"--enable-admin lets clients control the server; set --api-key or {API_KEY_VARIABLE}")
        if self.chaos and not (self.has_page and is_loopback(self.host)):
            raise ValueError("--chaos lets the page end workers; it needs the page and a loopback address as --host")
        for name, value in normalized.items():
            object.__setattr__(self, name, value)
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_keyfile_password or self.ssl_ca_certs):
            raise ValueError("the --ssl flags need --ssl-certfile")
        if self.allow_credentials and ANY_ORIGIN in self.allow_origins:
            raise ValueError("--allow-credentials would let every web page act for its users; name the origins")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(f"{self.otlp_endpoint!r} is not a URL such as http://localhost:4318")


def normalize_key(given: str) -> str:
    """Return the key without surrounding whitespace: the content of a file often ends with a newline.

    Raises ValueError for a key that is empty or that no Authorization header can carry.
    """
    key = given.strip()
    if not key:
        raise ValueError(f"the API key is empty; to serve without a key, give none, and unset {API_KEY_VARIABLE}")
    if not (key.isascii() and key.isprintable()):
        raise ValueError("an API key may contain printable ASCII characters only")
    return key


def is_loopback(host: str) -> bool:
    """Return whether a host name or an address, without brackets, is one of this machine's loopback interface."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def normalize_origin(given: str) -> str:
    """Return an origin as browsers write it, or "*". Raises ValueError if it is neither."""
    origin = given.lower().rstrip("/")
    if origin == ANY_ORIGIN:
        return origin
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(f"{given!r} is not an origin such as https://app.example.org or http://localhost:3000")
    return origin


def normalize_host(given: str) -> str:
    """Return a host's name or address in lower case, without brackets. Raises ValueError if it is not one."""
    host = given.lower().removeprefix("[").removesuffix("]")
    if not _HOST.fullmatch(host):
        try:
            ip_address(host)
        except ValueError as error:
            message = f"{given!r} is not a host such as api.example.org or 127.0.0.1, without a port"
            raise ValueError(message) from error
    return host


DEFAULTS = ServerSettings()
