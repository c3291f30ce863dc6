"""Restrict which web pages may use the server, and under which host names.

Rules
1. A browser sends a page's origin in the header ``Origin``, and lets any page send a simple POST anywhere, including
   localhost. A page of the server's own origin may use the server, and so may pages of the origins that the operator
   allows; "*" stands for all.
2. Other origins are refused if the operator allows some, or if there is no API key, because then nothing else keeps a
   page out. Programs send no ``Origin`` and are not affected.
3. If the operator names hosts, a request for another ``Host`` is refused. This protects from DNS rebinding: a page
   whose host name resolves to this machine has the server's own origin.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from omni_actors.serve.http.errors import HTTPError, quote_value
from omni_actors.serve.settings import ANY_ORIGIN

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class OriginCheck:
    """An ASGI application that wraps another one. Responses to allowed origins get the headers of CORS.

    Args:
        app: the wrapped application.
        origins: the allowed origins, as ``settings.normalize_origin`` returns them.
        hosts: the allowed hosts, as ``settings.normalize_host`` returns them; empty: all.
        has_key: whether clients must send an API key.
        allows_credentials: whether pages of the allowed origins may send cookies and certificates.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        origins: Collection[str],
        hosts: Collection[str],
        has_key: bool,
        allows_credentials: bool = False,
    ) -> None:
        if origins:
            app = CORSMiddleware(
                app,
                allow_origins=origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                allow_credentials=allows_credentials,
                allow_private_network=True,
                expose_headers=["retry-after", "x-request-id", "x-should-retry"],
            )
        self._app, self._origins, self._hosts = app, origins, hosts
        self._checks_origin = ANY_ORIGIN not in origins and (bool(origins) or not has_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] in ("http", "websocket"):
            try:
                self._check(Headers(scope=scope))
            except HTTPError as error:
                app = error.response()
        await app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        """Raises HTTPError 421 (host) or 403 (origin)."""
        host = headers.get("host", "").lower()
        if self._hosts and host_name(host) not in self._hosts:
            raise HTTPError(421, f"this server does not serve the host {quote_value(host)}", code="unknown_host")
        if not self._checks_origin:
            return
        for origin in headers.getlist("origin"):
            if origin not in self._origins and not _is_own(origin.lower(), host):
                message = f"pages of the origin {quote_value(origin)} may not use this server; see --allow-origin"
                raise HTTPError(403, message, code="foreign_origin")


def host_name(host: str) -> str | None:
    """Return the host of a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _is_own(origin: str, host: str) -> bool:
    """Return whether ``origin`` is the one under which the client reached the server."""
    scheme, _, place = origin.partition("://")
    port = _DEFAULT_PORTS.get(scheme, "")
    return place != "" and place.removesuffix(port) == host.removesuffix(port)
