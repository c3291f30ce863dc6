"""A client of an OpenAI-compatible server, for the commands that talk to one: ``chat``, ``top`` and ``bench``.

Rules
1. Everything that a server or the network can cause is a ``ServerError`` with one sentence.
2. Answers are read as they arrive. One event, one JSON value, and the text of one refusal are bounded.
3. Times are given by the caller: a command for people waits longer than a load generator.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import click
import httpx2
import msgspec
import trio

from omni_actors.errors import OmniError
from omni_actors.plain_text import clean

MAX_EVENT_BYTES = 64 * 2**20
"""A picture comes in one event."""
MAX_VALUE_BYTES = 4 * 2**20
"""The most bytes of a JSON value that describes the server, such as its list of models."""
MAX_REFUSAL_BYTES = 64 * 1024
MAX_KIND, MAX_MESSAGE = 80, 1000
"""The characters of an error that are kept."""
CONNECT_TIMEOUT_S = 10.0
UNKNOWN_ISSUER = {18, 19, 20, 21}
"""OpenSSL's codes for a certificate that no trusted one has signed, such as one that has signed itself."""
DONE = "[DONE]"
"""What the last event of a stream of completions says."""


Part = TypeVar("Part")


class ServerError(OmniError):
    """A server did not give an answer. Its words are cleaned for a terminal, and cut.

    Attributes:
        kind: A short name for counting: "429 overloaded", "timeout", "connection", "invalid answer", ….
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind = clean(kind)[:MAX_KIND]
        super().__init__(clean(message)[:MAX_MESSAGE])


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _ErrorObject(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorObject | str


class Server:
    """An OpenAI-compatible server.

    Args:
        url: Its address, with or without "/v1".
        http: The client that sends the requests. Its base URL ends with "/v1/".
    """

    def __init__(self, url: str, http: httpx2.AsyncClient) -> None:
        self.url, self._http = url, http

    async def get(self, path: str) -> Any:
        """Return the JSON value at ``path``, such as "models". Raises ServerError, also if it is too large."""
        async with self.stream("GET", path) as response:
            body = await read_body(response, MAX_VALUE_BYTES)
        with decoding():
            return msgspec.json.decode(body)

    async def models(self) -> list[str]:
        """Return the names of the server's models. Raises ServerError."""
        listed = await self.get("models")
        with decoding():
            return [each.id for each in msgspec.convert(listed, _Models).data]

    async def first_model(self) -> str:
        """Return the name of the first model. Raises ServerError, also if the server lists none."""
        models = await self.models()
        if not models:
            raise ServerError("invalid answer", f"{self.url} lists no model; name one: --model")
        return models[0]

    @asynccontextmanager
    async def stream(self, method: str, path: str, **content: Any) -> AsyncIterator[httpx2.Response]:
        """Send a request, and give the response when its head is here and its status is 200.

        Args:
            method: "GET" or "POST".
            path: Below "/v1/".
            content: As ``httpx2`` takes it: ``json``, ``data`` and ``files``, ``params``.

        Raises ServerError, also while the block reads the response. Cancellation closes the connection.
        """
        with self._errors():
            async with self._http.stream(method, path, **content) as response:
                if response.status_code != 200:
                    body, _ = await _beginning(response, MAX_REFUSAL_BYTES)
                    raise refusal(response.status_code, body)
                yield response

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except httpx2.TimeoutException as error:
            raise ServerError("timeout", f"{self.url} did not answer in time ({type(error).__name__})") from error
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise ServerError("connection", f"{self.url}: the connection failed: {_reason(error)}") from error
        except httpx2.SSEError as error:
            raise ServerError("invalid answer", f"{self.url}: an invalid stream of events: {error}") from error


def _reason(error: BaseException) -> str:
    """Return why a connection failed. An error of TLS has its words at the end of a chain of errors without any."""
    if attempts := _failed_attempts(error):
        return ", ".join(attempts)
    cause: BaseException | None = error
    while cause is not None and not str(cause):
        cause = cause.__cause__ or cause.__context__
    if not isinstance(cause, ssl.SSLCertVerificationError):
        return str(cause or type(error).__name__)
    hint = "; SSL_CERT_FILE=FILE trusts it" if cause.verify_code in UNKNOWN_ISSUER else ""
    return f"certificate verify failed: {cause.verify_message}{hint}"


def _failed_attempts(error: BaseException) -> list[str]:
    """Return why trio could not connect to any address of the host: they are in a group behind an error without it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ExceptionGroup):
        cause = cause.__cause__ or cause.__context__
    attempts = cause.exceptions if cause is not None else ()
    return sorted({os.strerror(each.errno) for each in attempts if isinstance(each, OSError) and each.errno})


@asynccontextmanager
async def open_server(url: str, api_key: str | None, *, read_timeout_s: float | None = None) -> AsyncIterator[Server]:
    """Open a client for the block.

    Args:
        url: The server's address, with or without "/v1".
        api_key: The key to send; None: none.
        read_timeout_s: The longest silence while an answer is read; None: no limit.

    Raises click.UsageError: ``url`` is not the URL of a server, no header can carry the key, or the certificates that
    SSL_CERT_FILE and SSL_CERT_DIR name cannot be read.
    """
    base = url.rstrip("/").removesuffix("/v1")
    try:
        parsed = httpx2.URL(base)
    except httpx2.InvalidURL as error:
        raise click.BadParameter(f"{url!r} is not a URL: {error}", param_hint="--url") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise click.BadParameter(f"{url!r} is not a URL such as http://localhost:8091", param_hint="--url")
    api_key = (api_key or "").strip()  # the content of a file often ends with a newline
    if not (api_key.isascii() and api_key.isprintable()):
        raise click.BadParameter("an API key may contain printable ASCII characters only", param_hint="--api-key")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)  # the defaults are 100 and 20
    timeout = httpx2.Timeout(CONNECT_TIMEOUT_S, read=read_timeout_s, write=read_timeout_s, pool=None)
    is_tls = parsed.scheme == "https"  # without TLS, no certificates are read, which takes time
    try:
        client = httpx2.AsyncClient(
            base_url=f"{base}/v1/", headers=headers, limits=limits, timeout=timeout, verify=is_tls, trust_env=is_tls
        )
    except OSError as error:  # an error of ssl is one, too
        files = os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR")
        raise click.UsageError(f"the certificates to trust cannot be read ({files}): {error}") from error
    async with client as http:
        yield Server(base, http)


async def events(response: httpx2.Response, decode: Callable[[httpx2.ServerSentEvent], Part]) -> AsyncGenerator[Part]:
    """Yield each server-sent event as ``decode`` returns it, until the stream's end.

    Read all of it, or leave by an exception of the event loop: the generators inside httpx2 are closed by nothing else.

    Raises ServerError for an event with an error or if ``decode`` does, and httpx2's errors, which ``Server.stream``
    converts. What follows such an event is not read.
    """
    source = aiter(httpx2.EventSource(response, MAX_EVENT_BYTES))
    async for event in source:
        if event.data == DONE:
            continue
        try:
            if event.data.startswith('{"error"'):
                raise refusal(200, event.data.encode())
            part = decode(event)
        except ServerError:
            await _end(source)
            raise
        yield part


async def _end(generator: AsyncIterator[Any]) -> None:
    """End a generator of httpx2, and those inside it: a cancellation does, and ``break`` would not."""
    with trio.CancelScope() as scope:
        scope.cancel()
        async for _ in generator:
            pass


async def read_body(response: httpx2.Response, limit: int) -> bytes:
    """Return a body of at most ``limit`` bytes. Raises ServerError: it is longer; the rest is not read."""
    body, is_whole = await _beginning(response, limit)
    if not is_whole:
        raise ServerError("invalid answer", f"the server's answer is longer than {limit} bytes")
    return body


async def _beginning(response: httpx2.Response, limit: int) -> tuple[bytes, bool]:
    """Return the first ``limit`` bytes of a body, and whether that is all."""
    pieces, size = list[bytes](), 0
    with trio.CancelScope() as scope:  # a cancellation ends the generators inside httpx2; ``break`` would not
        async for piece in response.aiter_bytes():
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                scope.cancel()
    return b"".join(pieces)[:limit], size <= limit


def refusal(status: int, body: bytes) -> ServerError:
    """Return the error for a refused request. ``body``: as the server sent it, in OpenAI's form or another one."""
    try:
        found = msgspec.json.decode(body, type=_ErrorBody).error
    except (ValueError, RecursionError):  # no JSON, another form, no UTF-8, or nested too deeply
        found = " ".join(body.decode(errors="replace").split())[:200]
    error = _ErrorObject(found) if isinstance(found, str) else found
    code = str(error.code or error.type or "")
    label = str(status) if status != 200 else "in the answer"
    message = error.message or "the server gave no reason"
    return ServerError(f"{label} {code}".strip(), message if status == 200 else f"{message} (status {status})")


@contextmanager
def decoding() -> Iterator[None]:
    """Raise ServerError if the block cannot decode what a server sent."""
    try:
        yield
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ServerError("invalid answer", f"the server's answer has an unexpected form: {error}") from error
